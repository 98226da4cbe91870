"""Disturbed runs: a device or a load that is not what the policy expects, beside what others make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.harness.intervals import interval_text, mean_interval
from benchmarks.harness.pages import markdown_table
from benchmarks.harness.store import Results
from benchmarks.slo.slo_study.cells import FAMILIES, OBJECTIVES, SIMPLE, SUBJECT, settings_of
from benchmarks.slo.slo_study.loads import LoadKey, make_load
from benchmarks.slo.slo_study.trial import config_of, longest_request
from onbeat.core.slo import SLO, SLOMode
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.metrics.attainment import good_requests
from onbeat.metrics.record import RequestRecord
from onbeat.perfmodel.predictor import Predictor
from onbeat.simulator.setup import build_simulation
from onbeat.simulator.simulate import simulate
from onbeat.workload.arrivals import RateStep, step_arrivals
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass

SET_UP, WORKLOAD, SLO_NAME = "mistral", "poisson", "1s-100ms"
MODE: SLOMode = "stream"
WARM_SECONDS, SECONDS = 240.0, 960.0
"""Of arrivals: thrown away, in which each disturbance has come once, and in all. 4,000 requests count."""
MOST_POINTS_BELOW = 1.0
TRIAGE = "static+triage"
RIVALS = (SIMPLE, *FAMILIES[TRIAGE])
ABUSER = "abuser"

Change = Callable[[int, float, float], tuple[float, float]]
"""From a step's number and the times that the device had been busy before it and before the last one, to a
factor and seconds beside it."""


def _stall(seconds: float, every: int) -> Change:
    return lambda step, _busy, _before: (1.0, seconds if step % every == every - 1 else 0.0)


def _stall_in_time(seconds: float, every: float) -> Change:
    """Return what stalls as time passes, however many steps that takes: as often under each policy."""
    return lambda _step, busy, before: (1.0, seconds if busy // every > before // every else 0.0)


def _slow(factor: float) -> Change:
    return lambda _step, _busy, _before: (factor, 0.0)


def _spells(_step: int, busy: float, _before: float) -> tuple[float, float]:
    return (1.5 if busy % 100.0 < 20.0 else 1.0), 0.0


def _drift(_step: int, busy: float, _before: float) -> tuple[float, float]:
    return 1.0 + 0.3 * min(1.0, busy / SECONDS), 0.0


DEVICES: dict[str, Change] = {
    "stalls of 0.1 s, every 100th step": _stall(0.1, 100),
    "stalls of 0.3 s, every 1,000th step": _stall(0.3, 1000),
    "stalls of 2 s, every 150 s": _stall_in_time(2.0, 150.0),
    "slow spells (20 of 100 s at 1.5 times the time)": _spells,
    "drift to 1.3 times the time": _drift,
    "20 % slower than predicted": _slow(1.2),
    "20 % faster than predicted": _slow(0.8),
}
NOISE = "noise of 30 %"
E2E, UNDECLARED, NO_OBJECTIVES, HALF, TENANT, BURSTS, OVERLOAD = (
    "E2E objectives only (30 s)",
    "E2E objectives only (30 s), lengths not declared",
    "no objectives (scored by 1 s, 100 ms)",
    "half without objectives (the others scored)",
    "an abusing tenant (as much again; the others scored)",
    "bursts of 3x (20 of 100 s)",
    "overload",
)
UNDISTURBED = "undisturbed"
LOADS = (E2E, UNDECLARED, NO_OBJECTIVES, HALF, TENANT, BURSTS, OVERLOAD)
DISTURBANCES = (UNDISTURBED, *DEVICES, NOISE, *LOADS)
_FACTORS = (0.7, 0.95)
FACTORS: dict[str, tuple[float, float]] = {OVERLOAD: (2.0, 5.0), BURSTS: (0.5, 0.7)}
"""Rates as multiples of a capacity, where they are not `_FACTORS`. Bursts have a mean of 1.4 times theirs."""


class DisturbedDevice:
    """A device whose steps take something else than its model says; who plans with the model has to learn it.

    Parameters
    ----------
    model : what the scheduler begins with.
    """

    def __init__(self, model: Predictor, change: Change) -> None:
        self._model = model
        self._change = change
        self._num_steps = 0
        self._busy = self._before = 0.0

    def with_learning(self) -> Predictor:
        """Return what a scheduler is given."""
        return self._model.with_learning()

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        """Return what the next step takes; it is asked for each step once."""
        factor, more = self._change(self._num_steps, self._busy, self._before)
        seconds = self._model.step_time(shape, q) * factor + more
        self._num_steps += 1
        self._before, self._busy = self._busy, self._busy + seconds
        return seconds

    def max_chunk_tokens(
        self, shape: BatchShape, cached_tokens: int, budget: float, q: float | None = None
    ) -> int:
        """Return what the model would."""
        return self._model.max_chunk_tokens(shape, cached_tokens, budget, q)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Nothing is learnt by a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DisturbedRun:
    """One policy under one disturbance."""

    disturbance: str
    policy: str
    factor: float
    """Of the capacity."""
    capacity: float
    """Requests per second."""
    seed: int

    def run(self) -> dict[str, float]:
        """Return the share of good requests of those scored, their longest TTFT, and of an abuser its own."""
        simulation = build_simulation(settings_of(SET_UP, self.policy))
        assert isinstance(simulation.step_time, Predictor)
        config = config_of(simulation, MODE)
        device: StepTimeModel = simulation.step_time
        if self.disturbance in DEVICES:
            device = DisturbedDevice(simulation.step_time, DEVICES[self.disturbance])
        if self.disturbance == UNDECLARED:
            config = replace(config, declared_max_tokens=4096)
        if self.disturbance == NOISE:
            config = replace(config, step_noise=0.3, seed=self.seed)
        load = self._load()
        records = simulate(load, config, device).records
        classes = [load.request_class(row) for row in range(len(load))]
        counted: list[RequestRecord] = []
        others: list[RequestRecord] = []
        for row, record in enumerate(records):
            request_class = classes[row]
            if record.arrival < WARM_SECONDS or (request_class is not None and request_class.slo.is_empty):
                continue
            is_abuser = load.tenants is not None and load.tenants[row] == ABUSER
            (others if is_abuser else counted).append(record)
            if record.slo is None:
                record.slo = OBJECTIVES[SLO_NAME][0].slo
        found = {"good": float(good_requests(counted, mode=MODE).mean()), "longest": _longest(counted)}
        if others:
            found["abuser"] = float(good_requests(others, mode=MODE).mean())
            found["abuser_longest"] = _longest(others)
        return {name: round(value, 4) for name, value in found.items()}

    def _load(self) -> OfferedLoad:
        rate = self.factor * self.capacity
        count = round(rate * SECONDS * (1.4 if self.disturbance == BURSTS else 1.0))
        load = self._draw(count, self.seed)
        if self.disturbance == BURSTS:
            steps = (RateStep(rate, 80.0), RateStep(3 * rate, 20.0))
            rng = np.random.default_rng([self.seed, 7])
            load = load.with_arrivals(step_arrivals(count, steps=steps, burstiness=1.0, rng=rng))
        else:
            load = load.at_rate(rate)
        if self.disturbance == TENANT:
            load = _with_abuser(load, self._draw(count, self.seed + 1000).at_rate(rate))
        classes = OBJECTIVES[SLO_NAME]
        if self.disturbance == NO_OBJECTIVES:
            return load
        if self.disturbance in (E2E, UNDECLARED):
            classes = (SLOClass(name="all", slo=SLO(e2e=30.0)),)
        if self.disturbance == HALF:
            nothing = SLOClass(name="nothing", slo=SLO(), share=0.5)
            classes = (replace(classes[0], share=0.5), nothing)
        return load.with_classes(classes, seed=self.seed)

    def _draw(self, count: int, seed: int) -> OfferedLoad:
        longest = longest_request(SET_UP)
        return make_load(LoadKey(workload=WORKLOAD, seed=seed, num_requests=count, max_model_len=longest))


def _longest(records: Sequence[RequestRecord]) -> float:
    """Return the longest TTFT, seconds; of who got no token the whole time."""
    return max(record.e2e if record.ttft is None else record.ttft for record in records)


def _with_abuser(load: OfferedLoad, abuse: OfferedLoad) -> OfferedLoad:
    """Return the requests of nine tenants and of one who sends as many as all of them."""
    assert load.arrivals is not None
    assert abuse.arrivals is not None
    arrivals = np.concatenate([load.arrivals, abuse.arrivals])
    tenants = [f"tenant {row % 9}" for row in range(len(load))] + [ABUSER] * len(abuse)
    order = np.argsort(arrivals, kind="stable")
    return OfferedLoad(
        name=load.name,
        arrivals=arrivals[order],
        num_prompt_tokens=np.concatenate([load.num_prompt_tokens, abuse.num_prompt_tokens])[order],
        num_output_tokens=np.concatenate([load.num_output_tokens, abuse.num_output_tokens])[order],
        tenants=tuple(tenants[row] for row in order.tolist()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DisturbedPlan:
    """What is run."""

    disturbances: Sequence[str]
    policies: Sequence[str]
    capacity: float
    seeds: int

    def first_seed(self) -> Iterator[DisturbedRun]:
        """Yield the runs that say which budgets go on."""
        yield from self._runs(lambda _disturbance, _factor: self.policies, range(1))

    def more_seeds(self, results: Results) -> Iterator[DisturbedRun]:
        """Yield the runs of the other seeds: of static budgets, of the best of each disturbance and rate."""
        yield from self._runs(
            lambda disturbance, factor: self.finalists(results, disturbance, factor), range(1, self.seeds)
        )

    def finalists(self, results: Results, disturbance: str, factor: float) -> list[str]:
        """Return the policies, of static budgets the best with the first seed alone."""
        budgets = [name for name in self.policies if name in FAMILIES[TRIAGE]]
        known = {
            name: found["good"]
            for name in budgets
            if (found := results.get(self.run_of(disturbance, name, factor, 0))) is not None
        }
        best = [max(known, key=lambda name: known[name])] if known else []
        return [name for name in self.policies if name not in budgets] + best

    def run_of(self, disturbance: str, policy: str, factor: float, seed: int) -> DisturbedRun:
        return DisturbedRun(
            disturbance=disturbance, policy=policy, factor=factor, capacity=self.capacity, seed=seed
        )

    def _runs(self, policies: Callable[[str, float], Sequence[str]], seeds: range) -> Iterator[DisturbedRun]:
        for seed in seeds:
            for disturbance in self.disturbances:
                for factor in FACTORS.get(disturbance, _FACTORS):
                    for policy in policies(disturbance, factor):
                        yield self.run_of(disturbance, policy, factor, seed)


def disturbed_table(plan: DisturbedPlan, results: Results) -> str:
    """Return the table of all disturbances, with how far the subject is below the better of its rivals."""
    rows, num_below = [], 0
    for disturbance in plan.disturbances:
        for factor in FACTORS.get(disturbance, _FACTORS):
            found = _found_of(plan, results, disturbance, factor)
            if SUBJECT not in found:
                continue
            goods = {name: [each["good"] for each in runs] for name, runs in found.items()}
            means = {name: float(np.mean(values)) for name, values in goods.items() if name != SUBJECT}
            shown = [
                f"{interval_text(mean_interval([value * 100 for value in goods[SUBJECT]]))}",
                ", ".join(f"`{name}` {mean * 100:.2f}" for name, mean in means.items()),
            ]
            verdict = "-"
            if means:
                best = max(means, key=lambda name: means[name])
                pairs = list(zip(goods[SUBJECT], goods[best], strict=False))
                points = [(own - other) * 100 for own, other in pairs]
                is_below = float(np.mean(points)) < -MOST_POINTS_BELOW
                num_below += is_below
                interval = mean_interval(points)
                spread = f" [{interval.low:+.1f}, {interval.high:+.1f}]" if len(points) > 1 else ""
                verdict = f"{'**below**' if is_below else 'held'}: {interval.mean:+.2f}{spread} points"
            waits = "; ".join(
                f"`{name}` {max(each['longest'] for each in runs):.1f}" for name, runs in found.items()
            )
            rows.append([disturbance, f"{factor:g}x", str(len(goods[SUBJECT])), *shown, verdict, waits])
    header = ["disturbance", "load", "seeds", f"`{SUBJECT}`, % good", "others", "verdict", "longest TTFT, s"]
    return (
        markdown_table(header, rows)
        + f"\n\n{len(rows) - num_below} of {len(rows)} held: at most {MOST_POINTS_BELOW:g} point below."
        + _tenants_table(plan, results)
    )


def _tenants_table(plan: DisturbedPlan, results: Results) -> str:
    """Return what nine tenants got, and the one who sends as many as they; nothing where it was not run."""
    rows = [
        [
            f"{factor:g}x",
            f"`{policy}`",
            *(f"{np.mean([each[name] for each in runs]) * 100:.1f}" for name in ("good", "abuser")),
            *(f"{max(each[name] for each in runs):.0f}" for name in ("longest", "abuser_longest")),
        ]
        for factor in FACTORS.get(TENANT, _FACTORS)
        for policy, runs in _found_of(plan, results, TENANT, factor).items()
    ]
    if not rows:
        return ""
    header = ["load", "policy", "nine tenants, % good", "the tenth", "longest TTFT, s", "the tenth's"]
    return f"\n\n{TENANT.capitalize()}:\n\n{markdown_table(header, rows)}"


def _found_of(
    plan: DisturbedPlan, results: Results, disturbance: str, factor: float
) -> dict[str, list[dict[str, float]]]:
    """Return policy -> what came of its runs, seed by seed."""
    found: dict[str, list[dict[str, float]]] = {}
    for policy in plan.finalists(results, disturbance, factor):
        for seed in range(plan.seeds):
            each = results.get(plan.run_of(disturbance, policy, factor, seed))
            if each is not None:
                found.setdefault(policy, []).append(dict(each))
    return found
