"""vLLM's executor as a backend: what the engines here do not have, runs.

At the start, rows of a few small steps are compared: whether this vLLM reads steps as they are meant.

Legend: T tokens whose log-probabilities are compared.
"""

# ruff: noqa: N803, N806 -- tensor names carry shape suffixes

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.core.request import Pooling, Request, SamplingParams
from onbeat.core.step import AdmittedRequest, BatchShape, ScheduledRequest, SchedulerOutput
from onbeat.engine.backends.base import Backend, CheckpointBackend, Propose, Room, Runner, SettleLimits
from onbeat.engine.device import DeviceConfig
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.memory import free_for, modest_kv_bytes
from onbeat.engine.progress import OnProgress
from onbeat.engine.speculation.same_tokenizer import check_same_tokenizer
from onbeat.engine.vllm import surface as surfaces
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


TRIED = ("0.30", "0.33")
"""First and last version whose tokens have been compared with the models' own."""
_NUM_TOKENS = 16
"""Of the vocabulary, whose log-probabilities are compared."""
_ROUNDING = 0.1
"""Mean distance of log-probabilities that rounding may make, however alike two prompts are to the model."""
_NUM_BLOCKS = 7
_LEAST = 4
"""Tokens of a prompt that is cut in two."""


def is_tried(version: str) -> bool:
    """Return whether it lies between the versions that have been tried."""
    first, number, last = (
        [int(each) for each in re.findall(r"\d+", text)[:2]] for text in (TRIED[0], version, TRIED[1])
    )
    return first <= number <= last


def can_compare(runner: VllmRunner) -> bool:
    """Return whether the limits leave room for the steps that are compared."""
    limits = runner.limits
    return limits.max_num_seqs > 1 and limits.num_blocks >= _NUM_BLOCKS and _prompt_size(runner) >= _LEAST


def compare_steps(runner: VllmRunner) -> None:
    """Run a prompt whole, in chunks, after a preemption and behind a cached prefix: it may not matter.

    What is a difference is found out from another prompt: rounding never brings two as far apart.

    Raises
    ------
    ConfigError : it makes one, or a step fails.
    """
    version = runner.surface.version
    try:
        found = _differences(runner)
    except Exception as error:
        raise ConfigError(f"vLLM {version} does not run steps as onbeat plans them: {error}") from error
    for what, distance, limit in found:
        if distance > limit:
            raise ConfigError(
                f"vLLM {version} does not read steps as onbeat plans them: {what} changes log-probabilities "
                f"by {distance:.2g}, where rounding explains {limit:.2g}; install one of {' to '.join(TRIED)}"
            )


def _prompt_size(runner: VllmRunner) -> int:
    limits = runner.limits
    size = limits.block_size
    return min(size + size // 2, limits.max_num_batched_tokens // 2 - 2, limits.max_model_len - 4)


def _differences(runner: VllmRunner) -> list[tuple[str, float, float]]:
    """Return what was compared, how far apart it is, and how far it may be."""
    plan = _Plan(runner)
    size, vocab_size = _prompt_size(runner), runner.forward.config.vocab_size
    prompt, other = ([(7919 * index + add) % vocab_size for index in range(size)] for add in (11, 4242))
    half = size // 2 + 1
    plan.admit("a", prompt, [1])
    plan.admit("other", other, [2, 3])
    (other_T,) = plan.step([("a", 0, half, ()), ("other", 0, size, ())], samples=["other"])
    (chunks_T,) = plan.step([("a", half, size - half, (4,))], samples=["a"], released=["other"])
    plan.admit("whole", prompt, [5, 6])
    (whole_T,) = plan.step([("whole", 0, size, ())], samples=["whole"], preempted=["a"])
    plan.admit("a", prompt, [3, 2])
    plan.admit("over", other, [4, 1])  # where the first one was
    rows = [("a", 0, size + 1, ()), ("over", 0, size, ())]
    plan.step(rows, samples=["a", "over"], released=["whole"])
    longer = [*prompt, *plan.outputs["a"]]
    plan.admit("longer", longer, [5, 6])
    rows = [("a", size + 1, 1, ()), ("longer", 0, size + 2, ())]
    decoded_T, longer_T = plan.step(rows, samples=["a", "longer"], released=["over"])
    unlike = _distance(other_T, whole_T)
    far = max(unlike / 2, _ROUNDING) if np.isfinite(unlike) else _ROUNDING
    found = [
        ("a prompt in chunks", _distance(chunks_T, whole_T), far),
        ("a preemption", _distance(decoded_T, longer_T), far),
    ]
    block_size = runner.limits.block_size
    if runner.limits.enable_prefix_caching and size >= block_size:
        plan.admit("cached", longer, [3, 4])
        row = ("cached", block_size, size + 2 - block_size, ())
        (cached_T,) = plan.step([row], samples=["cached"], released=["longer"])
        found.append(("a cached prefix", _distance(cached_T, longer_T), far))
    plan.step([], released=list(plan.outputs))
    return found


def _distance(one_T: NDArray[np.float64], other_T: NDArray[np.float64]) -> float:
    """Return how far apart log-probabilities are, on average; those that neither prompt has do not count."""
    told_T = np.isfinite(one_T) | np.isfinite(other_T)
    if not told_T.any():
        return 0.0
    distance = float(np.abs(one_T[told_T] - other_T[told_T]).mean())
    return distance if np.isfinite(distance) else np.inf


class _Plan:
    """Steps that are made by hand, with requests whose names begin as nobody's do."""

    def __init__(self, runner: VllmRunner) -> None:
        self._runner = runner
        vocab_size = runner.forward.config.vocab_size
        ids = tuple(range(0, vocab_size, -(-vocab_size // _NUM_TOKENS)))
        self._sampling = SamplingParams(
            temperature=0.0, max_tokens=8, num_logprobs=len(ids), logprob_token_ids=ids
        )
        self._admitted: list[AdmittedRequest] = []
        self._num_steps = 0
        self.outputs: dict[str, list[int]] = {}
        """Tokens of each request."""

    def admit(self, name: str, prompt: Sequence[int], block_ids: Sequence[int]) -> None:
        """Let a request begin with the next step, or go on after a preemption."""
        outputs = self.outputs.setdefault(name, [])
        request = Request(request_id=_of(name), prompt_token_ids=tuple(prompt), sampling=self._sampling)
        self._admitted.append(AdmittedRequest(request, tuple(outputs), tuple(block_ids)))

    def step(
        self,
        rows: Iterable[tuple[str, int, int, tuple[int, ...]]],
        *,
        samples: Sequence[str] = (),
        released: Sequence[str] = (),
        preempted: Sequence[str] = (),
    ) -> list[NDArray[np.float64]]:
        """Run one; return the log-probabilities of those that sample."""
        self._num_steps += 1
        step = SchedulerOutput(
            -self._num_steps,
            tuple(
                ScheduledRequest(_of(name), num_computed, number, blocks, name in samples)
                for name, num_computed, number, blocks in rows
            ),
            tuple(self._admitted),
            tuple(map(_of, (*released, *preempted))),
            BatchShape(),
            preempted_ids=tuple(map(_of, preempted)),
        )
        self._admitted = []
        output = self._runner.execute(step)
        if output.failed:
            raise ValueError("; ".join(output.failed.values()))
        for name, token_ids in zip(samples, output.sampled_token_ids, strict=True):
            self.outputs[name] += token_ids[:1]
        return [np.array(each[0].top_logprobs) for each in output.logprobs or () if each]


def _of(name: str) -> str:
    return f"onbeat-start-{name}"
