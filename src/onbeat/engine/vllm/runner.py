"""Runs planned steps on vLLM's executor.

Legend: G rows under a grammar, W words of 32 tokens.

vLLM's workers keep what they are told of a request (prompt, blocks, how it is sampled) until they hear that
it has finished. `Told` is our copy of that, so that each step says only what is new.

What comes of a step (tokens, log-probabilities, embeddings) is told in onbeat's words.
"""

# ruff: noqa: N806 -- tensor names carry shape suffixes

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onbeat.core.request import Adapter, Request, SamplingParams, TokenLogprobs
from onbeat.core.step import AdmittedRequest, GuidedRows, ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from onbeat.engine import guided_draw
from onbeat.engine.device import DeviceConfig
from onbeat.engine.executor import PendingStep, done_step
from onbeat.engine.forward import Computes
from onbeat.engine.input_batch import IntArray
from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.pooling import Embeddings
from onbeat.engine.profiling.products import RowProducts
from onbeat.engine.sampling_row import SamplingRow
from onbeat.engine.vllm.faults import failures_end_the_engine, worker_died
from onbeat.engine.vllm.surface import VllmExecutor
from onbeat.scheduler.scheduler_config import SchedulerConfig


@dataclass(slots=True)
class Told:
    """What vLLM's workers know of a request, and what they do not tell back."""

    request: Request
    row: SamplingRow
    """Its output tokens are those that have come; those of steps in flight are not among them."""
    block_ids: list[int]
    num_outputs: int
    """Output tokens, those of steps in flight included."""
    is_known: bool = False
    """Whether a step has told the workers of it."""
    is_back: bool = False
    """Whether it was preempted, and the workers are to forget the blocks that it had."""
    slot: int | None = None
    """Of its state, where layers without attention have one."""
    drafts: list[int] = field(default_factory=list)
    """What may follow its output, of which the next step verifies some."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_known(self) -> int:
        """Tokens that have come, those of the prompt included."""
        return len(self.request.prompt_token_ids) + len(self.row.output_token_ids)


class Translator:
    """Makes vLLM's steps of onbeat's.

    Parameters
    ----------
    surface : of vLLM.
    """

    def __init__(self, surface: VllmExecutor) -> None:
        self._surface = surface
        self.told: dict[str, Told] = {}
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        self._last: Set[str] = set()
        """Requests of the step before."""
        self.drafts: dict[str, list[int]] = {}
        """That the newest step verifies, by request."""
        self._free_slots = list(range(surface.num_slots))
        """Of state; none where there is none."""

    def change(self, scheduled: SchedulerOutput, guides: guided_draw.Guides | None = None) -> None:
        """Forget the requests that left, and take in those that came.

        Parameters
        ----------
        guides : where guides of grammars come from; None: none is enforced.
        """
        preempted = set(scheduled.preempted_ids).difference(scheduled.forgotten_ids)
        for name in preempted:
            self.told[name].is_back = True
            self._free(self.told[name])
        self._preempted |= preempted
        for name in (*scheduled.released_ids, *scheduled.forgotten_ids):
            if name not in preempted and (told := self.told.pop(name, None)) is not None:
                self._leave(told)
        for admitted in scheduled.admitted:
            self._admit(admitted, guides)

    def step(self, scheduled: SchedulerOutput) -> Any:
        """Return vLLM's `SchedulerOutput`; requests have been changed before."""
        surface = self._surface
        new: list[Any] = []
        cached = surface.no_cached_requests()
        num_tokens: dict[str, int] = {}
        drafts: dict[str, list[int]] = {}
        for row in scheduled.rows:
            name = row.request_id
            told = self.told[name]
            # Slots for drafts may lie behind the last token that a request may have.
            new_block_ids = row.new_block_ids[: max(surface.most_blocks - len(told.block_ids), 0)]
            told.block_ids.extend(new_block_ids)
            num_computed = row.num_computed_tokens
            if surface.num_drafts:  # then the steps before are done, and what they rejected is known
                num_computed = min(num_computed, told.num_known - 1)
            if not told.is_known or (told.is_back and surface.is_second_runner):
                all_blocks = surface.blocks(told.block_ids, told.slot)
                outputs = told.row.output_token_ids
                new.append(surface.new_request(told.request, outputs, all_blocks, num_computed))
            else:
                blocks = told.block_ids if told.is_back else new_block_ids
                cached.req_ids.append(name)
                cached.new_block_ids.append(
                    surface.blocks(blocks, told.slot, is_new=told.is_back) if blocks else None
                )
                cached.num_computed_tokens.append(num_computed)
                cached.num_output_tokens.append(told.num_outputs)
                if told.is_back:
                    cached.resumed_req_ids.add(name)
                if surface.has_stages or name not in self._last:
                    self._tell_tokens(cached, row, told)
            told.is_known, told.is_back = True, False
            num_tokens[name] = row.num_new_tokens
            if row.num_draft_tokens:
                num_tokens[name] -= row.num_draft_tokens
                if verified := told.drafts[: row.num_draft_tokens]:
                    drafts[name] = verified
                    num_tokens[name] += len(verified)
            told.num_outputs += row.samples
        step = surface.step(new, cached, num_tokens, self._finished, self._preempted, drafts)
        self.drafts = drafts
        for name in self._preempted if surface.is_second_runner else ():  # which forgets them
            if (told := self.told[name]).is_back:
                told.is_known = False
        self._finished, self._preempted, self._last = set(), set(), num_tokens.keys()
        return step

    def _tell_tokens(self, cached: Any, row: ScheduledRequest, told: Told) -> None:
        """Name tokens of a request that the workers, or the first of their stages, have not kept."""
        prompt, outputs = told.request.prompt_token_ids, told.row.output_token_ids
        if row.request_id not in self._last:
            cached.all_token_ids[row.request_id] = [*prompt, *outputs]
        if self._surface.has_stages:  # the prompt they have kept
            start, end = row.num_computed_tokens, row.num_computed_tokens + row.num_new_tokens
            size, is_new = len(prompt), end > len(prompt)
            new = [*prompt[start:end], *outputs[max(start - size, 0) : end - size]] if is_new else []
            cached.new_token_ids.append(new)

    def _leave(self, told: Told) -> None:
        self._free(told)
        if told.is_known:
            self._finished.add(told.request.request_id)

    def _free(self, told: Told) -> None:
        if told.slot is not None:
            self._free_slots.append(told.slot)
            told.slot = None

    def _admit(self, admitted: AdmittedRequest, guides: guided_draw.Guides | None) -> None:
        request, outputs = admitted.request, list(admitted.output_token_ids)
        row = SamplingRow(request.sampling, request.prompt_token_ids, outputs)
        guided_draw.begin_guide(row, guides)
        told = self.told.get(request.request_id)
        if told is None:
            told = self.told[request.request_id] = Told(request, row, [], 0)
        told.row, told.num_outputs, told.drafts = row, len(outputs), []
        told.block_ids = list(admitted.block_ids[: self._surface.most_blocks])
        told.slot = self._free_slots.pop() if self._surface.num_slots else None


