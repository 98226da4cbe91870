"""Steps of the CPU engine in this process, over the least time that this machine's limits allow.

    python -m benchmarks.check.cpu_step MODEL                      # decodes and prefills over their floors
    python -m benchmarks.check.cpu_step MODEL --foreign            # also beside one busy foreign process
    python -m benchmarks.check.cpu_step MODEL --host-share         # also what the engine's loop adds
    python -m benchmarks.check.cpu_step MODEL --backend torch --name torch
    python -m benchmarks.check.cpu_step MODEL-Q8_0.gguf --name q8_0

Read bandwidth and matmul rate are measured in the same process before and after each case of a round. Results
go to `benchmarks/results/DATE-cpu-step[-NAME].md` and the JSON file beside it. Needs a machine with nothing
else to do. `--quick` tries it out.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from benchmarks.check.cpu_step import report
from benchmarks.check.cpu_step.driver import StepDriver
from benchmarks.check.cpu_step.engine_loop import EngineLoop
from benchmarks.check.cpu_step.floor import Case
from benchmarks.check.cpu_step.limits import LimitsMeter
from benchmarks.check.cpu_step.study import (
    DECODE_STEPS,
    NEIGHBOUR_STEPS,
    WARM_UPS,
    measure_beside_neighbour,
    measure_steps,
)
from benchmarks.check.cpu_step.weights import weight_bytes
from benchmarks.harness.pages import REPOSITORY, git_commit, machine
from onbeat.core.errors import ConfigError
from onbeat.core.options import make
from onbeat.engine.engine_config import BACKENDS, DTYPES, QUANTIZATIONS, EngineConfig
from onbeat.engine.load import LoadedModel, prepare_model
from onbeat.engine.step_time_spec import model_spec_of
from onbeat.engine.torch_types import torch_dtype
from onbeat.hub.resolve import resolve_model

BATCHES, CONTEXTS, PREFILLS = (1, 8, 32), (256, 2048), (512, 1500)
NEIGHBOUR_BATCHES, HOST_BATCHES = (1, 8), (1, 32)
KV_BYTES = 4 * 2**30
"""At most; as many as the longest contexts need are taken."""


def main() -> None:
    args = parse_args()
    if args.render:
        report.write(json.loads(args.render.read_text(encoding="utf-8")), args.render.with_suffix(""))
        return
    try:
        document = measure(args)
    except ConfigError as error:
        sys.exit(str(error))
    suffix = f"-{args.name}" if args.name else ""
    report.write(document, args.results_dir / f"{args.day or date.today().isoformat()}-cpu-step{suffix}")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Load the model, run what was asked for, and return the document."""
    cases = [Case.decode(batch, context) for context in args.contexts for batch in BATCHES]
    cases += [Case.prefill(num_tokens) for num_tokens in PREFILLS]
    config = engine_config(args)
    loaded = prepare_model(config).load(print)
    document = describe(args, config, loaded) | {"cases": [asdict(case) for case in cases]}
    document |= {"rounds": [], "neighbour": [], "host": []}
    with filled_driver(loaded, args) as driver:
        if not args.no_steps:
            meter = LimitsMeter(torch_dtype(loaded.device.dtype), loaded.device.num_threads)
            document["rounds"] = measure_steps(driver, meter, cases, args.rounds)
        if args.foreign:
            beside = [Case.decode(batch, min(args.contexts)) for batch in NEIGHBOUR_BATCHES]
            document["neighbour"] = measure_beside_neighbour(driver, beside, args.rounds)
    if args.host_share:
        document["host"] = measure_host_share(loaded, args.rounds)
    return document


@contextmanager
def filled_driver(loaded: LoadedModel, args: argparse.Namespace) -> Iterator[StepDriver]:
    """Yield a driver whose requests have their KV; nothing is left of them afterwards."""
    print("filling the KV cache", flush=True)
    driver = StepDriver(loaded.runner, num_requests=max(BATCHES), num_tokens=longest_context(args))
    try:
        yield driver
    finally:
        driver.close()


def longest_context(args: argparse.Namespace) -> int:
    """Return the tokens of a request at the end of its longest run."""
    return int(max(args.contexts)) + max(DECODE_STEPS, NEIGHBOUR_STEPS) + WARM_UPS


def num_decode_steps(args: argparse.Namespace) -> int:
    """Return the decode steps of all rounds: a request keeps every token that it was given."""
    num_cases = len(args.contexts) * len(BATCHES)
    a_round = num_cases * (DECODE_STEPS + WARM_UPS) + 2 * len(NEIGHBOUR_BATCHES) * (
        NEIGHBOUR_STEPS + WARM_UPS
    )
    return int(args.rounds * a_round)


def measure_host_share(loaded: LoadedModel, num_rounds: int) -> list[dict[str, Any]]:
    loop = EngineLoop(loaded, max_in_flight_steps=2)
    try:
        return [
            asdict(loop.measure(batch, seed=index * len(HOST_BATCHES) + position))
            for index in range(num_rounds)
            for position, batch in enumerate(HOST_BATCHES)
        ]
    finally:
        loop.close()


def engine_config(args: argparse.Namespace) -> EngineConfig:
    longest = max(longest_context(args), max(PREFILLS) + 1)
    return make(
        EngineConfig,
        model=resolve_model(args.model),
        dtype=args.dtype,
        device="cpu",
        policy="sarathi",  # one that keeps no late prompt waiting for all others, so that all decode together
        backend=args.backend,
        quantization=args.quantization,
        threads=args.threads,
        kv_cache_memory_bytes=KV_BYTES,
        max_model_len=longest + num_decode_steps(args),
        max_num_seqs=2 * max(BATCHES),  # a policy may keep some of them free
        max_num_batched_tokens=longest,
    )


def describe(args: argparse.Namespace, config: EngineConfig, loaded: LoadedModel) -> dict[str, Any]:
    """Return what a result says of its making, and the sizes that floors are made of."""
    model = model_spec_of(loaded.config, Path(loaded.name).name)
    options = [option for option in sys.argv[1:] if option != args.model]
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "machine": machine(),
        "command": shlex.join(["python", "-m", "benchmarks.check.cpu_step", Path(args.model).name, *options]),
        "settings": dict(loaded.runner.forward.settings),
        "dtype": loaded.device.dtype.name,
        "threads": loaded.device.num_threads,
        "model": asdict(model),
        "weight_bytes": asdict(weight_bytes(config, loaded, model)),
        "kv_bytes": loaded.device.dtype.itemsize,
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct", help="as of onbeat serve")
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="auto")
    parser.add_argument("--threads", type=int, help="of the engine (default: all cores)")
    parser.add_argument("--rounds", type=int, help="default: 5")
    parser.add_argument("--contexts", type=int, nargs="+", help="of decodes (default: 256 2048)")
    parser.add_argument("--foreign", action="store_true", help="also steps beside a busy foreign process")
    parser.add_argument("--host-share", action="store_true", help="also decodes in the engine's own loop")
    parser.add_argument("--no-steps", action="store_true", help="only the parts asked for by other options")
    parser.add_argument("--quick", action="store_true", help="two rounds at context 256, to try it out")
    parser.add_argument("--name", help="in the names of the result files")
    parser.add_argument("--results-dir", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--day", help="date in the names of the result files (default: today)")
    parser.add_argument("--render", type=Path, metavar="FILE.json", help="only write a result's page again")
    args = parser.parse_args()
    args.rounds = args.rounds or (2 if args.quick else 5)
    args.contexts = args.contexts or list(CONTEXTS[:1] if args.quick else CONTEXTS)
    return args


if __name__ == "__main__":
    main()
