"""The machine's own yardstick: a decode step at batch 8, of which the objectives are multiples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.harness.pages import markdown_table
from benchmarks.serve.slo_live.context import TBT_STEPS, TTFT_STEPS, Context
from benchmarks.serve.slo_live.load import CHAT, Load, Result
from benchmarks.serve.slo_live.servers import Fleet

BATCH = 8
HEADING = "Yardstick: a decode step at batch 8"


def run(context: Context) -> None:
    output_len = 40 if context.args.quick else 160
    num_runs = context.rounds
    context.announce(num_starts=1, run_seconds=[5.0] * num_runs)
    dataset = replace(CHAT, random_range_ratio=0.0, random_output_range_ratio=0.0, output_len=output_len)
    steps = []
    with Fleet() as fleet:
        server = fleet.start(context.sarathi_server(context.args.budget or 512))
        with server.turn() as url:
            for index in range(num_runs):
                load = Load(
                    seed=context.args.seed + index,
                    seconds=0,
                    concurrency=BATCH,
                    num_prompts=BATCH,
                    dataset=dataset,
                )
                steps.append(decode_gap(context.client.run(url, load)))
                print(f"run {index}: {steps[-1] * 1e3:.1f} ms", flush=True)
    step = float(np.median(steps))
    ttft_ms, tbt_ms = TTFT_STEPS * step * 1e3, TBT_STEPS * step * 1e3
    rows = [[f"{value * 1e3:.1f}" for value in (*steps, step)]]
    table = markdown_table([*(f"run {i + 1}, ms" for i in range(num_runs)), "median, ms"], rows)
    text = (
        f"{BATCH} requests of {dataset.input_len} prompt tokens start together; the median gap between their "
        f"tokens while all of them are decoding.\n\n{table}\n\nObjectives of the other studies: TTFT "
        f"{TTFT_STEPS} steps = {ttft_ms:.0f} ms, TBT {TBT_STEPS} steps = {tbt_ms:.0f} ms."
    )
    context.page.write(
        "measure",
        HEADING,
        text,
        {"steps_ms": [value * 1e3 for value in steps], "ttft_ms": ttft_ms, "tbt_ms": tbt_ms},
    )


def decode_gap(result: Result) -> float:
    """Return the median gap while every request is decoding, seconds."""
    times = [np.asarray(record.delivery_times) for record in result.records]
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    gaps = [np.diff(each[(each >= begin) & (each <= end)]) for each in times]
    return float(np.median(np.concatenate(gaps)))
