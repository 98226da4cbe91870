"""The flags of what `onbeat bench serve` asks, and when; names and defaults as of `vllm bench serve`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from onbeat.bench.bench_config import (
    FILE_DATASETS,
    TIMED_DATASETS,
    DatasetConfig,
    DatasetName,
    LoadConfig,
    RampConfig,
    RunConfig,
)
from onbeat.bench.plan import concurrency_sweep, rate_sweep
from onbeat.cli.args import LEVELS, listed, natural, numbers, positive
from onbeat.cli.workload import ArrivalOptions, job_deadline_option
from onbeat.core.errors import ConfigError
from onbeat.core.options import changed, option, part
from onbeat.workload.arrivals import RampShape
from onbeat.workload.load_source import JOB_LOADS
from onbeat.workload.trace import read_trace

_data = partial(option, group="data set")
_load = partial(option, group="load")

_BESIDE_CLOSED_LOOPS = frozenset({"sweep_concurrency", "max_concurrency", "num_warmups"})
_OWN_FLAGS = {
    "random": (
        *("random_input_len", "random_output_len", "random_range_ratio", "random_prefix_len"),
        *("random_output_range_ratio", "random_long_share", "random_long_input_len"),
    ),
    "sharegpt": ("sharegpt_output_len",),
    "zipf": ("zipf_exponent",),
    "prefix_repetition": (
        *("prefix_repetition_prefix_len", "prefix_repetition_suffix_len"),
        *("prefix_repetition_num_prefixes", "prefix_repetition_output_len"),
    ),
}
"""Flags of one data set alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """What is asked."""

    dataset_name: DatasetName | None = _data(None, help="data set of requests (default: random)")
    dataset_path: Path | None = _data(None, metavar="FILE", help="file of a data set that has one; gzip too")
    trace: Path | None = _data(
        None, metavar="FILE", help="trace file of any known kind; replayed in its own time"
    )
    num_prompts: int | None = _data(
        None,
        parse=int,
        metavar="N",
        help="requests per run (default: 1000, 100 jobs, or all of a smaller file)",
    )
    job_deadline: float | None = job_deadline_option()
    input_len: int | None = _data(None, parse=positive, help="prompt tokens, for generated data sets")
    output_len: int | None = _data(None, parse=positive, help="output tokens, for every data set")
    random_input_len: int | None = _data(None, parse=positive, help="prompt tokens of random (default: 1024)")
    random_output_len: int | None = _data(None, parse=positive, help="output tokens of random (default: 128)")
    random_range_ratio: float = _data(0.0, parse=float, help="lengths vary by this share around the mean")
    random_output_range_ratio: float | None = _data(
        None, parse=float, metavar="X", help="the same of output tokens alone (default: --random-range-ratio)"
    )
    random_long_share: float = _data(
        0.0,
        parse=float,
        metavar="X",
        help="share of random's requests that have long prompts; both kinds are reported apart",
    )
    random_long_input_len: int | None = _data(
        None, parse=positive, metavar="N", help="tokens of these long prompts (default: 1500)"
    )
    random_prefix_len: int = _data(0, parse=natural, help="tokens that all prompts of random share")
    sharegpt_output_len: int | None = _data(
        None, parse=positive, help="output tokens of sharegpt, in place of the recorded lengths"
    )
    prefix_repetition_prefix_len: int | None = _data(
        None, parse=positive, help="tokens of each repeated prefix (default: 256)"
    )
    prefix_repetition_suffix_len: int | None = _data(
        None, parse=positive, help="tokens after the prefix (default: 256)"
    )
    prefix_repetition_num_prefixes: int | None = _data(
        None, parse=positive, help="different prefixes (default: 10)"
    )
    prefix_repetition_output_len: int | None = _data(
        None, parse=positive, help="output tokens (default: 128)"
    )
    zipf_exponent: float | None = _data(
        None, parse=float, metavar="S", help="exponent S of zipf: p(length) falls as length^-S (default: 1)"
    )
    disable_shuffle: bool = _data(
        default=False, is_switch=True, help="take conversations and lengths in file order"
    )
    seed: int = _data(0, parse=natural, help="random seed of lengths and arrivals")
    salt: str | None = _data(
        None, help="random seed of the words (default: new each time, so that no prefix cache helps)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """When it is asked."""

    request_rate: float = _load(math.inf, parse=float, metavar="R", help="requests/s; inf = no schedule")
    max_concurrency: int | None = _load(None, parse=int, metavar="N", help="most requests open at once")
    spread: ArrivalOptions = part(ArrivalOptions)
    rate_scale: float = _load(1.0, parse=float, metavar="X", help="replay at X times the recorded rate")
    ramp_up_strategy: RampShape | None = _load(None, help="how the rate changes during the run")
    ramp_up_start_rps: float | None = _load(
        None, parse=float, metavar="R", help="rate at the start, requests/s"
    )
    ramp_up_end_rps: float | None = _load(None, parse=float, metavar="R", help="rate at the end, requests/s")
    num_warmups: int = _load(0, parse=int, metavar="N", help="unmeasured requests before each run")
    sweep_concurrency: str | None = _load(
        None, metavar="N,N,...", help="run a closed loop for each concurrency"
    )
    sweep_rate: str | None = _load(None, metavar="R,R,...", help="run an open loop for each request rate")


def planned_runs(dataset: DatasetOptions, load: LoadOptions, *, title: str) -> list[RunConfig]:
    """Return the runs that the flags ask for: one, or those of sweeps.

    Raises
    ------
    ConfigError : flags that do not go together.
    """
    what = dataset_config(dataset)
    base = RunConfig(dataset=what, load=load_config(load, what), num_prompts=dataset.num_prompts, title=title)
    runs: list[RunConfig] = []
    if load.sweep_concurrency:
        runs += concurrency_sweep(base, listed("--sweep-concurrency", load.sweep_concurrency, *LEVELS))
    if load.sweep_rate:
        runs += rate_sweep(base, numbers("--sweep-rate", load.sweep_rate))
    return runs or [base]


def dataset_config(options: DatasetOptions) -> DatasetConfig:
    """Return the data set that the flags name; `--trace` finds its kind from the header."""
    name: DatasetName = options.dataset_name or "random"
    path = options.dataset_path
    if options.trace is not None:
        if options.dataset_name is not None or options.dataset_path is not None:
            raise ConfigError(
                "--trace names file and kind at once: leave out --dataset-name and --dataset-path"
            )
        name, path = read_trace(options.trace).kind, options.trace
    own_input = options.random_input_len if name == "random" else None
    own_output = {"random": options.random_output_len, "sharegpt": options.sharegpt_output_len}.get(name)
    _refuse_foreign(options, name)
    if options.random_long_input_len is not None and not options.random_long_share:
        raise ConfigError("--random-long-input-len needs --random-long-share")
    return DatasetConfig(
        name=name,
        path=path,
        input_len=options.input_len or own_input or 1024,
        output_len=options.output_len or own_output,
        range_ratio=options.random_range_ratio,
        output_range_ratio=options.random_output_range_ratio,
        long_share=options.random_long_share,
        long_input_len=options.random_long_input_len or 1500,
        prefix_len=options.random_prefix_len,
        num_prefixes=options.prefix_repetition_num_prefixes or 10,
        repeated_prefix_len=options.prefix_repetition_prefix_len or 256,
        suffix_len=options.prefix_repetition_suffix_len or 256,
        repetition_output_len=options.prefix_repetition_output_len or 128,
        zipf_exponent=1.0 if options.zipf_exponent is None else options.zipf_exponent,
        shuffle=not options.disable_shuffle,
        job_deadline=options.job_deadline,
    )


def _refuse_foreign(options: DatasetOptions, name: str) -> None:
    """Refuse flags of another data set than the one in use, which would have no effect."""
    owners = {flag: owner for owner, flags in _OWN_FLAGS.items() for flag in flags}
    for each in changed(options):
        if (owner := owners.get(each.name, name)) != name:
            raise ConfigError(f"{each.flag} is for --dataset-name {owner}; this run uses {name}")
    if options.disable_shuffle and name not in {"sharegpt", "lengths"}:
        raise ConfigError(f"--disable-shuffle has no effect on --dataset-name {name}, which is not shuffled")
    if options.output_len is not None and name in JOB_LOADS:
        raise ConfigError(f"--output-len has no effect on {name}, whose calls have lengths of their own")
    if options.input_len and (name in FILE_DATASETS | JOB_LOADS or name == "prefix_repetition"):
        raise ConfigError(
            f"--input-len has no effect on --dataset-name {name}, whose prompts have their own lengths"
        )


def load_config(options: LoadOptions, dataset: DatasetConfig) -> LoadConfig:
    """Return the load that the flags describe, sweeps aside."""
    arrivals = options.spread.kind
    has_own_load = any(
        (
            math.isfinite(options.request_rate),
            options.max_concurrency,
            options.sweep_rate,
            options.sweep_concurrency,
            options.ramp_up_strategy,
        )
    )
    if arrivals is None:
        arrivals = "replay" if dataset.name in TIMED_DATASETS and not has_own_load else "gamma"
    return LoadConfig(
        request_rate=_first_rate(options),
        arrivals=arrivals,
        rate_scale=options.rate_scale,
        **options.spread.shape(arrivals),
        ramp=_ramp(options),
        max_concurrency=options.max_concurrency,
    )


def _first_rate(options: LoadOptions) -> float:
    """Return the rate of the first run; refuse flags that a sweep would override."""
    rate: float = options.request_rate
    for each in changed(options):
        if options.sweep_concurrency and not options.sweep_rate and each.name not in _BESIDE_CLOSED_LOOPS:
            raise ConfigError(f"--sweep-concurrency makes closed loops: they have no {each.flag}")
    if options.sweep_concurrency and options.max_concurrency is not None:
        raise ConfigError("--sweep-concurrency sets --max-concurrency itself: leave one out")
    if not options.sweep_rate:
        return rate
    if math.isfinite(rate):
        raise ConfigError("--sweep-rate sets --request-rate itself: leave one out")
    return numbers("--sweep-rate", options.sweep_rate)[0]


def _ramp(options: LoadOptions) -> RampConfig | None:
    start, end = options.ramp_up_start_rps, options.ramp_up_end_rps
    if options.ramp_up_strategy is None:
        if (start, end) != (None, None):
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return None
    if start is None or end is None:
        raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    return RampConfig(shape=options.ramp_up_strategy, start_rate=start, end_rate=end)
