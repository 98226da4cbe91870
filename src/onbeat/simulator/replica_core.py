"""What virtual replicas with and without pipeline stages have in common.

The tokens of a virtual device that verifies drafts: one a row, and one more for each accepted draft.

A virtual draft model that has to read what its requests have become before it can go on with them.

As in the engine: the draft model is never told of prompts. When drafts are asked for, it runs the tokens that
it has no KV of, at most so many in a step; a row that is not through proposes nothing in that step.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import exp, inf
from statistics import NormalDist
from typing import NamedTuple, Protocol, runtime_checkable

from onbeat.core.errors import ConfigError
from onbeat.core.handover import Detached
from onbeat.core.step import BatchShape, DraftStats, ModelRunnerOutput, SchedulerOutput
from onbeat.core.step_time import StepTimeModel
from onbeat.perfmodel.shape_range import Beyond, LargestStep, ShapeRange
from onbeat.scheduler.replica.policies import composition
from onbeat.scheduler.replica.rows import correct_shape
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.replica.steady import SteadyRun, SteadyRuns
from onbeat.scheduler.replica.step_report import Planned, StepReporter
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.simulator.deliveries import ORDINARY, Deliveries, Sampler, VirtualSampler
from onbeat.simulator.draft_acceptance import RequestDrafts
from onbeat.simulator.observer import SimulationObserver
from onbeat.simulator.result import DraftCounts, ReplicaCounters
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.simulator.virtual_clients import STOP, OfferedRequest


class AskedRow(NamedTuple):
    """A decode row with drafts."""

    request_id: str
    num_tokens: int
    """Known ones, its last included."""
    num_drafts: int


class CatchUp:
    """Keeps count of the draft model's KV. What the prefix cache holds is new to it.

    Parameters
    ----------
    most : tokens that it reads in a step, over all rows that are far behind.
    num_near : rows no further behind than this are not held back, and cost nothing more than a decode.
    """

    def __init__(self, most: int, *, num_near: int) -> None:
        self._most = most
        self._num_near = num_near
        self._num_valid: dict[str, int] = {}
        """Leading tokens of each request that have KV."""

    def forget(self, request_ids: Iterable[str]) -> None:
        """Let the KV of requests go that ended, were preempted, or come back."""
        for request_id in request_ids:
            self._num_valid.pop(request_id, None)

    def propose(self, rows: Sequence[AskedRow]) -> tuple[list[int], list[tuple[int, int]]]:
        """Run what rows are behind with, those first that are nearest to their ends.

        Returns
        -------
        The drafts of each row, none where it is not through; and (tokens before, tokens run) of each row that
        was far behind.
        """
        num_left = self._most
        num_drafted = [row.num_drafts for row in rows]
        chunks = []
        behind = [row.num_tokens - self._num_valid.get(row.request_id, 0) for row in rows]
        for place in sorted(range(len(rows)), key=behind.__getitem__):
            row, num_behind = rows[place], behind[place]
            if num_behind > self._num_near:
                start = row.num_tokens - num_behind
                num_taken = min(num_behind, num_left)
                num_left -= num_taken
                if num_taken:
                    chunks.append((start, num_taken))
                if num_taken < num_behind:
                    num_drafted[place] = 0
                    self._num_valid[row.request_id] = start + num_taken
                    continue
            self._num_valid[row.request_id] = row.num_tokens
        return num_drafted, chunks

    def confirm(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Count the KV of drafts that became tokens; the last one of a row has none."""
        if num_drafted:
            self._num_valid[request_id] += min(num_drafted - 1, num_accepted)


_ORDINARY = STOP + 1


