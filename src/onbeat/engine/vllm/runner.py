"""Runs planned steps on vLLM's executor.

Legend: G rows under a grammar, W words of 32 tokens.
"""

# ruff: noqa: N806 -- tensor names carry shape suffixes

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from onbeat.core.request import TokenLogprobs
from onbeat.core.step import GuidedRows, ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from onbeat.engine.device import DeviceConfig
from onbeat.engine.executor import DoneStep, PendingStep
from onbeat.engine.forward import Computes, RowProducts
from onbeat.engine.guided_draw import (
    NO_TOKEN,
    GuideOutcome,
    Guides,
    allowed_masks,
    guided_rows,
    hold_to_grammars,
)
from onbeat.engine.input_batch import IntArray
from onbeat.engine.model_config import ModelConfig
from onbeat.engine.sampling_row import SamplingRow
from onbeat.engine.vllm.steps import Told, Translator, prompt_logprobs, row_logprobs, sampled
from onbeat.engine.vllm.surface import Surface
from onbeat.scheduler.scheduler_config import SchedulerConfig

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
        self, limits: SchedulerConfig, surface: Surface, model: ModelConfig, device: DeviceConfig
    ) -> None:
        self.limits = limits
        self.surface = surface
        self.overlaps = surface.overlaps
        self.forward = _Workers(surface, model, device)
        self._translator = Translator(surface)
        self._lock = threading.RLock()
        """Of what is told: one thread launches steps, another takes their tokens."""
        self._last: _LaunchedStep | None = None

    @property
    def guides(self) -> Guides | None:
        """Where guides of grammars come from; set by whoever builds the engine. None: none is enforced."""
        return self._translator.guides

    @guides.setter
    def guides(self, guides: Guides | None) -> None:
        self._translator.guides = guides

    def launch(self, scheduled: SchedulerOutput) -> PendingStep:
        """Run one step, or queue it behind the one under way."""
        with self._lock:
            self._translator.change(scheduled)
            step = self._translator.step(scheduled)
            told = [self._translator.told[row.request_id] for row in scheduled.rows]
        is_empty = not scheduled.rows and not step.finished_req_ids
        if is_empty or not self.surface.begin(step):
            return DoneStep(ModelRunnerOutput([]))
        launched = _LaunchedStep(self, scheduled.rows, told)
        grammar = self._grammar(launched)
        launched.future = self.surface.sample(grammar)
        self._last = launched
        return launched

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step to its end."""
        return self.launch(scheduled).result()

    def touch_ahead(self) -> bool:
        """Take no memory ahead; vLLM has taken all of it."""
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
        rows = step.sampling_rows
        held = [index for index in step.guided if _is_held(rows[index])]
        if not held:
            return None
        masks_GW = allowed_masks(rows, held, step.outcome)
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
            for row, new in zip(step.sampling_rows, token_ids, strict=True):
                row.output_token_ids += new
            reports = _prompt_reports(step, theirs.prompt_logprobs_dict)
        return ModelRunnerOutput(
            token_ids,
            logprobs if any(logprobs) else None,
            failed or None,
            prompt_logprobs=reports or None,
            guided=guided,
        )

    def _advance(
        self, step: _LaunchedStep, token_ids: Sequence[list[int]], failed: dict[str, str]
    ) -> GuidedRows | None:
        """Let grammars take their rows' tokens; return what the scheduler is told of them."""
        if not step.guided:
            return None
        outcome = hold_to_grammars(
            step.sampling_rows,
            step.guided,
            [ids[0] for ids in token_ids],
            lambda refused, _: [NO_TOKEN] * len(refused),
        )
        outcome.num_redrawn = 0
        outcome.add(step.outcome, range(len(step.sampling_rows)))
        failures = outcome.failures | step.outcome.failures
        failed |= {step.names[index]: message for index, message in failures.items()}
        outcome.num_tokens = len(step.guided)
        return guided_rows(step.sampling_rows, step.names, outcome)


class _Workers(Computes):
    """What steps are computed on."""

    def __init__(self, surface: Surface, model: ModelConfig, device: DeviceConfig) -> None:
        self.config, self.device, self._dtype = model, device.device, device.dtype
        self.settings = {"backend": "vllm", "vllm": surface.version}

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


def _is_held(row: SamplingRow) -> bool:
    return row.guide is not None and not row.guide.is_complete


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

    def __init__(self, runner: VllmRunner, rows: tuple[ScheduledRequest, ...], told: Sequence[Told]) -> None:
        self.rows, self.told = rows, told
        sampling = [each for each, row in zip(told, rows, strict=True) if row.samples]
        self.sampling_rows = [each.row for each in sampling]
        self.names = [each.request.request_id for each in sampling]
        """Of the rows that sample."""
        self.guided = [index for index, row in enumerate(self.sampling_rows) if row.is_guided]
        """Indices of those of them that have a grammar."""
        self.outcome = GuideOutcome()
        """Of finding what grammars allow."""
        self.future: Any = None
        self._runner = runner
        self._lock = threading.Lock()
        self._output: ModelRunnerOutput | None = None

    @property
    def is_done(self) -> bool:
        return self._output is not None

    def result(self) -> ModelRunnerOutput:
        with self._lock:
            if self._output is None:
                self._output = self._runner.take(self, self.future.result())
            return self._output
