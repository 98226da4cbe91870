"""What it takes to copy a request's KV from one engine process to another, beside computing it again.

    python -m benchmarks.fleet.kv_transfer --tokens 512 --rounds 15

Two processes, each with the embedded model on the native engine, in bfloat16 and on one thread. The first
computes the KV of a prompt and lends it, with checksums; the second copies it and holds it against these,
then computes it itself.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from onbeat.core.request import Request, SamplingParams
from onbeat.core.step import AdmittedRequest, BatchShape, ScheduledRequest, SchedulerOutput
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.kv_transfer.source import KVSource
from onbeat.engine.kv_transfer.tcp import TcpTransport
from onbeat.engine.kv_transfer.transfers import KVTransfers
from onbeat.engine.load import LoadedModel, prepare_model
from onbeat.hub.resolve import resolve_model

KEY = b"only for this benchmark, 32 bytes"
MODEL = "smollm2-135m-instruct"
BLOCK_SIZE = 16


def load() -> LoadedModel:
    config = EngineConfig(
        model=resolve_model(MODEL, offline=True),
        dtype="bfloat16",
        threads=1,
        kv_cache_memory_bytes=1 << 28,
        step_time_profile="none",
    )
    return prepare_model(config).load(lambda _: None)


def compute(model: LoadedModel, num_tokens: int, block_ids: Sequence[int]) -> None:
    """Compute the KV of a prompt in one step."""
    request = Request(
        request_id="r",
        prompt_token_ids=tuple(range(1000, 1000 + num_tokens)),
        sampling=SamplingParams(temperature=0.0),
    )
    row = ScheduledRequest("r", 0, num_tokens, (), samples=True)
    admitted = AdmittedRequest(request, (), tuple(block_ids))
    model.runner.execute(SchedulerOutput(0, (row,), (admitted,), (), BatchShape()))
    model.runner.execute(SchedulerOutput(1, (), (), ("r",), BatchShape()))


def lend(connection: Connection, num_tokens: int) -> None:
    model = load()
    block_ids = range(-(-num_tokens // BLOCK_SIZE))
    compute(model, num_tokens, block_ids)
    lender = KVTransfers(model.kv_memory(), TcpTransport(KEY))
    while asked := connection.recv():
        if asked == "cpu":
            connection.send(time.process_time())
            continue
        lender.leases.revoke("r")  # the checksums of a lease are kept as long as it lasts
        lender.leases.grant("r", block_ids)
        connection.send(lender.summed(lender.leases.source("r", lender.endpoint)).result())


def measure(action: Callable[[], Any], connection: Connection) -> tuple[float, float, float]:
    """Return wall seconds, own CPU seconds and the source's."""

    def source_cpu() -> float:
        connection.send("cpu")
        return float(connection.recv())

    there, own, start = source_cpu(), time.process_time(), time.perf_counter()
    action()
    wall, own = time.perf_counter() - start, time.process_time() - own
    return wall, own, source_cpu() - there


def run(num_tokens: int, num_rounds: int) -> None:
    context = multiprocessing.get_context("spawn")
    connection, other = context.Pipe()
    process = context.Process(target=lend, args=(other, num_tokens), daemon=True)
    process.start()
    model = load()
    transfers = KVTransfers(model.kv_memory(), TcpTransport(KEY))
    num_blocks = -(-num_tokens // BLOCK_SIZE)

    def copy() -> int:
        connection.send("lend")
        source: KVSource = connection.recv()
        return transfers.pull(source, 0, into).result()

    into, elsewhere = range(num_blocks), range(num_blocks, 2 * num_blocks)
    actions: dict[str, Callable[[], Any]] = {
        "copied": copy,
        "computed again": partial(compute, model, num_tokens, elsewhere),
    }
    samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in actions}
    for action in actions.values():
        action()  # memory is touched
    for _ in range(num_rounds):
        for name, action in actions.items():
            samples[name].append(measure(action, connection))
    num_bytes = num_blocks * model.kv_memory().block_bytes
    medians = {
        name: [statistics.median(part) for part in zip(*each, strict=True)] for name, each in samples.items()
    }
    again = sum(medians["computed again"][1:])
    print(f"{num_tokens} tokens, {num_blocks} blocks, {num_bytes:,} bytes, medians of {num_rounds} rounds\n")
    print("| | wall ms | CPU ms here | CPU ms at the source | GB/s | CPU, of computing it again |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, (wall, own, there) in medians.items():
        rate = "" if name == "computed again" else f"{num_bytes / wall / 1e9:.2f}"
        print(
            f"| {name} | {wall * 1e3:.1f} | {own * 1e3:.2f} | {there * 1e3:.2f} | {rate} "
            f"| {(own + there) / again:.2%} |"
        )
    connection.send("")
    process.join()
    transfers.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    run(args.tokens, args.rounds)


if __name__ == "__main__":
    main()
