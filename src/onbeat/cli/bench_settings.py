"""From the flags of `onbeat bench serve` to the configuration of a load test."""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
from pathlib import Path
from typing import Any

from onbeat.bench.config import (
    FILE_DATASETS,
    TIMED_DATASETS,
    BenchConfig,
    DatasetConfig,
    DatasetName,
    LoadConfig,
    RampConfig,
    TargetConfig,
)
from onbeat.cli.bench_options import BACKENDS, SAMPLING_FLAGS
from onbeat.cli.workload_settings import arrival_shape, slo_classes
from onbeat.core.errors import ConfigError
from onbeat.metrics.summary import METRICS, SummaryOptions
from onbeat.workload.trace import read_trace

# Other names of metrics: E2E is timed from the scheduled arrival, so it contains the client's queue.
METRIC_ALIASES = {"tbt": "itl", "e2el_including_client_queue": "e2el"}
QUEUE_METRIC = "client_queue_time"


def bench_config(args: argparse.Namespace) -> BenchConfig:
    """Return what all runs of the command share.

    Raises
    ------
    ConfigError : a value is wrong.
    """
    headers = _pairs("--header", args.header)
    if key := os.environ.get("OPENAI_API_KEY"):
        headers.setdefault("Authorization", f"Bearer {key}")
    target = TargetConfig(
        base_url=args.base_url or f"http://{args.host}:{args.port}",
        api=BACKENDS[args.backend],
        path=args.endpoint,
        model=args.served_model_name or args.model,
        headers=headers,
        request_timeout=args.request_timeout_sec,
        ready_timeout=args.ready_check_timeout_sec,
    )
    return BenchConfig(
        target=target,
        backend=args.backend,
        label=args.label,
        tokenizer=args.tokenizer,
        num_warmups=args.num_warmups,
        seed=args.seed,
        salt=secrets.token_hex(4) if args.salt is None else args.salt,
        extra_body=_extra_body(args),
        summary=summary_options(args),
        slo_classes=slo_classes(args),
        send_slo=args.send_slo,
        asks_to_shed=args.shed,
        num_gpus=args.num_gpus,
        metadata=_pairs("--metadata", args.metadata),
        keep_text=args.save_detailed,
    )


def dataset_config(args: argparse.Namespace) -> DatasetConfig:
    """Return the data set that the flags name; `--trace` finds its kind from the header."""
    name: DatasetName = args.dataset_name or "random"
    path = args.dataset_path
    if args.trace is not None:
        if args.dataset_name is not None or args.dataset_path is not None:
            raise ConfigError(
                "--trace names file and kind at once: leave out --dataset-name and --dataset-path"
            )
        name, path = read_trace(args.trace).kind, args.trace
    own_input = args.random_input_len if name == "random" else None
    own_output = {"random": args.random_output_len, "sharegpt": args.sharegpt_output_len}.get(name)
    _refuse_foreign(args, name)
    if args.random_long_input_len is not None and not args.random_long_share:
        raise ConfigError("--random-long-input-len needs --random-long-share")
    return DatasetConfig(
        name=name,
        path=path,
        input_len=args.input_len or own_input or 1024,
        output_len=args.output_len or own_output,
        range_ratio=args.random_range_ratio,
        output_range_ratio=args.random_output_range_ratio,
        long_share=args.random_long_share,
        long_input_len=args.random_long_input_len or 1500,
        prefix_len=args.random_prefix_len,
        num_prefixes=args.prefix_repetition_num_prefixes or 10,
        repeated_prefix_len=args.prefix_repetition_prefix_len or 256,
        suffix_len=args.prefix_repetition_suffix_len or 256,
        repetition_output_len=args.prefix_repetition_output_len or 128,
        zipf_exponent=1.0 if args.zipf_exponent is None else args.zipf_exponent,
        shuffle=not args.disable_shuffle,
    )


def _refuse_foreign(args: argparse.Namespace, name: str) -> None:
    """Refuse flags of another data set than the one in use, which would have no effect."""
    owners = {
        "random_input_len": "random",
        "random_output_len": "random",
        "random_range_ratio": "random",
        "random_prefix_len": "random",
        "random_output_range_ratio": "random",
        "random_long_share": "random",
        "random_long_input_len": "random",
        "sharegpt_output_len": "sharegpt",
        "zipf_exponent": "zipf",
        "prefix_repetition_prefix_len": "prefix_repetition",
        "prefix_repetition_suffix_len": "prefix_repetition",
        "prefix_repetition_num_prefixes": "prefix_repetition",
        "prefix_repetition_output_len": "prefix_repetition",
    }
    for flag, owner in owners.items():
        if getattr(args, flag) and name != owner:
            raise ConfigError(
                f"--{flag.replace('_', '-')} is for --dataset-name {owner}; this run uses {name}"
            )
    if args.disable_shuffle and name not in {"sharegpt", "lengths"}:
        raise ConfigError(f"--disable-shuffle has no effect on --dataset-name {name}, which is not shuffled")
    if args.input_len and (name in FILE_DATASETS or name == "prefix_repetition"):
        raise ConfigError(
            f"--input-len has no effect on --dataset-name {name}, whose prompts have their own lengths"
        )