class VerifyingSampler:
    """Gives each row that verifies one token, and one more for each draft that its request accepts.

    Parameters
    ----------
    deliveries : knows the requests, and how many tokens they have got.
    config : of the simulation; its scheduler speculates.
    """

    def __init__(self, deliveries: Deliveries, config: SimulationConfig) -> None:
        speculation = config.scheduler.speculation
        assert speculation is not None
        self._deliveries = deliveries
        self._acceptance = config.acceptance
        self._num_speculative_tokens = speculation.num_speculative_tokens
        self._seed = config.seed
        self._last_token = STOP if config.declared_max_tokens is not None else _ORDINARY
        self._catch_up = None
        if speculation.max_catch_up_tokens:
            self._catch_up = CatchUp(speculation.max_catch_up_tokens, num_near=config.scheduler.block_size)
        self._results: dict[int, ModelRunnerOutput] = {}
        """Of the steps under way: what they bring is settled when they begin."""
        self.counts = DraftCounts()

    def begin(self, scheduled: SchedulerOutput) -> BatchShape:
        """Settle what a step brings; return what the device computes: no drafts that cannot be proposed."""
        num_drafted, chunks = self._propose(scheduled)
        result = self._results[scheduled.step_id] = self._verify(scheduled, num_drafted)
        computed = replace(scheduled, shape=replace(scheduled.shape))
        correct_shape(computed, result)
        shape = computed.shape
        if self._catch_up is not None:
            shape.num_draft_passes = max(num_drafted.values(), default=0)
            shape.num_catch_up_tokens = shape.catch_up_pairs = 0
            for num_read, num_tokens in chunks:
                shape.add_catch_up(num_read, num_tokens)
        return shape

    def sample(self, scheduled: SchedulerOutput, num_steps: int) -> ModelRunnerOutput:  # noqa: ARG002
        """Return the tokens of a step that `begin` was told of."""
        return self._results.pop(scheduled.step_id)

    def _propose(self, scheduled: SchedulerOutput) -> tuple[dict[str, int], list[tuple[int, int]]]:
        """Return the drafts of each row that gets any, and what a draft model catches up with."""
        found = {}
        for row in scheduled.rows:
            if row.num_draft_tokens:
                offered = self._deliveries.offered(row.request_id)
                place = offered.record.num_output_tokens
                found[row.request_id] = self._drafts(offered).num_drafted(place, row.num_draft_tokens)
        if self._catch_up is None:
            return found, []
        self._catch_up.forget(scheduled.released_ids)
        self._catch_up.forget(each.request.request_id for each in scheduled.admitted)
        asked = [
            AskedRow(row.request_id, row.num_computed_tokens + 1, row.num_draft_tokens)
            for row in scheduled.rows
            if row.num_draft_tokens
        ]
        num_drafted, chunks = self._catch_up.propose(asked)
        return dict(zip(found, num_drafted, strict=True)), chunks

    def _verify(self, scheduled: SchedulerOutput, num_drafted: dict[str, int]) -> ModelRunnerOutput:
        token_ids: list[list[int]] = []
        drafted_of_rows: list[int] = []
        num_available: list[int] = []
        for row in scheduled.rows:
            if not row.samples:
                continue
            offered = self._deliveries.offered(row.request_id)
            drafts, drafted = self._drafts(offered), num_drafted.get(row.request_id, 0)
            place, num_left = offered.record.num_output_tokens, self._deliveries.num_left(row.request_id)
            num_tokens = min(1 + min(drafted, drafts.num_right[place]), num_left)
            tokens = [_ORDINARY] * num_tokens
            if num_tokens == num_left:
                tokens[-1] = self._last_token
            token_ids.append(tokens)
            drafted_of_rows.append(drafted)
            if drafts.num_available is not None:
                num_available.append(drafts.num_available[place + num_tokens])
            if row.num_new_tokens == 1 + row.num_draft_tokens:
                self.counts.add(drafted, num_tokens)
            if self._catch_up is not None:
                self._catch_up.confirm(row.request_id, drafted, num_tokens - 1)
        has_any_number = self._acceptance.hit_rate is None
        return ModelRunnerOutput(
            token_ids, num_drafted=drafted_of_rows, num_available=None if has_any_number else num_available
        )

    def _drafts(self, offered: OfferedRequest) -> RequestDrafts:
        """Return which drafts a request accepts; drawn when it is first asked for."""
        if offered.drafts is None:
            num_output_tokens = offered.record.offered_output_tokens
            assert num_output_tokens is not None
            offered.drafts = self._acceptance.draw(
                offered.index,
                num_output_tokens,
                request_class=offered.request.slo_class,
                seed=self._seed,
                num_speculative_tokens=self._num_speculative_tokens,
            )
        return offered.drafts


_NORMAL = NormalDist()
_SCALE = 2.0**-53


@dataclass(slots=True)
class StepUnderWay:
    """A step that was planned, or the first of a run of steps that differ in token counts alone."""

    scheduled: SchedulerOutput
    shape: BatchShape
    """What the device computes."""
    run: SteadyRun | None
    """What the step may go on as."""
    max_steps: int
    """How often it may be run before something has to be told of one of its requests."""
    start: float
    planned: Planned | None
    """What its planning did, if anybody hears of it."""
    predicted: float | None
    """What the scheduler's own model expects, seconds; likewise."""