_ANY = np.uint32(0xFFFFFFFF)


class VllmRunner:
    """A `StepRunner` whose steps vLLM's workers compute.

    Parameters
    ----------
    limits : what a scheduler may plan.
    surface : of vLLM.
    model : sizes.
    device : where it computes.
    """

    def __init__(
        self, limits: SchedulerConfig, surface: VllmExecutor, model: ModelConfig, device: DeviceConfig
    ) -> None:
        self.limits = limits
        self.surface = surface
        self.overlaps = surface.overlaps
        self.forward = _Workers(surface, model, device)
        self._translator = Translator(surface)
        self._lock = threading.RLock()
        """Of what is told: one thread launches steps, another takes their tokens."""
        self._last: _LaunchedStep | None = None
        self.adapters: set[int] = set()
        self.guides: guided_draw.Guides | None = None
        """Where guides of grammars come from; set by whoever builds the engine. None: none is enforced."""

    def launch(self, scheduled: SchedulerOutput) -> PendingStep:
        """Run one step, or queue it behind the one under way."""
        with failures_end_the_engine(self.surface):
            if self.surface.num_drafts and self._last is not None:
                self._last.result()  # which the workers have not kept: tokens, and drafts to verify
            with self._lock:
                self._translator.change(scheduled, self.guides)
                step = self._translator.step(scheduled)
                told = [self._translator.told[row.request_id] for row in scheduled.rows]
            is_empty = not scheduled.rows and not step.finished_req_ids
            if is_empty or not self.surface.begin(step):
                return done_step(ModelRunnerOutput([]))
            launched = _LaunchedStep(self, scheduled.rows, told, self._translator.drafts)
            grammar = self._grammar(launched)
            launched.future = self.surface.sample(grammar)
            self._last = launched
            return launched

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step to its end."""
        return self.launch(scheduled).result()

    def load_adapter(self, adapter: Adapter, others: Collection[int]) -> None:
        """Load a LoRA adapter, and let go of all that are not among the others; see `TakesAdapters`."""
        for number in self.adapters.difference(others):
            self.surface.remove_adapter(number)
            self.adapters.remove(number)
        self.surface.add_adapter(adapter)
        self.adapters.add(adapter.number)

    def touch_ahead(self) -> bool:
        """Take no memory ahead, vLLM has taken all of it; called over and over while no step runs.

        Raises
        ------
        EngineDead : a worker has died meanwhile.
        """
        if self.surface.has_failed:
            raise worker_died()
        return False

    def close(self) -> None:
        """End the workers."""
        self.surface.close()

    def _grammar(self, step: _LaunchedStep) -> Any:
        """Return what grammars allow the rows that sample, in vLLM's words; None where no row has one."""
        if not step.guided:
            return None
        if self._last is not None:
            self._last.result()  # whose tokens the grammars take first
        if not (held := guided_draw.open_guides(step.sampling_rows)):
            return None
        masks_GW = guided_draw.allowed_masks(step.sampling_rows, held, step.outcome)
        masks_GW[~masks_GW.any(axis=1)] = _ANY  # which is told as a fault below
        return self.surface.grammar([step.names[index] for index in held], masks_GW.view(np.int32))

    def take(self, step: _LaunchedStep, theirs: Any) -> ModelRunnerOutput:
        """Return what came of a step, in onbeat's words."""
        indices = [theirs.req_id_to_index[name] for name in step.names]
        token_ids = [sampled(theirs.sampled_token_ids[index]) for index in indices]
        failed = {
            name: "its logits are not finite"
            for name, number in (theirs.num_nans_in_logits or {}).items()
            if number
        }
        with self._lock:
            logprobs = [
                row_logprobs(row.params, theirs.logprobs, index, len(new)) if row.asks_logprobs else None
                for row, index, new in zip(step.sampling_rows, indices, token_ids, strict=True)
            ]
            guided = self._advance(step, token_ids, failed)
            for told, row, new in zip(step.sampling, step.sampling_rows, token_ids, strict=True):
                row.output_token_ids += new
                told.num_outputs += max(len(new) - 1, 0)
            num_available = self._take_drafts(step)
            reports = _prompt_reports(step, theirs.prompt_logprobs_dict)
        done = embeddings(theirs) if theirs.pooler_output else None
        if done is not None:
            failed |= done.failed
        return ModelRunnerOutput(
            token_ids,
            logprobs if any(logprobs) else None,
            failed or None,
            step.num_drafted if any(row.num_draft_tokens for row in step.rows) else None,
            num_available,
            embeddings=None if done is None else done.done,
            prompt_logprobs=reports or None,
            guided=guided,
        )

    def _take_drafts(self, step: _LaunchedStep) -> list[int] | None:
        """Keep the drafts for the next step; return how many each row that samples has."""
        if not self.surface.num_drafts:
            return None
        made = self.surface.take_drafts()
        for told, name in zip(step.sampling, step.names, strict=True):
            # The rows of a grammar would need masks for their drafts.
            told.drafts = [] if told.row.is_guided else made.get(name, [])
        return [len(told.drafts) for told in step.sampling]

    def _advance(
        self, step: _LaunchedStep, token_ids: Sequence[list[int]], failed: dict[str, str]
    ) -> GuidedRows | None:
        """Let grammars take their rows' tokens; return what the scheduler is told of them."""
        if not step.guided:
            return None
        outcome = guided_draw.hold_to_grammars(
            step.sampling_rows,
            step.guided,
            [ids[0] for ids in token_ids],
            lambda refused, _: [guided_draw.NO_TOKEN] * len(refused),
        )
        outcome.num_redrawn = 0
        outcome.add(step.outcome, range(len(step.sampling_rows)))
        failures = outcome.failures | step.outcome.failures
        failed |= {step.names[index]: message for index, message in failures.items()}
        outcome.num_tokens = len(step.guided)
        return guided_draw.guided_rows(step.sampling_rows, step.names, outcome)