def preset_file(args: argparse.Namespace) -> Path | None:
    """Return the ShareGPT file of a preset, if one is given; refuse flags that the preset sets itself."""
    own = {
        "request_rate": math.inf,
        "max_concurrency": None,
        "num_prompts": None,
        "sweep_concurrency": None,
        "sweep_rate": None,
        "trace": None,
        "input_len": None,
        "output_len": None,
        "arrivals": None,
        "rate_steps": None,
        "ramp_up_strategy": None,
    }
    for name, default in own.items():
        if getattr(args, name) != default:
            raise ConfigError(f"--preset {args.preset} sets --{name.replace('_', '-')} itself: leave it out")
    if args.dataset_name not in {None, "sharegpt"}:
        raise ConfigError(f"--preset {args.preset} takes a ShareGPT file or none, not {args.dataset_name}")
    path: Path | None = args.dataset_path
    return path


def load_config(args: argparse.Namespace, dataset: DatasetConfig) -> LoadConfig:
    """Return the load that the flags describe, sweeps aside."""
    arrivals = args.arrivals
    has_own_load = any(
        (
            math.isfinite(args.request_rate),
            args.max_concurrency,
            args.sweep_rate,
            args.sweep_concurrency,
            args.ramp_up_strategy,
        )
    )
    if arrivals is None and args.rate_steps is not None:
        arrivals = "steps"
    if arrivals is None:
        arrivals = "replay" if dataset.name in TIMED_DATASETS and not has_own_load else "gamma"
    return LoadConfig(
        request_rate=_first_rate(args),
        arrivals=arrivals,
        rate_scale=args.rate_scale,
        **arrival_shape(args, arrivals),
        ramp=_ramp(args),
        max_concurrency=args.max_concurrency,
    )


def _first_rate(args: argparse.Namespace) -> float:
    """Return the rate of the first run; refuse flags that a sweep would override."""
    rate: float = args.request_rate
    if args.sweep_concurrency and not args.sweep_rate and math.isfinite(rate):
        raise ConfigError("--sweep-concurrency makes closed loops: they have no --request-rate")
    if args.sweep_concurrency and args.max_concurrency is not None:
        raise ConfigError("--sweep-concurrency sets --max-concurrency itself: leave one out")
    if not args.sweep_rate:
        return rate
    if math.isfinite(rate):
        raise ConfigError("--sweep-rate sets --request-rate itself: leave one out")
    return numbers("--sweep-rate", args.sweep_rate)[0]


def _ramp(args: argparse.Namespace) -> RampConfig | None:
    rates = (args.ramp_up_start_rps, args.ramp_up_end_rps)
    if args.ramp_up_strategy is None:
        if rates != (None, None):
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return None
    if None in rates:
        raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    return RampConfig(shape=args.ramp_up_strategy, start_rate=rates[0], end_rate=rates[1])


def summary_options(args: argparse.Namespace) -> SummaryOptions:
    """Return metrics, percentiles and objectives."""
    return SummaryOptions(
        metrics=tuple(name for name in table_metrics(args) if name in METRICS),
        percentiles=tuple(numbers("--metric-percentiles", args.metric_percentiles)),
        objectives=_objectives(args.goodput) or None,
        slo_mode=args.slo_mode,
    )


def table_metrics(args: argparse.Namespace) -> list[str]:
    """Return the metrics to show, each once."""
    names = [METRIC_ALIASES.get(name, name) for name in _split(args.percentile_metrics)]
    known = (*METRICS, QUEUE_METRIC)
    for name in names:
        if name not in known:
            all_names = ", ".join((*known, *METRIC_ALIASES))
            raise ConfigError(f"--percentile-metrics: unknown metric {name!r}; known are {all_names}")
    return list(dict.fromkeys(names))


def _objectives(items: list[str]) -> dict[str, float]:
    objectives: dict[str, float] = {}
    for item in items:
        name, _, value = item.partition(":")
        try:
            objectives[name] = float(value) / 1e3
        except ValueError:
            raise ConfigError(f"--goodput takes NAME:MILLISECONDS like ttft:500, got {item!r}") from None
    return objectives


def numbers(flag: str, text: str) -> list[float]:
    """Return the numbers of a comma-separated list.

    Raises
    ------
    ConfigError : something else is in it, or nothing.
    """
    try:
        values = [float(part) for part in _split(text)]
    except ValueError:
        values = []
    if not values:
        raise ConfigError(f"{flag} takes numbers separated by commas, got {text!r}")
    return values


def whole_numbers(flag: str, text: str) -> list[int]:
    """Return the whole numbers, each at least 1, of a comma-separated list."""
    values = numbers(flag, text)
    if any(value < 1 or value != int(value) for value in values):
        raise ConfigError(f"{flag} takes whole numbers of at least 1, got {text!r}")
    return [int(value) for value in values]


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _pairs(flag: str, items: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise ConfigError(f"{flag} takes KEY=VALUE, got {item!r}")
        pairs[key] = value
    return pairs


def _extra_body(args: argparse.Namespace) -> dict[str, Any]:
    try:
        extra = json.loads(args.extra_body)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--extra-body is not JSON ({error}): {args.extra_body!r}") from error
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra-body must be a JSON object, got {args.extra_body!r}")
    # Greedy by default: a load test should do the same work each time.
    body: dict[str, Any] = {"temperature": 0.0}
    body |= {name: getattr(args, name) for name in SAMPLING_FLAGS if getattr(args, name) is not None}
    if args.ignore_eos:
        body["ignore_eos"] = True
    return body | extra