class ReplicaCore:
    """A scheduler, what samples tokens in place of its device, and what is written and counted of both.

    A replica asks it for steps and says when they end.

    Parameters
    ----------
    name : as records carry it, and the replica's number.
    step_time : what the device is simulated by.
    observer : hears of steps, if it wants to.
    """

    def __init__(
        self,
        name: str,
        config: SimulationConfig,
        step_time: StepTimeModel,
        observer: SimulationObserver | None,
    ) -> None:
        self.scheduler = make_scheduler(
            config.replica_scheduler, step_time, predicts=config.reads_predictions
        )
        self.noise = make_noise(config.step_noise, seed=config.seed, replica=int(name))
        self.deliveries = Deliveries(name, has_drafts=config.scheduler.speculation is not None)
        self.sampler = make_sampler(config, self.deliveries)
        self.num_steps = 0
        """Steps that have ended."""
        self.busy_seconds = 0.0
        self._index = int(name)
        self._observer = None if observer is None or observer.wanted_steps == "none" else observer
        self._reporter = None if self._observer is None else StepReporter(self.scheduler)
        self._steady = SteadyRuns(self.scheduler, ORDINARY)
        self._may_stop = config.declared_max_tokens is not None
        self._work = BatchShape()
        self._measured: ShapeRange | None = getattr(step_time, "shape_range", None)
        self._largest = None if self._measured is None else LargestStep()
        self._busy_since = inf

    def add(self, offered: OfferedRequest, now: float) -> None:
        """Take a request; raises `RequestRejected` as `Scheduler.add`."""
        self.scheduler.add(offered.request, now)
        self.deliveries.open(offered)

    def plan(self, now: float, *, may_run_on: bool = False) -> StepUnderWay | None:
        """Plan a step; None where nothing can run before something else happens.

        Parameters
        ----------
        may_run_on : look whether it is the first of a steady run.
        """
        scheduled = plan_step(self.scheduler, now)
        if scheduled is None:
            return None
        shape = self.sampler.begin(scheduled)
        planned = predicted = None
        if self._reporter is not None:
            planned, predicted = self._reporter.take_planned(), self._predict(scheduled)
        run = self._steady.begin(scheduled) if may_run_on else None
        max_steps = 1 if run is None else run.max_steps
        if run is not None and self._may_stop:
            num_left = self.deliveries.num_left
            max_steps = min(max_steps, *[num_left(row.request_id) for row in scheduled.rows if row.samples])
        return StepUnderWay(scheduled, shape, run, max_steps, now, planned, predicted)

    def _predict(self, scheduled: SchedulerOutput) -> float | None:
        """Return what the scheduler's own model expects of a step, seconds."""
        model = self.scheduler.step_time_model
        return None if model is None else model.step_time(scheduled.shape)

    def expire(self, now: float) -> list[OfferedRequest]:
        """Return the requests that the last plan has ended."""
        outputs = self.scheduler.take_expired()
        return self.deliveries.expire(outputs, now) if outputs else []

    def end_step(
        self, step: StepUnderWay, ends: array[float], started: list[OfferedRequest] | None
    ) -> list[OfferedRequest]:
        """Take the results of a step, or of a run of them; return the requests that ended.

        Parameters
        ----------
        ends : when each step of the run ended, seconds.
        started : gets the requests that have their first token now; None where nobody is told.
        """
        scheduled, now = step.scheduled, ends[-1]
        first_context = self._count(step, ends)
        if step.run is not None and len(ends) > 1:
            step.run.advance(ends[:-1])
        sampled = self.sampler.sample(scheduled, len(ends))
        outputs = self.scheduler.update(scheduled, sampled, now)
        # The last token of a prompt, alone in its chunk, looks like a decode; it is in no run.
        if started is not None and step.run is None:
            started += self.deliveries.first(outputs)
        finished = self.deliveries.take(outputs, ends)
        if self._observer is not None:
            self._tell(self._observer, step, first_context, ends, self.scheduler.results.drafts)
        return finished

    def advance(self, step: StepUnderWay, ends: array[float]) -> None:
        """Take the results of the first steps of a run, which goes on.

        Parameters
        ----------
        ends : when each of them ended, seconds.
        """
        assert step.run is not None
        first_context = self._count(step, ends)
        step.run.advance(ends)
        self.deliveries.note(step.scheduled, ends)
        if self._observer is not None:
            context = step.shape.decode_context_tokens
            self._tell(self._observer, step, first_context, ends, None)
            step.shape.decode_context_tokens = context
            step.planned = Planned()
            step.predicted = self._predict(step.scheduled)
        step.start = ends[-1]

    def _count(self, step: StepUnderWay, ends: array[float]) -> int:
        """Count steps that have ended; return what the decodes of the first of them read."""
        first_context = step.shape.decode_context_tokens
        self.num_steps += len(ends)
        if self._largest is not None:
            self._largest.see(step.shape, first_context + step.shape.num_lm_head_rows * (len(ends) - 1))
        _add_work(self._work, step.shape, first_context=first_context, num_steps=len(ends))
        return first_context

    def _tell(
        self,
        observer: SimulationObserver,
        step: StepUnderWay,
        first_context: int,
        ends: array[float],
        drafts: DraftStats | None,
    ) -> None:
        """Describe a step, or a run by its first, to whoever watches."""
        assert step.planned is not None
        assert self._reporter is not None
        step.shape.decode_context_tokens = first_context
        stats = self._reporter.stats(step.scheduled, step.planned, start=step.start, end=ends[-1])
        if step.predicted is None:  # nothing learns, and the device takes what is predicted
            stats.predicted_seconds = ends[-1] - step.start
        elif len(ends) == 1:
            stats.predicted_seconds = step.predicted
        stats.drafts = drafts
        if observer.wanted_steps == "all":
            stats.scheduler = self.scheduler.state()
        observer.on_step(self._index, stats)

    def withdraw(self, request_id: str) -> None:
        """Let go of a request, which goes on elsewhere."""
        self.deliveries.drop(request_id)
        self.scheduler.abort((request_id,))

    def adopt(self, handover_id: str, offered: OfferedRequest, detached: Detached, now: float) -> None:
        """Go on with a request that has come with its KV; raises `RequestRejected` as `Handovers.adopt`."""
        record = offered.record
        request = detached.moved(offered.request)
        if record.delivery_times:
            request = replace(request, first_token_time=record.delivery_times[0])
        self.scheduler.handover.adopt(handover_id, request, detached, now)
        self.deliveries.open(offered, is_moved=True)

    def let_go(self, request_id: str) -> None:
        """Forget a request that another replica has adopted."""
        self.deliveries.drop(request_id)
        self.scheduler.handover.free(request_id)

    def begin_work(self, now: float) -> None:
        """Count from now on as busy, unless it does already."""
        if self._busy_since == inf:
            self._busy_since = now

    def end_work(self, now: float) -> None:
        """Count as idle from now on."""
        if self._busy_since != inf:
            self.busy_seconds += now - self._busy_since
            self._busy_since = inf

    def _beyond(self) -> Beyond:
        if self._largest is None or self._measured is None:
            return {}
        return self._largest.beyond(self._measured)

    def counters(self) -> ReplicaCounters:
        """Return what the replica has done so far."""
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        return ReplicaCounters(
            num_steps=self.num_steps,
            busy_seconds=self.busy_seconds,
            work=self._work,
            num_preemptions=scheduler.num_preemptions,
            num_prefix_queries=scheduler.num_prefix_queries,
            num_prefix_hits=scheduler.num_prefix_hits,
            num_blocks=pool.num_blocks,
            peak_used_blocks=pool.peak_used_blocks,
            num_leaked_blocks=pool.num_used_blocks if scheduler.num_unfinished == 0 else 0,
            drafts=self.sampler.counts,
            beyond=self._beyond(),
        )