class _Workers(Computes):
    """What steps are computed on."""

    def __init__(self, surface: VllmExecutor, model: ModelConfig, device: DeviceConfig) -> None:
        self.config, self.device, self._dtype = model, device.device, device.dtype
        runner = "second" if surface.is_second_runner else "first"
        self.settings = {"backend": "vllm", "vllm": surface.version, "model_runner": runner}
        if surface.graphs is not None:
            self.settings["graphs"] = surface.graphs

    def products(self) -> RowProducts:
        """Return those of a layer of the model's sizes; vLLM's own weights lie elsewhere."""
        import torch

        from onbeat.engine.torch.types import torch_dtype
        from onbeat.engine.torch.weights import MatrixProducts

        config, dtype = self.config, torch_dtype(self._dtype)
        hidden, wide = config.hidden_size, config.intermediate_size
        heads = config.num_heads * config.head_dim
        qkv = heads + 2 * config.num_kv_heads * config.head_dim
        shapes = ((qkv, hidden), (hidden, heads), (2 * wide, hidden), (hidden, wide))
        return MatrixProducts([torch.zeros(shape, dtype=dtype) for shape in shapes])

    def scrub(self, block_ids: IntArray) -> None:
        """Leave KV blocks as they are: what a request reads, it has written."""


def _prompt_reports(step: _LaunchedStep, found: Any) -> dict[str, list[TokenLogprobs]]:
    """Keep log-probabilities of prompts, which come with their chunks, until the first token is there."""
    reports = {}
    for row, told in zip(step.rows, step.told, strict=True):
        if (tensors := found.get(row.request_id)) is not None:
            told.prompt_logprobs += prompt_logprobs(tensors, told.request.num_prompt_logprobs or 0)
        if row.samples and told.prompt_logprobs:
            reports[row.request_id], told.prompt_logprobs = told.prompt_logprobs, []
    return reports


