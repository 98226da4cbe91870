"""The flags of `onbeat bench serve`, and the configuration that they mean.

Names and defaults are those of `vllm bench serve` wherever it has the flag.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
from pathlib import Path
from typing import Any

from onbeat.bench.config import (
    DATASET_NAMES,
    FILE_DATASETS,
    TIMED_DATASETS,
    BenchConfig,
    DatasetConfig,
    DatasetName,
    LoadConfig,
    RampConfig,
    TargetConfig,
)
from onbeat.bench.payload import Api
from onbeat.core.errors import ConfigError
from onbeat.metrics.summary import METRICS, SummaryOptions
from onbeat.workload.trace import read_trace

BACKENDS: dict[str, Api] = {
    "openai": "completions",
    "openai-completions": "completions",
    "vllm": "completions",
    "openai-chat": "chat",
    "vllm-chat": "chat",
}
# Other names of metrics: E2E is timed from the scheduled arrival, so it contains the client's queue.
METRIC_ALIASES = {"tbt": "itl", "e2el_including_client_queue": "e2el"}
QUEUE_METRIC = "client_queue_time"
SAMPLING_FLAGS = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}


def add_target_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--backend", choices=list(BACKENDS), default="openai", help="which API to speak")
    group.add_argument("--base-url", metavar="URL", help="server address; replaces --host and --port")
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=8000)
    group.add_argument(
        "--endpoint", metavar="PATH", help="path of the API (default: the backend's usual one)"
    )
    group.add_argument("--model", help="model to ask for (default: the first one that the server lists)")
    group.add_argument("--served-model-name", help="the model's name in requests, if it differs from --model")
    group.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="model directory or .gguf file, for exact lengths"
    )
    group.add_argument(
        "--header", action="append", default=[], metavar="KEY=VALUE", help="extra header; repeatable"
    )
    group.add_argument(
        "--request-timeout-sec", type=float, default=21600.0, help="longest time of one request"
    )
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=0.0, help="how long to wait for the server to answer"
    )


def add_dataset_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data set")
    group.add_argument("--dataset-name", choices=DATASET_NAMES, help="what is asked (default: random)")
    group.add_argument(
        "--dataset-path", type=Path, metavar="FILE", help="file of a data set that has one; gzip too"
    )
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="trace file of any known kind; replayed in its own time"
    )
    group.add_argument(
        "--num-prompts",
        type=int,
        metavar="N",
        help="requests per run (default: 1000, or all of a smaller file)",
    )
    group.add_argument("--input-len", type=int, help="prompt tokens, for data sets that are made up")
    group.add_argument("--output-len", type=int, help="output tokens, for every data set")
    group.add_argument("--random-input-len", type=int, help="prompt tokens of random (default: 1024)")
    group.add_argument("--random-output-len", type=int, help="output tokens of random (default: 128)")
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, help="lengths vary by this share around the mean"
    )
    group.add_argument(
        "--random-prefix-len", type=int, default=0, help="tokens that all prompts of random share"
    )
    group.add_argument("--sharegpt-output-len", type=int, help="replaces the recorded answer lengths")
    group.add_argument("--prefix-repetition-prefix-len", type=int, default=256)
    group.add_argument("--prefix-repetition-suffix-len", type=int, default=256)
    group.add_argument("--prefix-repetition-num-prefixes", type=int, default=10)
    group.add_argument("--prefix-repetition-output-len", type=int, default=128)
    group.add_argument(
        "--disable-shuffle", action="store_true", help="take conversations and lengths in file order"
    )
    group.add_argument("--seed", type=int, default=0, help="decides lengths and arrivals")
    group.add_argument(
        "--salt", help="decides the words (default: new ones each time, so that no prefix cache helps)"
    )


def add_load_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="R", help="requests/s; inf = no schedule"
    )
    group.add_argument("--max-concurrency", type=int, metavar="N", help="most requests open at once")
    group.add_argument(
        "--arrivals",
        choices=["gamma", "constant", "replay"],
        help="gamma (Poisson at --burstiness 1), constant, or a trace's own times (its default)",
    )
    group.add_argument(
        "--burstiness", type=float, default=1.0, help="shape of the gamma distribution; below 1 is burstier"
    )
    group.add_argument(
        "--rate-scale", type=float, default=1.0, metavar="X", help="replay at X times the recorded rate"
    )
    group.add_argument(
        "--ramp-up-strategy", choices=["linear", "exponential"], help="move the rate during the run"
    )
    group.add_argument("--ramp-up-start-rps", type=float, metavar="R")
    group.add_argument("--ramp-up-end-rps", type=float, metavar="R")
    group.add_argument(
        "--num-warmups", type=int, default=0, metavar="N", help="unmeasured requests before each run"
    )
    group.add_argument("--sweep-concurrency", metavar="N,N,...", help="one closed-loop run per concurrency")
    group.add_argument("--sweep-rate", metavar="R,R,...", help="one open-loop run per request rate")
    group.add_argument(
        "--preset", choices=["mlc"], help="a published study in one command (see the documentation)"
    )
    group.add_argument(
        "--preset-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="scale its counts and lengths, 0 < X <= 1",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, kind in SAMPLING_FLAGS.items():
        default = " (default: 0, greedy)" if name == "temperature" else " (default: the server's)"
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"sent as {name}{default}")
    group.add_argument(
        "--ignore-eos", action="store_true", help="ask for the planned length whatever the model says"
    )
    group.add_argument("--extra-body", default="{}", metavar="JSON", help="fields added to every request")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--label", help="name of this run in files and reports (default: the backend)")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="objectives: ttft, tpot, tbt, e2el"
    )
    group.add_argument(
        "--percentile-metrics", default=",".join(METRICS), metavar="NAMES", help="metrics in the table"
    )
    group.add_argument("--metric-percentiles", default="50,90,99", metavar="P,P,...")
    group.add_argument("--num-gpus", type=int, default=1, help="devices of the server, for tokens/s per GPU")
    group.add_argument("--json", type=Path, metavar="FILE", help="save the result here")
    group.add_argument(
        "--save-result", action="store_true", help="save the result under a name made from the settings"
    )
    group.add_argument("--save-detailed", action="store_true", help="save every request's times and text too")
    group.add_argument(
        "--append-result", action="store_true", help="add a line to the file instead of replacing it"
    )
    group.add_argument("--result-dir", type=Path, metavar="DIR")
    group.add_argument("--result-filename", metavar="NAME")
    group.add_argument(
        "--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="added to the saved result"
    )
    group.add_argument(
        "--report", type=Path, metavar="FILE.html", help="write one self-contained page with plots"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")


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
    return DatasetConfig(
        name=name,
        path=path,
        input_len=args.input_len or own_input or 1024,
        output_len=args.output_len or own_output,
        range_ratio=args.random_range_ratio,
        prefix_len=args.random_prefix_len,
        num_prefixes=args.prefix_repetition_num_prefixes,
        repeated_prefix_len=args.prefix_repetition_prefix_len,
        suffix_len=args.prefix_repetition_suffix_len,
        repetition_output_len=args.prefix_repetition_output_len,
        shuffle=not args.disable_shuffle,
    )


def _refuse_foreign(args: argparse.Namespace, name: str) -> None:
    """Refuse flags of another data set than the one in use, which would have no effect."""
    owners = {
        "random_input_len": "random",
        "random_output_len": "random",
        "random_range_ratio": "random",
        "random_prefix_len": "random",
        "sharegpt_output_len": "sharegpt",
    }
    for flag, owner in owners.items():
        if getattr(args, flag) and name != owner:
            raise ConfigError(
                f"--{flag.replace('_', '-')} is for --dataset-name {owner}; this run uses {name}"
            )
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
    if arrivals is None:
        arrivals = "replay" if dataset.name in TIMED_DATASETS and not has_own_load else "gamma"
    if args.rate_scale != 1.0 and arrivals != "replay":
        raise ConfigError("--rate-scale is for replayed arrivals: give --trace, or change --request-rate")
    return LoadConfig(
        request_rate=args.request_rate,
        arrivals=arrivals,
        burstiness=args.burstiness,
        rate_scale=args.rate_scale,
        ramp=_ramp(args),
        max_concurrency=args.max_concurrency,
    )


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
