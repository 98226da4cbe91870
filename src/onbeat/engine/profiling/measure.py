"""Times made-up steps on a model runner, as the engine's own loop runs them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np

from onbeat.core.request import Request, SamplingParams
from onbeat.core.step import AdmittedRequest, BatchShape, ScheduledRequest, SchedulerOutput
from onbeat.engine.backends.base import Runner
from onbeat.engine.device import run_apart, wait_for
from onbeat.engine.executor import PendingStep, ThreadExecutor
from onbeat.engine.forward import LaunchesSteps, Mark
from onbeat.engine.input_batch import InputBatch
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.profiling.batches import TIMES_AT_ONCE, MeasuredBatch
from onbeat.engine.speculation.proposer import DraftRow, Proposer

_BLOCKS_AT_ONCE = 64


class GivenDrafts(Proposer):
    """Proposes any tokens, as many as are asked for: drafts that cost nothing to make.

    Parameters
    ----------
    token_ids : proposed in turn.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = cycle(token_ids)

    def propose(self, batch: InputBatch, rows: list[DraftRow]) -> list[list[int]]:  # noqa: ARG002
        """Return the drafts of each row."""
        return [list(islice(self._token_ids, row.num_drafts)) for row in rows]


class _MarkedSteps:
    """Marks where each step that is launched ends, in the device's queue.

    The host may notice an end late, while it queues the operators of the steps behind.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.ends: list[Mark] = []

    def launch(self, scheduled: SchedulerOutput) -> PendingStep:
        """Launch a step."""
        step = self._runner.launch(scheduled)
        if isinstance(self._runner.forward, LaunchesSteps):
            self.ends.append(self._runner.forward.mark())
        return step


class StepTimer:
    """Runs batches of requests that exist for one step each.

    It writes to the KV cache and takes all slots, so nothing else may run on the runner meanwhile; afterwards
    `close` leaves it as empty as it was. Drafts come from nowhere, whatever else the runner has to make them:
    the times are those of verifying them.

    Parameters
    ----------
    runner : what runs the steps.
    num_blocks : KV blocks to use, from the first on. They are written once, for memory that never was is
        one page of zeros to the system, which is read faster than a KV cache in use.
    sampling : how the rows' tokens are chosen.
    """

    def __init__(self, runner: Runner, *, num_blocks: int, sampling: SamplingParams | None = None) -> None:
        self._runner = runner
        self._steps = _MarkedSteps(runner)
        self._executor = ThreadExecutor(self._steps)  # the hop to its thread is part of a live step
        self._block_size = runner.limits.block_size
        self._rng = np.random.default_rng(0)
        self._blocks = np.arange(min(num_blocks, runner.limits.num_blocks))
        self._sampling = sampling or SamplingParams()
        vocab_size = runner.forward.config.vocab_size
        num_tokens = runner.limits.max_model_len + runner.limits.max_num_seqs
        self._token_ids: list[int] = self._rng.integers(0, vocab_size, num_tokens).tolist()
        self._proposing = runner if isinstance(runner, ModelRunner) else None
        self._own_proposer = None if self._proposing is None else self._proposing.proposer
        self._given_drafts = GivenDrafts(self._token_ids)
        self._released: tuple[str, ...] = ()
        self.num_runs = 0
        run_apart(lambda: _touch_cache(runner, len(self._blocks)))

    def time(self, batch: MeasuredBatch) -> float:
        """Run a batch and return its seconds; blocks lie scattered, as in a cache that has been used.

        It runs once, or behind itself where the runner launches steps ahead: a live step's time is then that
        from the end of one to the end of the next, by the device's clock.
        """
        rows, admitted = self._schedule(batch)
        # A runner that proposes does a little more for every row, which plain steps are not to be charged.
        has_drafts = any(row.num_drafts for row in batch.rows)
        self._propose_by(self._given_drafts if has_drafts else None)
        # A step without rows only takes requests in, which is no part of the measured time.
        self._run(SchedulerOutput(0, (), admitted, self._released, BatchShape()))
        self._place_states(batch, rows)
        self._released = tuple(row.request_id for row in rows)
        scheduled = SchedulerOutput(0, rows, (), (), batch.shape)
        self.num_runs += 1
        if self._runner.overlaps:
            return self._time_ahead(scheduled)
        start = time.perf_counter()
        self._run(scheduled)
        return time.perf_counter() - start

    def close(self) -> None:
        """Release the last batch and the thread."""
        self._run(SchedulerOutput(0, (), (), self._released, BatchShape()))
        self._executor.shutdown()
        self._propose_by(self._own_proposer)

    def _place_states(self, measured: MeasuredBatch, rows: Sequence[ScheduledRequest]) -> None:
        """Let states be where they would be if half of the drafts before, as many as now, had been right."""
        if self._proposing is None:
            return
        batch = self._proposing.batch
        for own, row in zip(measured.rows, rows, strict=True):
            num_right = min((own.num_drafts + 1) // 2, own.num_cached_tokens)
            batch.states.put(batch.slots[row.request_id], own.num_cached_tokens - num_right, num_right)

    def _propose_by(self, proposer: Proposer | None) -> None:
        if self._proposing is not None:
            self._proposing.proposer = proposer

    def _time_ahead(self, scheduled: SchedulerOutput) -> float:
        self._steps.ends.clear()
        seen = []
        for step in [self._executor.submit(scheduled) for _ in range(TIMES_AT_ONCE)]:
            step.result()
            seen.append(time.perf_counter())
        if not self._steps.ends:  # nobody but the host knows
            return (seen[-1] - seen[0]) / (TIMES_AT_ONCE - 1)
        first, *_, last = self._steps.ends
        last.wait()
        return last.seconds_since(first) / (TIMES_AT_ONCE - 1)

    def _run(self, scheduled: SchedulerOutput) -> None:
        self._executor.submit(scheduled).result()
        wait_for(self._runner.forward.device)  # a step that samples nothing returns before it is done

    def _schedule(
        self, batch: MeasuredBatch
    ) -> tuple[tuple[ScheduledRequest, ...], tuple[AdmittedRequest, ...]]:
        self._rng.shuffle(self._blocks)
        first_block = 0
        rows, admitted = [], []
        for index, row in enumerate(batch.rows):
            num_tokens = row.num_cached_tokens + row.num_new_tokens
            num_blocks = -(-num_tokens // self._block_size)
            block_ids = tuple(self._blocks[first_block : first_block + num_blocks].tolist())
            first_block += num_blocks
            # Each row has tokens of its own: those with the same ones would choose the same experts.
            request = Request(
                request_id=f"measured-{index}",
                prompt_token_ids=tuple(self._token_ids[index : index + num_tokens - row.num_drafts]),
                sampling=self._sampling,
            )
            admitted.append(AdmittedRequest(request, (), block_ids))
            rows.append(
                ScheduledRequest(
                    request.request_id,
                    row.num_cached_tokens,
                    row.num_new_tokens,
                    (),
                    row.samples,
                    row.num_drafts,
                )
            )
        return tuple(rows), tuple(admitted)


def num_blocks_for(batches: Sequence[MeasuredBatch], block_size: int) -> int:
    """Return how many KV blocks the largest batch takes."""
    return max(batch.num_blocks(block_size) for batch in batches)


def _touch_cache(runner: Runner, num_blocks: int) -> None:
    """Write the first blocks of every layer, with what is in them."""
    for start in range(0, num_blocks, _BLOCKS_AT_ONCE):
        blocks = np.arange(start, min(start + _BLOCKS_AT_ONCE, num_blocks))
        for table in range(runner.limits.num_tables):
            runner.forward.scrub(blocks + table * runner.limits.num_blocks)
