"""From the flags of a load to its requests and objectives."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onbeat.cli.options import read_options
from onbeat.core.errors import ConfigError
from onbeat.core.options import settings_of
from onbeat.core.slo import SLO, SLO_CLASSES
from onbeat.workload.arrival_plan import ArrivalPlan
from onbeat.workload.arrivals import RateStep
from onbeat.workload.load_source import LoadName, LoadSource, make_load
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass
from onbeat.workload.slo_config import read_slo_config
from onbeat.workload.slo_entries import built_in_slo
from onbeat.workload.trace import TIMED_KINDS, read_trace

DEFAULT_RATE = 1.0
"""Requests per second where nothing sets a rate; the help says so."""
ONLY_CLASS = "default"
"""Name of the class of objectives that come from flags."""


def offered_load(args: argparse.Namespace, *, max_model_len: int, seed: int) -> OfferedLoad:
    """Return the requests that the flags describe.

    Parameters
    ----------
    args : parsed with `workload_options.add_workload_arguments`.
    max_model_len : tokens of the context; `--overlong` says what becomes of longer requests.
    seed : decides lengths, arrivals and classes (in place of `--seed`).

    Raises
    ------
    ConfigError : flags that do not go together, or a bad file.
    """
    classes = slo_classes(args)
    source = load_source(args)
    if args.num_prompts is not None and args.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {args.num_prompts}")
    plan = arrival_plan(args, is_timed=source.name in TIMED_KINDS)
    load = make_load(source, plan, num_requests=args.num_prompts, seed=seed)
    load = load.check_lengths(max_model_len, overlong=args.overlong)
    return load.with_classes(classes, seed=seed) if classes else load


def load_source(args: argparse.Namespace) -> LoadSource:
    """Return where lengths come from; `--trace` finds the kind from the header."""
    name: LoadName = args.dataset_name or "random"
    path, columns = args.dataset_path, _columns(args.length_columns)
    if args.trace is not None:
        if args.dataset_name is not None or path is not None:
            raise ConfigError(
                "--trace names file and kind at once: leave out --dataset-name and --dataset-path"
            )
        name, path = read_trace(args.trace, columns=columns).kind, args.trace
    _refuse_foreign(args, name)
    return LoadSource(
        name=name,
        path=path,
        input_len=1024 if args.input_len is None else args.input_len,
        output_len=args.output_len,
        range_ratio=args.random_range_ratio,
        zipf_exponent=1.0 if args.zipf_exponent is None else args.zipf_exponent,
        columns=columns,
        shuffle=not args.disable_shuffle,
        count_tokens=_token_counter(args.tokenizer),
    )


def _refuse_foreign(args: argparse.Namespace, name: str) -> None:
    """Refuse flags that would have no effect on the data set in use."""
    owners = {
        "input_len": ("random", "conversation", "zipf"),
        "random_range_ratio": ("random",),
        "zipf_exponent": ("zipf",),
        "tokenizer": ("sharegpt",),
        "disable_shuffle": ("sharegpt", "lengths"),
    }
    for flag, names in owners.items():
        if getattr(args, flag) and name not in names:
            raise ConfigError(
                f"--{flag.replace('_', '-')} is for --dataset-name {' or '.join(names)}, not for {name}"
            )
    if args.output_len is not None and args.output_len < 1:
        raise ConfigError(f"--output-len must be at least 1, got {args.output_len}")


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


def arrival_plan(args: argparse.Namespace, *, is_timed: bool) -> ArrivalPlan | None:
    """Return when requests come; None is a closed loop.

    Parameters
    ----------
    is_timed : whether the data set has times of its own: they are the default.
    """
    kind, rate = args.arrivals, args.request_rate
    if kind is None and args.rate_steps is not None:
        kind = "steps"
    if kind is None and rate is None and args.max_concurrency is not None:
        if args.rate_scale != 1.0:
            raise ConfigError("--max-concurrency alone is a closed loop: it has no rate to scale")
        return None
    if kind is None:
        kind = "replay" if is_timed and rate is None else "gamma"
    if rate is None:
        rate = math.inf if kind in {"replay", "steps"} else DEFAULT_RATE
    return ArrivalPlan(kind=kind, rate=rate, rate_scale=args.rate_scale, **arrival_shape(args, kind))


def arrival_shape(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Return the parameters of `ArrivalPlan` that shape arrivals, of the flags of `add_arrival_arguments`."""
    shape: dict[str, Any] = {"burstiness": args.burstiness}
    if args.arrival_cv is not None:
        if args.burstiness != 1.0:
            raise ConfigError("--arrival-cv and --burstiness say the same: leave one out")
        if not args.arrival_cv > 0:
            raise ConfigError(f"--arrival-cv must be above 0, got {args.arrival_cv:g}")
        shape["burstiness"] = args.arrival_cv**-2
    for flag, field in (("burst_on_sec", "burst_on"), ("burst_off_sec", "burst_off")):
        if (value := getattr(args, flag)) is not None:
            if kind != "burst":
                raise ConfigError(f"--{flag.replace('_', '-')} is for --arrivals burst; this run uses {kind}")
            shape[field] = value
    if args.rate_steps is not None:
        shape["steps"] = _rate_steps(args.rate_steps)
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


def slo_classes(args: argparse.Namespace) -> tuple[SLOClass, ...]:
    """Return the objectives that the flags give, by share of the requests.

    Raises
    ------
    ConfigError : one is outside its range, or flags and a file both give some.
    """
    slo = read_options(args, SLO)
    if args.slo_config is None:
        return () if slo.is_empty else (SLOClass(name=ONLY_CLASS, slo=slo),)
    if not slo.is_empty:
        given = ", ".join(each.flag for each in settings_of(SLO) if getattr(slo, each.name) is not None)
        raise ConfigError(f"--slo-config sets the objectives itself: leave out {given}")
    return _classes(args.slo_config)


def _classes(text: str) -> tuple[SLOClass, ...]:
    if text in SLO_CLASSES:
        return (SLOClass(name=text, slo=built_in_slo(text)),)
    return read_slo_config(Path(text))


def tightest_tbt(args: argparse.Namespace) -> float | None:
    """Return the tightest TBT objective of the flags, seconds; None without one."""
    return min((each.slo.tbt for each in slo_classes(args) if each.slo.tbt is not None), default=None)