class _LaunchedStep:
    """A step that vLLM runs."""

    def __init__(
        self,
        runner: VllmRunner,
        rows: tuple[ScheduledRequest, ...],
        told: Sequence[Told],
        drafts: Mapping[str, list[int]],
    ) -> None:
        self.rows, self.told = rows, told
        self.sampling = [each for each, row in zip(told, rows, strict=True) if row.samples]
        self.sampling_rows = [each.row for each in self.sampling]
        self.names = [each.request.request_id for each in self.sampling]
        """Of the rows that sample."""
        self.num_drafted = [len(drafts.get(name, ())) for name in self.names]
        """Drafts that each of them verifies."""
        self.guided = [index for index, row in enumerate(self.sampling_rows) if row.is_guided]
        """Indices of those of them that have a grammar."""
        self.outcome = guided_draw.GuideOutcome()
        """Of finding what grammars allow."""
        self.future: Any = None
        self._runner = runner
        self._lock = threading.Lock()
        self._output: ModelRunnerOutput | None = None

    def done(self) -> bool:
        return self._output is not None

    def result(self) -> ModelRunnerOutput:
        with self._lock:
            if self._output is None:
                with failures_end_the_engine(self._runner.surface):
                    theirs = self.future.result()
                self._output = self._runner.take(self, theirs)
            return self._output


def row_logprobs(params: SamplingParams, lists: Any, index: int, num_tokens: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of a row's tokens.

    Parameters
    ----------
    lists : vLLM's: first the sampled token, then the likeliest or those that were asked for.
    index : of the row among vLLM's.
    """
    part = lists.slice_request(index, num_tokens)
    num = len(params.logprob_token_ids) or params.num_logprobs or 0
    return [
        _logprobs(ids, values, num) for ids, values in zip(part.logprob_token_ids, part.logprobs, strict=True)
    ]


def prompt_logprobs(tensors: Any, num: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of a prompt's tokens but the first."""
    lists = tensors.tolists()
    return [
        _logprobs(ids, values, num, rank=int(rank))
        for ids, values, rank in zip(
            lists.logprob_token_ids, lists.logprobs, lists.sampled_token_ranks, strict=True
        )
    ]


def _logprobs(
    ids: NDArray[np.integer[Any]], values: NDArray[np.floating[Any]], num: int, rank: int | None = None
) -> TokenLogprobs:
    return TokenLogprobs(
        int(ids[0]),
        float(values[0]),
        tuple(map(int, ids[1 : 1 + num])),
        tuple(map(float, values[1 : 1 + num])),
        rank,
    )


def embeddings(theirs: Any) -> Embeddings:
    """Return the embeddings of prompts that a step has completed."""
    found = Embeddings({}, {})
    for name, index in theirs.req_id_to_index.items():
        if (tensor := theirs.pooler_output[index]) is not None:
            found.add(name, tensor.float().numpy().astype("<f4").tobytes())
    return found


def sampled(token_ids: Sequence[int]) -> list[int]:
    """Return a row's tokens as plain integers, without vLLM's placeholders."""
    return [int(each) for each in token_ids if each >= 0]
