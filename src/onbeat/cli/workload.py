"""The flags of a load that is simulated, and the requests and objectives that they ask for.

Names are those of `onbeat bench serve` wherever it has the flag.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from onbeat.cli.args import natural
from onbeat.core.errors import ConfigError
from onbeat.core.options import changed, option, part
from onbeat.core.slo import OBJECTIVES, SLO, SLO_CLASSES
from onbeat.workload.arrival_plan import ArrivalKind, ArrivalPlan
from onbeat.workload.arrivals import RateStep
from onbeat.workload.class_traces import have_traces
from onbeat.workload.lanes import LANE_CLASSES, LANES
from onbeat.workload.load_source import JOB_LOADS, TIMED_LOADS, LoadName, LoadSource, make_load
from onbeat.workload.offered import OfferedLoad, check_num_requests
from onbeat.workload.slo_classes import SLOClass
from onbeat.workload.slo_config import read_slo_config
from onbeat.workload.slo_entries import built_in_slo
from onbeat.workload.trace import read_trace

_load = partial(option, group="load")
_data = partial(option, group="data set")

DEFAULT_RATE = 1.0
"""Requests per second where nothing sets a rate; the help says so."""
ONLY_CLASS = "default"
"""Name of the class of objectives that come from flags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalOptions:
    """How arrivals spread."""

    arrivals: ArrivalKind | None = _load(
        None,
        help="process of arrivals: constant, poisson, burst (on and off), steps (--rate-steps); gamma: the "
        "default, Poisson at --burstiness 1; replay: a trace's own times, stretched to --request-rate "
        "if given",
    )
    burstiness: float = _load(1.0, help="shape of the gamma distribution of gaps; below 1 is burstier")
    arrival_cv: float | None = _load(
        None, metavar="CV", help="the same as a coefficient of variation: 1/sqrt(shape)"
    )
    burst_on_sec: float | None = _load(None, metavar="S", help="busy phases of burst (default: 5)")
    burst_off_sec: float | None = _load(None, metavar="S", help="pauses of burst (default: 15)")
    rate_steps: str | None = _load(
        None, metavar="R:S,...", help="rates, each with its seconds; the list repeats"
    )

    @property
    def kind(self) -> ArrivalKind | None:
        """The kind of arrivals that the flags name; None where they name none."""
        return "steps" if self.arrivals is None and self.rate_steps is not None else self.arrivals

    def shape(self, kind: ArrivalKind) -> dict[str, Any]:
        """Return the parameters of `ArrivalPlan` that shape arrivals of a kind.

        Raises
        ------
        ConfigError : flags that do not go together, or that are of another kind.
        """
        shape: dict[str, Any] = {"burstiness": self.burstiness}
        if self.arrival_cv is not None:
            if self.burstiness != 1.0:
                raise ConfigError("--arrival-cv and --burstiness say the same: leave one out")
            if not 1e-3 <= self.arrival_cv <= 1e3:
                raise ConfigError(f"--arrival-cv must be from 0.001 to 1,000, got {self.arrival_cv:g}")
            shape["burstiness"] = self.arrival_cv**-2
        for flag, field, value in (
            ("--burst-on-sec", "burst_on", self.burst_on_sec),
            ("--burst-off-sec", "burst_off", self.burst_off_sec),
        ):
            if value is not None:
                if kind != "burst":
                    raise ConfigError(f"{flag} is for --arrivals burst; this run uses {kind}")
                shape[field] = value
        if self.rate_steps is not None:
            shape["steps"] = _rate_steps(self.rate_steps)
        return shape