class StepNoise:
    """Log-normal factors with mean 1, each a function of (seed, replica, step) alone.

    They do not depend on the order in which they are asked for, so runs are equal whatever is looked at
    ahead, and two policies on one replica meet the same noise in their n-th step.

    Parameters
    ----------
    sigma : standard deviation of the factor's logarithm, above 0.
    seed, replica : whose noise it is.
    """

    def __init__(self, sigma: float, *, seed: int, replica: int) -> None:
        self._sigma = sigma
        self._log_mean = -sigma * sigma / 2
        self._key = f"{seed}:{replica}".encode()

    def factor(self, step: int) -> float:
        """Return what the time of a step is multiplied by.

        Parameters
        ----------
        step : its number on this replica, from 0.
        """
        digest = blake2b(step.to_bytes(8, "little"), digest_size=8, key=self._key).digest()
        # 53 bits, moved off 0 and 1, where the normal distribution has no value.
        uniform = ((int.from_bytes(digest, "little") >> 11) + 0.5) * _SCALE
        return exp(self._log_mean + self._sigma * _NORMAL.inv_cdf(uniform))


def make_noise(sigma: float, *, seed: int, replica: int) -> StepNoise | None:
    """Return the noise of a replica; None where steps take exactly what is predicted."""
    return StepNoise(sigma, seed=seed, replica=replica) if sigma else None


