"""The scheduler class that vLLM loads: its own, with each step planned by our `slo` policy.

`SLOScheduler` is what `--scheduler-cls` names. Where another class has that place, `SLOSchedulerMixin` goes
before it: `class Mine(SLOSchedulerMixin, Other): ...`.

`Plugin` stands between vLLM's scheduler and our plans: no fault of ours may end or stall the engine.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from onbeat.core.errors import ConfigError, InvalidRequest, SLOUnattainable
from onbeat.core.request import RequestOutput
from onbeat.scheduler.replica.idle_check import IdleCheck
from onbeat.vllm import calibrate, telemetry
from onbeat.vllm.objectives import ID, log_as_vllm_does, read, read_config
from onbeat.vllm.steps import EngineSteps, Imposed, TakenStep, impose, mismatch
from onbeat.vllm.surface import EngineRequest, Surface

logger = logging.getLogger("onbeat.vllm")

MOST_FAULTS = 3
"""Faults in a row after which onbeat plans no more in this process."""
_TRIAL, _MOST_DIFFERENT = 50, 5
"""First steps by which a version that nobody has tried is judged, and rows of them that may differ."""
_SEED = 1
"""Of the tokens of made-up requests."""
_SAY_EVERY = 60.0
"""Seconds between two lines about steps that were not as planned."""
_TOLD_STEPS = 50
"""Steps whose predicted and measured times are told together."""


class Plugin:
    """One scheduler's plans, and what is done where there is none.

    Attributes
    ----------
    is_on : whether onbeat plans.
    num_planned, num_foreign : steps that onbeat planned, and that vLLM planned itself.
    num_faults : steps that vLLM planned because onbeat failed.
    num_mismatches : requests whose tokens in a step were not those of the plan.
    """

    def __init__(self, scheduler: Any) -> None:
        log_as_vllm_does()
        self.num_planned = self.num_foreign = self.num_faults = self.num_mismatches = 0
        self._faults_in_a_row, self._has_failed = 0, False
        """Steps with a fault until now, and whether the one under way had any."""
        self._said_at = float("-inf")
        self._refused: list[tuple[int, Any]] = []
        self._publisher: telemetry.Publisher | None = None
        self._step_times: list[tuple[float, float]] = []
        """Predicted and measured seconds of steps that are not told yet."""
        self._calibration: calibrate.SelfCalibration | None = None
        """While steps are measured."""
        self.surface = surface = Surface(scheduler, engine_version())
        self.is_on = not surface.is_pooling
        if not self.is_on:
            logger.info("onbeat plans nothing here: the model pools, and has no time between tokens")
            return
        if surface.is_untried:
            logger.warning(
                "onbeat was not tried inside vLLM %d.%d; it stops planning if steps are not as planned, the "
                "measured ones or the first %d",
                *(*surface.version, _TRIAL),
            )
        self.config, self.defaults = read_config(surface.options, os.environ)
        self._kept = calibrate.KeptSteps(
            calibrate.profile_key(scheduler.vllm_config), calibrate.settings(scheduler)
        )
        known, measures = calibrate.step_times(self.config, self._kept, calibrate.hindrance(scheduler))
        self.steps = EngineSteps(surface, calibrate.predictor(known), self.defaults.mode)
        if measures:
            self._calibration = self._new_calibration()
        elif known is not None:
            self._say_misses()
        if self.config.telemetry is not None:
            self._publisher = telemetry.Publisher(telemetry.rank_address(self.config.telemetry, surface.rank))

    # --- a step ---------------------------------------------------------------------------------------

    def plan(self, now: float) -> Imposed | None:
        """Plan the next step; None leaves it to vLLM."""
        if not self._has_failed:
            self._faults_in_a_row = 0
        self._has_failed = False
        if not self.is_on or self.surface.is_paused():
            self._measure(calibrate.SelfCalibration.suspend)
            return None
        self._measure(calibrate.SelfCalibration.send)
        try:
            return self._plan(now)
        except Exception as fault:
            self._note_fault(fault)
            return None

    def _plan(self, now: float) -> Imposed | None:
        steps = self.steps
        plan = steps.plan(now)
        if plan.is_empty and not (steps.in_flight or plan.infeasible or plan.overdue):
            return None  # never stand still
        for output in steps.commit(plan):
            self._expire(output)
        for state in plan.infeasible:
            if state.slo.is_best_effort:
                self._tell(steps.table.requests.get(state.request_id), is_relegated=True)
        return impose(plan, steps.table, self.surface, lambda state: steps.slo.rules.loss(state, plan.now))

    def note_step(self, output: Any, imposed: Imposed | None, now: float) -> None:
        """Count a step that vLLM has planned, and see whether it is the one that it was held to."""
        if not self.is_on:
            return
        if imposed is None:
            self.num_foreign += 1
        else:
            self.num_planned += 1
        with self._guarded():
            self.steps.note_step(output, now)
            if imposed is not None and (different := mismatch(imposed, output, self.steps.table)):
                self.num_mismatches += len(different)
                self._say_different(different, now)
                is_trial = self.num_planned <= _TRIAL and self.num_mismatches > _MOST_DIFFERENT
                if self.surface.is_untried and (is_trial or any(map(calibrate.is_made_up, different))):
                    self._plan_no_more("vLLM did not carry its plans out")

    def take(self, output: Any, now: float) -> None:
        """Learn from a step whose results vLLM has taken."""
        if not self.is_on:
            return
        with self._guarded():
            taken = self.steps.take(output, now)
            if taken is None:
                return
            self._measure(lambda calibration: calibration.take(taken))
            if self._publisher is not None:
                self._tell_times(taken, self._publisher)

    # --- requests -------------------------------------------------------------------------------------

    def add(self, request: EngineRequest, arrival: float, now: float) -> None:
        """Take a request that vLLM has taken, or have it refused.

        Parameters
        ----------
        arrival : when it came, seconds of the clock of `now`.
        """
        self._measure(lambda calibration: calibration.make_room(request))
        if not (self.is_on and self.surface.is_planned(request)):
            return
        with self._guarded():
            try:
                objectives = read(self.surface.extra_args(request), self.defaults)
                asked = self.steps.table.asked(request, objectives, arrival)
                slo = self.steps.add(request, asked, now).slo
            except (SLOUnattainable, InvalidRequest) as error:
                self._refuse(request, telemetry.refusal_by(error))
                return
            if slo.predicted_ttft is not None or slo.is_best_effort:
                self._tell(request, predicted_ttft=slo.predicted_ttft, is_relegated=slo.is_best_effort)

    def forget_ended(self, request_ids: Any) -> None:
        """Forget requests that vLLM has ended."""
        if not self.is_on:
            return
        if request_ids is None:  # it is the end, or a new beginning
            self._measure(calibrate.SelfCalibration.suspend)
            self._calibration = None
        with self._guarded():
            requests = self.steps.table.requests
            given = list(requests) if request_ids is None else request_ids
            for request_id in [given] if isinstance(given, str) else list(given):
                known = requests.get(request_id)
                if known is not None and known.is_finished():
                    self.steps.forget(request_id)

    @property
    def has_work(self) -> bool:
        """Whether something is to be told, or measured, that no request is left for."""
        measures = self.is_on and self._calibration is not None
        return bool(self._refused) or (measures and not self.surface.is_paused())

    def add_refusals(self, outputs: dict[int, Any]) -> None:
        """Put the last outputs of refused requests among those that go out; made-up ones do not go out."""
        if self._calibration is not None:
            for each in outputs.values():
                each.outputs = [
                    output for output in each.outputs if not calibrate.is_made_up(output.request_id)
                ]
        if self._refused:
            refused, self._refused = self._refused, []
            self.surface.add_outputs(outputs, refused)

    def close(self) -> None:
        """Let go of what the process holds."""
        if self._publisher is not None:
            self._publisher.close()

    def _expire(self, output: RequestOutput) -> None:
        """End a request that waited in vain."""
        request = self.surface.scheduler.requests[output.request_id]
        self._refuse(request, telemetry.refusal_after(output))

    def _refuse(self, request: EngineRequest, refusal: telemetry.Refusal) -> None:
        """End a request in vLLM, with words by which the middleware knows the refusal."""
        self.surface.end(request.request_id)
        self._refused.append((request.client_index, self.surface.refusal(request, refusal.text())))
        self._tell(request, refusal=refusal)

    # --- what the API servers hear --------------------------------------------------------------------

    def _tell(self, request: EngineRequest | None, **news: Any) -> None:
        """Tell what has become of a request that the middleware knows."""
        if self._publisher is None or request is None:
            return
        slo_id = self.surface.extra_args(request).get(ID)
        if isinstance(slo_id, str):
            self._publisher.send(telemetry.RequestNews(slo_id=slo_id, **news))

    def _tell_times(self, taken: TakenStep, publisher: telemetry.Publisher) -> None:
        """Tell now and then what steps took beside what was predicted."""
        times = self._step_times
        times.append((taken.noted.seconds, taken.seconds))
        if len(times) >= _TOLD_STEPS:
            predicted, measured = map(sum, zip(*times, strict=True))
            publisher.send(
                telemetry.StepTimes(rank=self.surface.rank, predicted=predicted, measured=measured)
            )
            times.clear()

    # --- step times -----------------------------------------------------------------------------------

    def _new_calibration(self) -> calibrate.SelfCalibration:
        """Return what measures steps, with requests of its own."""
        surface, kv = self.surface, self.steps.table.kv
        limits = calibrate.StepLimits(
            num_tokens=surface.scheduler.max_num_scheduled_tokens,
            num_seqs=surface.max_num_seqs,
            max_model_len=surface.max_model_len,
            num_kv_tokens=kv.num_blocks * kv.block_size,
            graph_sizes=calibrate.capture_sizes(surface.scheduler),
            num_drafts=surface.num_drafts,
        )
        return calibrate.SelfCalibration(self.steps, limits, calibrate.RequestMaker(surface.scheduler, _SEED))

    def _measure(self, act: Callable[[calibrate.SelfCalibration], None]) -> None:
        """Let steps be measured, if they still are. A fault ends that, and no step; so does its end."""
        calibration = self._calibration
        if calibration is None:
            return
        try:
            act(calibration)
            if calibration.is_done:
                self._calibration = None
                known = self._kept.keep(calibration.measured, calibration.seconds)
                self.steps = EngineSteps(self.surface, calibrate.predictor(known), self.defaults.mode)
                self._say_misses()
        except Exception as fault:
            self._calibration = None
            trace = None if isinstance(fault, ConfigError) else fault
            logger.warning("step times: guessed, because they were not measured (%s)", fault, exc_info=trace)
            with suppress(Exception):
                calibration.suspend()

    def _say_misses(self) -> None:
        """Say which objectives no step can keep, before somebody waits for them."""
        short, long = (min(num, self.surface.max_model_len) for num in (128, 1024))
        check = IdleCheck(short=short, long=long, context=long)
        for miss in check.misses(self.steps.model, self.defaults.objectives_by_class()):
            logger.warning("%s. No plan can keep that: raise the objective, or take a faster machine", miss)

    # --- faults ---------------------------------------------------------------------------------------

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Keep a fault of ours from vLLM."""
        try:
            yield
        except Exception as fault:
            self._note_fault(fault)

    def _note_fault(self, fault: Exception) -> None:
        """Count a fault of ours; after several in a row plan no more."""
        self.num_faults += 1
        self._faults_in_a_row += not self._has_failed
        self._has_failed = True
        logger.error("onbeat failed; vLLM goes on by itself for this step", exc_info=fault)
        if self._faults_in_a_row >= MOST_FAULTS:
            self._plan_no_more(f"it failed {MOST_FAULTS} times in a row")

    def _plan_no_more(self, why: str) -> None:
        self.is_on = False
        logger.error(
            "onbeat plans no more, since %s: vLLM serves without objectives until it is started again; "
            "please report what is said above",
            why,
        )

    def _say_different(self, different: dict[str, tuple[int, int]], now: float) -> None:
        if now - self._said_at >= _SAY_EVERY:
            self._said_at = now
            logger.warning(
                "vLLM's step is not the planned one for %d requests, such as %s (planned, actual); %d so "
                "far. It is served all the same",
                len(different),
                next(iter(different.items())),
                self.num_mismatches,
            )


