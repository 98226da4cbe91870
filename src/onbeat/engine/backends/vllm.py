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
from onbeat.engine.vllm.runner import VllmRunner
from onbeat.engine.vllm.surface import model_config_of, settings_of, start_executor, why_whole
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

    def __init__(self, config: EngineConfig, device: DeviceConfig, reason: str) -> None:
        if config.speculative is not None:
            raise ConfigError("--backend vllm takes no --speculative-config; leave it out")
        self.name, self.device = config.model.name, device
        self._settings = settings_of(config, device)
        self.model = model_config_of(self._settings)
        self.embeds = not self.model.has_head
        policy = config.limits.policy or DEFAULT_POLICY
        self.why_whole = why_whole(self._settings)
        if self.why_whole is not None and not composition(policy).whole_prompts:
            raise ConfigError(
                f"vLLM computes the prompts of {self.name} whole, since {self.why_whole}; policy {policy!r} "
                "cuts them, so add --policy prefill-first"
            )
        self.description = f"by vLLM {self._settings.version} ({reason})"

    def fit(
        self,
        config: EngineConfig,
        settle: SettleLimits,
        draft: CheckpointBackend | None = None,  # noqa: ARG002 -- refused above
    ) -> SchedulerConfig:
        """Return limits for as many blocks as there may be: vLLM counts them once the weights are there."""
        if self.device.device.type == "cpu":
            spare = free_for(config.memory_share, self.device.device).num_bytes
            self._settings.take(kv_cache_memory_bytes=config.kv_cache_memory_bytes or modest_kv_bytes(spare))
        return settle(_MANY)

    def start(
        self, limits: SchedulerConfig, say: OnProgress, room: Room, propose: Propose | None
    ) -> tuple[Runner, SchedulerConfig]:
        """Let vLLM load the model, and count its blocks; see `Backend.start`."""
        assert propose is None, "drafts are refused above"
        self._settings.take(max_num_batched_tokens=limits.max_num_batched_tokens)
        surface = start_executor(self._settings)
        num_blocks, block_size = surface.num_kv_blocks, surface.block_size
        limits = room.settle(num_blocks)
        if block_size != limits.block_size:
            say(f"KV blocks have {block_size} tokens, as vLLM needs them for this model")
            limits = replace(limits, block_size=block_size, num_blocks=num_blocks)
        if surface.num_slots and limits.enable_prefix_caching:
            say("prefix caching is off: a prefix would need the state of its layers without attention")
            limits = replace(limits, enable_prefix_caching=False)
        return VllmRunner(limits, surface, self.model, self.device), limits

    def remarks(self, config: EngineConfig) -> Iterator[str]:  # noqa: ARG002
        """Yield what this engine does otherwise; see `Backend.remarks`."""
        if self.device.device.type == "cpu":
            yield "seeds are not kept: vLLM cannot go back in the random numbers of a CPU"