def _add_work(total: BatchShape, shape: BatchShape, *, first_context: int, num_steps: int) -> None:
    """Add a step, or a run of steps of which each decode reads one token more than in the step before.

    Parameters
    ----------
    first_context : `decode_context_tokens` of the first step.
    """
    num_rows = shape.num_lm_head_rows
    total.num_decodes += shape.num_decodes * num_steps
    total.num_new_tokens += shape.num_new_tokens * num_steps
    total.num_lm_head_rows += num_rows * num_steps
    total.query_key_pairs += shape.query_key_pairs * num_steps
    total.chunk_cached_tokens += shape.chunk_cached_tokens * num_steps
    more_context = num_rows * (num_steps * (num_steps - 1) // 2)
    total.decode_context_tokens += first_context * num_steps + more_context
    total.num_draft_tokens += shape.num_draft_tokens * num_steps
    total.num_draft_passes += shape.num_draft_passes * num_steps
    total.num_catch_up_tokens += shape.num_catch_up_tokens * num_steps
    total.catch_up_pairs += shape.catch_up_pairs * num_steps


@runtime_checkable
class Learner(Protocol):
    """A step-time model that each replica can have for itself, to learn from its own steps."""

    def with_learning(self) -> StepTimeModel:
        """Return the same model as it was before any step."""
        ...


def make_scheduler(config: SchedulerConfig, step_time: StepTimeModel, *, predicts: bool = False) -> Scheduler:
    """Return the scheduler of one replica.

    A policy that plans by predicted times, or weighs drafts by them, gets a model of its own, which it
    corrects by the steps that it sees, as a live engine does; what the device does is not its to see.

    Parameters
    ----------
    step_time : what the device is simulated by.
    predicts : whether somebody reads predictions of its load, as of a live engine's under any policy; then
        it has a model wherever there is one that can be handed to it.

    Raises
    ------
    ConfigError : a policy that needs predictions, and a model that cannot be handed to it.
    """
    config = replace(config, window_tokens=None)  # virtual clients take all that comes
    speculation = config.speculation
    weighs_drafts = speculation is not None and speculation.draft_length == "adaptive"
    needs_model = composition(config.policy).needs_step_time or weighs_drafts
    if not (needs_model or (predicts and isinstance(step_time, Learner))):
        return Scheduler(config)
    if not isinstance(step_time, Learner):
        raise ConfigError(
            f"{'adaptive drafting' if weighs_drafts else f'policy {config.policy!r}'} predicts the times of "
            f"steps, but {type(step_time).__name__} "
            "cannot learn from them (it has no with_learning); use a perfmodel.Predictor"
        )
    return Scheduler(config, step_time.with_learning())


def plan_step(scheduler: Scheduler, now: float) -> SchedulerOutput | None:
    """Plan a step; None where nothing can run before something else happens.

    A scheduler may also plan nothing because it only preempted requests or ended some: the next plan, at the
    same time, is another.
    """
    num_unfinished = scheduler.num_unfinished
    while num_unfinished:
        num_preemptions, num_before = scheduler.num_preemptions, num_unfinished
        scheduled = scheduler.schedule(now)
        if scheduled is not None:
            return scheduled
        num_unfinished = scheduler.num_unfinished
        if (scheduler.num_preemptions, num_unfinished) == (num_preemptions, num_before):
            return None
    return None


def make_sampler(config: SimulationConfig, deliveries: Deliveries) -> Sampler:
    """Return what samples on one replica."""
    if config.scheduler.speculation is None:
        return VirtualSampler(deliveries, may_stop=config.declared_max_tokens is not None)
    return VerifyingSampler(deliveries, config)