def engine_version() -> str:
    """Return vLLM's version."""
    from vllm.version import __version__

    return str(__version__)


_Base: Any = object
"""vLLM's scheduler, behind it in the order of classes."""


class SLOSchedulerMixin(_Base):  # type: ignore[misc]
    """Plans the steps of the vLLM scheduler behind it, and has it carry them out.

    It never keeps vLLM from serving: where a plan fails, vLLM plans that step itself (`Plugin`).

    Attributes
    ----------
    clock, wall : monotonic seconds, and those of `Request.arrival_time`. A test may have others.
    """

    clock = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.onbeat = Plugin(self)

    def add_request(self, request: EngineRequest) -> None:
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if is_new:
            waited = max(0.0, self.wall() - request.arrival_time)
            self.onbeat.add(request, self.clock() - waited, self.clock())

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        plugin = self.onbeat
        throttles = bool(args and args[0]) or bool(kwargs.get("throttle_prefills"))
        imposed = None if throttles else plugin.plan(self.clock())
        if imposed is None:
            output = super().schedule(*args, **kwargs)
        else:
            with imposed.during(plugin.surface, plugin.steps.table.kv):
                output = super().schedule(*args, **kwargs)
        plugin.note_step(output, imposed, self.clock())
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        outputs: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        self.onbeat.take(scheduler_output, self.clock())
        self.onbeat.add_refusals(outputs)
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        ended = super().finish_requests(request_ids, finished_status)
        self.onbeat.forget_ended(request_ids)
        return ended

    def has_requests(self) -> bool:
        return super().has_requests() or self.onbeat.has_work

    def shutdown(self) -> None:
        self.onbeat.close()
        super().shutdown()


def _make_scheduler() -> type:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    class SyncSLOScheduler(SLOSchedulerMixin, Scheduler):  # type: ignore[misc]
        """For steps one after another, where drafts come before the step that verifies them."""

    class SLOScheduler(SLOSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
        """vLLM's own scheduler, with steps planned by objectives."""

        def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
            if cls is SLOScheduler and not vllm_config.scheduler_config.async_scheduling:
                return SyncSLOScheduler(vllm_config, *args, **kwargs)
            return super().__new__(cls)

    return SLOScheduler


def __getattr__(name: str) -> Any:
    """Return `SLOScheduler`, made when it is asked for: only then vLLM is imported."""
    if name != "SLOScheduler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made = _make_scheduler()
    return made
