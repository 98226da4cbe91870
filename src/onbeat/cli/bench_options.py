"""The flags of `onbeat bench serve`.

Names and defaults are those of `vllm bench serve` wherever it has the flag.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from onbeat.bench.config import DATASET_NAMES
from onbeat.bench.payload import Api
from onbeat.bench.promise import SEND_SLO
from onbeat.cli.args import seed
from onbeat.cli.options import add_options
from onbeat.cli.workload_options import add_arrival_arguments, add_slo_arguments
from onbeat.metrics.summary import METRICS, SummaryOptions

BACKENDS: dict[str, Api] = {
    "openai": "completions",
    "openai-completions": "completions",
    "vllm": "completions",
    "openai-chat": "chat",
    "vllm-chat": "chat",
}
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


def positive(text: str) -> int:
    """Return a whole number of at least 1, as `argparse` types do."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """Return a whole number of at least 0, as `argparse` types do."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    value = int(text) if text.lstrip("-").isdigit() else least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
    return value


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
    group.add_argument("--input-len", type=positive, help="prompt tokens, for data sets that are made up")
    group.add_argument("--output-len", type=positive, help="output tokens, for every data set")
    group.add_argument("--random-input-len", type=positive, help="prompt tokens of random (default: 1024)")
    group.add_argument("--random-output-len", type=positive, help="output tokens of random (default: 128)")
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, help="lengths vary by this share around the mean"
    )
    group.add_argument(
        "--random-output-range-ratio",
        type=float,
        metavar="X",
        help="the same of output tokens alone (default: --random-range-ratio)",
    )
    group.add_argument(
        "--random-long-share",
        type=float,
        default=0.0,
        metavar="X",
        help="share of random's requests with long prompts, evenly spread; both kinds are reported apart",
    )
    group.add_argument(
        "--random-long-input-len", type=positive, metavar="N", help="tokens of those (default: 1500)"
    )
    group.add_argument(
        "--random-prefix-len", type=natural, default=0, help="tokens that all prompts of random share"
    )
    group.add_argument("--sharegpt-output-len", type=positive, help="replaces the recorded answer lengths")
    group.add_argument(
        "--prefix-repetition-prefix-len", type=positive, help="tokens of each repeated prefix (default: 256)"
    )
    group.add_argument(
        "--prefix-repetition-suffix-len", type=positive, help="tokens after the prefix (default: 256)"
    )
    group.add_argument(
        "--prefix-repetition-num-prefixes", type=positive, help="different prefixes (default: 10)"
    )
    group.add_argument("--prefix-repetition-output-len", type=positive, help="output tokens (default: 128)")
    group.add_argument(
        "--zipf-exponent", type=float, metavar="S", help="of zipf: p(length) falls as length^-S (default: 1)"
    )
    group.add_argument(
        "--disable-shuffle", action="store_true", help="take conversations and lengths in file order"
    )
    group.add_argument("--seed", type=seed, default=0, help="decides lengths and arrivals")
    group.add_argument(
        "--salt", help="decides the words (default: new ones each time, so that no prefix cache helps)"
    )


def add_load_options(parser: argparse.ArgumentParser) -> None:
    add_slo_arguments(parser)
    add_options(parser, SummaryOptions)
    telling = parser.add_argument_group("what the server is told of objectives")
    telling.add_argument(
        "--send-slo",
        choices=SEND_SLO,
        default="auto",
        help="in the body, as x-llm-d-slo-ttft-ms and x-llm-d-slo-tpot-ms headers, or not at all; auto: in "
        "the body if the server says that it is onbeat (default: auto)",
    )
    telling.add_argument(
        "--shed", action="store_true", help="ask it to refuse requests that it predicts to be late"
    )
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="R", help="requests/s; inf = no schedule"
    )
    group.add_argument("--max-concurrency", type=int, metavar="N", help="most requests open at once")
    add_arrival_arguments(group)
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