def _rate_steps(text: str) -> tuple[RateStep, ...]:
    steps = []
    for item in text.split(","):
        rate, _, seconds = item.partition(":")
        try:
            steps.append(RateStep(float(rate), float(seconds)))
        except ValueError:
            raise ConfigError(
                f"--rate-steps takes RATE:SECONDS,... such as 2:60,8:30, got {item!r}"
            ) from None
    return tuple(steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveOptions:
    """The objectives of requests."""

    slo: SLO = part(SLO)
    slo_config: str | None = option(
        None,
        metavar="FILE.yaml",
        group=OBJECTIVES,
        help="classes by share, with name, share, weight, ttft_ms, tbt_ms, e2e_ms, trace; or a built-in "
        "class: interactive, standard, batch",
    )

    def classes(self) -> tuple[SLOClass, ...]:
        """Return the objectives that the flags give, by share of the requests.

        Raises
        ------
        ConfigError : one is outside its range, or flags and a file both give some.
        """
        slo = self.slo
        if self.slo_config is None:
            return () if slo.is_empty else (SLOClass(name=ONLY_CLASS, slo=slo),)
        if not slo.is_empty:
            given = ", ".join(each.flag for each in changed(slo))
            raise ConfigError(f"--slo-config sets the objectives itself: leave out {given}")
        if self.slo_config in SLO_CLASSES:
            return (SLOClass(name=self.slo_config, slo=built_in_slo(self.slo_config)),)
        return read_slo_config(Path(self.slo_config))

    def tightest_tbt(self) -> float | None:
        """Return the tightest TBT objective, seconds; None without one."""
        return min((each.slo.tbt for each in self.classes() if each.slo.tbt is not None), default=None)


def job_deadline_option() -> Any:
    """Return the field of the deadline of jobs."""
    return _data(
        None,
        flag="--job-deadline-ms",
        unit="ms",
        metavar="MS",
        help="time that each job has, from its start to the end of its last call (default: from its file, "
        "else by its length)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """What is asked, when, and with which objectives."""

    dataset_name: LoadName | None = _data(None, help="where lengths come from (default: random)")
    dataset_path: Path | None = _data(None, metavar="FILE", help="file of a data set that has one; gzip too")
    trace: Path | None = _data(
        None, metavar="FILE", help="trace file of any known kind; replayed in its own time"
    )
    length_columns: str | None = _data(
        None,
        metavar="INPUT,OUTPUT",
        help="columns of lengths (default: num_prefill_tokens,num_decode_tokens)",
    )
    tokenizer: Path | None = _data(None, metavar="PATH", help="measures the texts of sharegpt and jobs")
    num_prompts: int | None = _data(
        None, metavar="N", help="requests (default: 1000, 100 jobs, or all of a file)"
    )
    job_deadline: float | None = job_deadline_option()
    input_len: int | None = _data(
        None,
        aliases=("--random-input-len",),
        metavar="N",
        help="mean prompt tokens of random and conversation, largest of zipf (default: 1024)",
    )
    output_len: int | None = _data(
        None,
        aliases=("--random-output-len",),
        metavar="N",
        help="the same for output tokens (default: 128); replaces those of a file",
    )
    random_range_ratio: float = _data(
        0.0, metavar="X", help="random's lengths vary by this share around the mean"
    )
    zipf_exponent: float | None = _data(
        None, metavar="S", help="exponent S of zipf: p(length) falls as length^-S (default: 1)"
    )
    disable_shuffle: bool = _data(
        default=False, is_switch=True, help="take requests of files without times in file order"
    )
    seed: int = _data(0, parse=natural, help="random seed of lengths, arrivals and classes")
    overlong: Literal["error", "skip"] = _data(
        "error", help="what to do with requests that do not fit the context"
    )
    request_rate: float | None = _load(
        None,
        metavar="R",
        help="requests/s; inf = all at once (default: a trace's own times; a closed loop with "
        "--max-concurrency; else 1)",
    )
    max_concurrency: int | None = _load(None, metavar="N", help="most requests open at once")
    spread: ArrivalOptions = part(ArrivalOptions)
    rate_scale: float = _load(1.0, metavar="X", help="replay at X times the recorded rate")
    objectives: ObjectiveOptions = part(ObjectiveOptions)

    def __post_init__(self) -> None:
        if self.num_prompts is not None:
            check_num_requests(self.num_prompts)


def offered_load(options: WorkloadOptions, *, max_model_len: int, seed: int) -> OfferedLoad:
    """Return the requests that the flags describe.

    Parameters
    ----------
    max_model_len : tokens of the context; `--overlong` says what becomes of longer requests.
    seed : decides lengths, arrivals and classes (in place of `--seed`).

    Raises
    ------
    ConfigError : flags that do not go together, or a bad file.
    """
    classes = options.objectives.classes()
    source = load_source(options)
    if source.name == LANES and not classes:
        classes = LANE_CLASSES
    plan = arrival_plan(options, is_timed=source.name in TIMED_LOADS)
    load = make_load(source, plan, num_requests=options.num_prompts, seed=seed)
    if not have_traces(classes):
        load = load.check_lengths(max_model_len, overlong=options.overlong)
        return load.with_classes(classes, seed=seed) if classes else load
    # Only then are the lengths known.
    return load.with_classes(classes, seed=seed).check_lengths(max_model_len, overlong=options.overlong)


def load_source(options: WorkloadOptions) -> LoadSource:
    """Return where lengths come from; `--trace` finds the kind from the header."""
    name: LoadName = options.dataset_name or "random"
    path, columns = options.dataset_path, _columns(options.length_columns)
    if options.trace is not None:
        if options.dataset_name is not None or path is not None:
            raise ConfigError(
                "--trace names file and kind at once: leave out --dataset-name and --dataset-path"
            )
        name, path = read_trace(options.trace, columns=columns).kind, options.trace
    _refuse_foreign(options, name)
    return LoadSource(
        name=name,
        path=path,
        input_len=1024 if options.input_len is None else options.input_len,
        output_len=options.output_len,
        range_ratio=options.random_range_ratio,
        zipf_exponent=1.0 if options.zipf_exponent is None else options.zipf_exponent,
        columns=columns,
        shuffle=not options.disable_shuffle,
        count_tokens=_token_counter(options.tokenizer),
        job_deadline=options.job_deadline,
    )


def _refuse_foreign(options: WorkloadOptions, name: str) -> None:
    """Refuse flags that would have no effect on the data set in use."""
    owners = {
        "input_len": ("random", "conversation", "zipf"),
        "random_range_ratio": ("random",),
        "zipf_exponent": ("zipf",),
        "tokenizer": ("sharegpt", "jobs"),
        "job_deadline": tuple(sorted(JOB_LOADS)),
        "disable_shuffle": ("sharegpt", "lengths"),
    }
    for each in changed(options):
        if each.name in owners and name not in (names := owners[each.name]):
            raise ConfigError(f"{each.flag} is for --dataset-name {' or '.join(names)}, not for {name}")
    if options.output_len is not None and name in {*JOB_LOADS, LANES}:
        raise ConfigError(f"--output-len has no effect on {name}, whose requests have lengths of their own")


def _columns(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    if len(names) != 2 or not all(names):
        raise ConfigError(f"--length-columns takes two column names INPUT,OUTPUT, got {text!r}")
    return names[0], names[1]


def _token_counter(path: Path | None) -> Callable[[str], int] | None:
    if path is None:
        return None
    from onbeat.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    return lambda text: len(tokenizer.encode(text))


def arrival_plan(options: WorkloadOptions, *, is_timed: bool) -> ArrivalPlan | None:
    """Return when requests come; None is a closed loop.

    Parameters
    ----------
    is_timed : whether the data set has times of its own: they are the default.

    Raises
    ------
    ConfigError : flags that do not go together.
    """
    kind, rate = options.spread.kind, options.request_rate
    if kind is None and rate is None and options.max_concurrency is not None:
        if options.rate_scale != 1.0:
            raise ConfigError("--max-concurrency alone is a closed loop: it has no rate to scale")
        for each in changed(options.spread):
            raise ConfigError(
                f"{each.flag} spreads arrivals; --max-concurrency alone is a closed loop without any: "
                "give --request-rate too"
            )
        return None
    if kind is None:
        kind = "replay" if is_timed and rate is None else "gamma"
    if rate is None:
        rate = math.inf if kind in {"replay", "steps"} else DEFAULT_RATE
    return ArrivalPlan(kind=kind, rate=rate, rate_scale=options.rate_scale, **options.spread.shape(kind))
