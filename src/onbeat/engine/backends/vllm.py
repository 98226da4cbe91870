"""vLLM's executor as a backend: what the engines here do not have, runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from onbeat.core.errors import ConfigError
from onbeat.core.request import Pooling
from onbeat.engine.backends.base import Backend, CheckpointBackend, Propose, Room, SettleLimits
from onbeat.engine.device import DeviceConfig
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.executor import Runner
from onbeat.engine.memory import free_for, modest_kv_bytes
from onbeat.engine.progress import OnProgress
from onbeat.engine.speculation.same_tokenizer import check_same_tokenizer
from onbeat.engine.vllm import surface as surfaces
from onbeat.engine.vllm.handshake import TRIED, can_compare, compare_steps, is_tried
from onbeat.engine.vllm.runner import VllmRunner
from onbeat.hub.files import ModelFiles
from onbeat.hub.resolve import resolve_model
from onbeat.scheduler.replica.policies import composition
from onbeat.scheduler.scheduler_config import DEFAULT_POLICY, SchedulerConfig

_MANY = 2**31
"""KV blocks: as many as one may want, until vLLM has counted what there is room for."""


class VllmBackend(Backend):
    """Any model that vLLM runs.

    Parameters
    ----------
    config : what the user asked for.
    device : where it runs.
    reason : why it and not another, for people.

    Raises
    ------
    ConfigError : vLLM does not run the model, or not so; with vLLM's own reason.
    """

    poolings = get_args(Pooling)
    drafts_ahead = True

    def __init__(self, config: EngineConfig, device: DeviceConfig, reason: str) -> None:
        draft = _draft_model(config)
        self.name, self.device = config.model.name, device
        self._settings = surfaces.settings_of(config, device, draft)
        self.model = surfaces.model_config_of(self._settings)
        self.embeds = not self.model.has_head
        policy = config.limits.policy or DEFAULT_POLICY
        self.has_workers = surfaces.has_workers(self._settings.config)
        self.why_whole = surfaces.why_whole(self._settings)
        if self.why_whole is not None and not composition(policy).whole_prompts:
            raise ConfigError(
                f"vLLM computes the prompts of {self.name} whole, since {self.why_whole}; policy {policy!r} "
                "cuts them, so add --policy prefill-first"
            )
        self.left_out = surfaces.left_out(self._settings)
        self.description = f"by vLLM {self._settings.version} ({reason})"

    def fit(
        self,
        config: EngineConfig,
        settle: SettleLimits,
        draft: CheckpointBackend | None = None,  # noqa: ARG002 -- vLLM's workers have it
    ) -> SchedulerConfig:
        """Return limits for as many blocks as there may be: vLLM counts them once the weights are there."""
        if self.device.device.type == "cpu":
            spare = free_for(config.memory_share, self.device.device).num_bytes
            num_bytes = config.kv_cache_memory_bytes or modest_kv_bytes(spare)
            num_workers = self._settings.config.parallel_config.world_size
            self._settings.take(kv_cache_memory_bytes=num_bytes // num_workers)
        return settle(_MANY)

    def start(
        self, limits: SchedulerConfig, say: OnProgress, room: Room, propose: Propose | None
    ) -> tuple[Runner, SchedulerConfig]:
        """Let vLLM load the model, and count its blocks; see `Backend.start`."""
        assert propose is None, "vLLM's workers make drafts"
        # A model that makes drafts takes some tokens more of each request than the step has.
        num_more = limits.num_lookahead_tokens * limits.max_num_seqs
        self._settings.take(max_num_batched_tokens=limits.max_num_batched_tokens + num_more)
        surface = surfaces.start_executor(self._settings)
        try:
            return self._runner(surface, limits, say, room)
        except BaseException:
            surface.close()
            raise

    def _runner(
        self, surface: surfaces.VllmExecutor, limits: SchedulerConfig, say: OnProgress, room: Room
    ) -> tuple[Runner, SchedulerConfig]:
        num_blocks, block_size = surface.num_kv_blocks, surface.block_size
        limits = room.settle(num_blocks)
        if block_size != limits.block_size:
            say(f"KV blocks have {block_size} tokens, as vLLM needs them for this model")
            limits = replace(limits, block_size=block_size, num_blocks=num_blocks)
        if surface.num_slots and limits.enable_prefix_caching:
            say("prefix caching is off: a prefix would need the state of its layers without attention")
            limits = replace(limits, enable_prefix_caching=False)
        runner = VllmRunner(limits, surface, self.model, self.device)
        if not self._is_known and self.model.has_head and can_compare(runner):
            compare_steps(runner)
        return runner, limits

    @property
    def _is_known(self) -> bool:
        """Whether steps of this version have been compared on such a device before."""
        return self.device.device.type == "cpu" and is_tried(self._settings.version)

    def remarks(self, config: EngineConfig) -> Iterator[str]:
        """Yield what this engine does otherwise; see `Backend.remarks`."""
        version = self._settings.version
        if not is_tried(version):
            yield (
                f"vLLM {version} has not been tried with onbeat, {' to '.join(TRIED)} have: a few small "
                "steps are compared now"
            )
        if config.speculative is not None:
            yield (
                f"speculative decoding by vLLM ({config.speculative.method}, at most "
                f"{config.speculative.num_speculative_tokens} drafts); requests with a grammar get no drafts"
            )
        if self.device.device.type == "cpu":
            yield "seeds are not kept: vLLM cannot go back in the random numbers of a CPU"


def _draft_model(config: EngineConfig) -> ModelFiles | None:
    """Return where the weights lie that make drafts; None where no others than the model's do.

    Raises
    ------
    ConfigError : they cannot be found, have another tokenizer, or vLLM has no such drafts.
    """
    speculative = config.speculative
    if speculative is None:
        return None
    if speculative.method == "grammar":
        raise ConfigError("method 'grammar' has no drafts with --backend vllm; take method 'ngram'")
    if speculative.model is None:
        return None
    files = resolve_model(speculative.model, needs_weights=config.load_format != "dummy")
    if speculative.method == "draft-model":
        check_same_tokenizer(config.model, files)
    return files
