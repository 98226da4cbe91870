"""Predicted against published times to first token of vLLM, TensorRT-LLM and SGLang.

    python benchmarks/engine_first_tokens.py            # simulated, held-back rows of Llama 3.1 70B
    python benchmarks/engine_first_tokens.py --parts    # what grows with the prompt, or with steps

The rows, and the halves of them, are those of `engine_accuracy.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from engine_accuracy import OLDER, Case, Deployment, Row, cases_of, halves, percent, read_rows

from onbeat.scheduler.config import SchedulerLimits
from onbeat.simulator.settings import ReplicaSettings
from onbeat.simulator.setup import build_simulation
from onbeat.simulator.simulate import simulate
from onbeat.workload.offered import OfferedLoad

PROMPTS, FEW_CLIENTS = (1024, 8192), 4
"""Tokens of the prompts, and the clients, by which a TTFT is taken apart."""
TTFT_MODEL, TTFT_OUTPUT, TTFT_CLIENTS = "Llama-3.1-70B", 1024, 32
SHORTEST = 0.8
LATE_ENGINE, LATE_DEGREES, LATE_CLIENTS = "tensorrt-llm", (1, 2, 4), 16
REQUESTS_A_CLIENT = 10


def print_ttft(held: Sequence[Case]) -> None:
    """Simulate held-back rows of Llama 3.1 70B as closed loops, and compare the mean TTFT and TPOT.

    Up to 32 clients begin at once and send ten requests each, whose lengths lie between 80 % and 100 % of
    the row's (an assumption: equal lengths would keep all requests in step). Policy `sarathi`, 8,192 tokens
    a step. No term was fitted to a TTFT.
    """
    print(
        "| | rows | TTFT, data sheets | TTFT, terms | TTFT, planned ahead "
        "| TPOT, data sheets | TPOT, planned ahead |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    groups: dict[str, list[list[tuple[float, float, float]]]] = defaultdict(list)
    for case in held:
        at = case.deployment
        for row in case.rows if at.model == TTFT_MODEL else ():
            if row.concurrency <= TTFT_CLIENTS and row.output_tokens == TTFT_OUTPUT:
                found = [
                    _simulated(at, row, *how)
                    for how in (("none", 0), (OLDER[at.engine], 0), (OLDER[at.engine], 1))
                ]
                groups[f"{at.engine}, {at.device}"].append(
                    [
                        (
                            abs(ttft / row.ttft_ms - 1),
                            (row.ttft_ms - ttft) / row.tpot_ms,
                            abs(tpot / row.tpot_ms - 1),
                        )
                        for ttft, tpot in found
                    ]
                )
    for name, values in sorted(groups.items()):
        medians = np.median(np.array(values), axis=0)
        cells = [f"{percent(error)}, {late:+.1f}" for error, late, _ in medians]
        cells += [percent(medians[how][2]) for how in (0, 2)]
        print(f"| {name} | {len(values)} | {' | '.join(cells)} |")


def print_first_tokens(rows: Sequence[Row]) -> None:
    """Print what of the measured TTFT grows with the prompt and what does not; that in steps, too.

    Milliseconds are those of `FEW_CLIENTS`. The steps are the rest over the TPOT of short prompts, of each
    number of clients up to `TTFT_CLIENTS` at which the line through both prompts tells one (a queue of long
    prompts, which stands for seconds, does not).
    """
    short, long = PROMPTS
    found: dict[tuple[str, str, str, int], dict[tuple[int, int], Row]] = defaultdict(dict)
    for row in rows:
        if row.output_tokens == short and row.concurrency <= TTFT_CLIENTS:
            of = found[row.engine, row.model, row.device, row.tensor]
            of[row.concurrency, row.input_tokens] = row
    print(
        "| deployment | TTFT, ms | | a token, us | the rest, ms | in steps: median | least, most |\n"
        "|---|---:|---:|---:|---:|---:|---:|"
    )
    for (engine, model, device, tensor), of in sorted(found.items()):
        steps = []
        cells = ""
        for clients in sorted({clients for clients, _ in of}):
            if (clients, short) not in of or (clients, long) not in of:
                continue
            few, many = of[clients, short], of[clients, long]
            slope = (many.ttft_ms - few.ttft_ms) / (long - short)
            rest = few.ttft_ms - slope * short
            if rest > 0:
                steps.append(rest / few.tpot_ms)
            if clients == FEW_CLIENTS:
                cells = f"{few.ttft_ms:.0f} | {many.ttft_ms:.0f} | {slope * 1e3:.1f} | {rest:.0f}"
        if cells:
            print(
                f"| {engine} {model} {device} TP {tensor} | {cells} | {np.median(steps):.1f} | "
                f"{min(steps):.1f}, {max(steps):.1f} |"
            )


def print_late_answers(fitted: Sequence[Case], held: Sequence[Case]) -> None:
    """Print by how many steps first tokens of TensorRT-LLM at TP 1 to 4 are later than simulated ones.

    Short prompts and up to 16 clients, planned ahead. The steps are the median of the fitted half; with them
    the TTFT of the held-back half is predicted. (At TP 8 the fitted half is not late.)
    """
    late: list[float] = []
    print("| half | deployment | steps late | TTFT simulated: error % | with them: error % |")
    print("|---|---|---:|---:|---:|")
    for half, cases in (("fitted", fitted), ("held back", held)):
        found: dict[Deployment, list[tuple[float, float, float]]] = {}
        for case in cases:
            at = case.deployment
            if at.engine != LATE_ENGINE or at.model != TTFT_MODEL or at.tensor not in LATE_DEGREES:
                continue
            found[at] = [
                (row.ttft_ms, *_simulated(at, row, OLDER[at.engine], 1))
                for row in case.rows
                if row.concurrency <= LATE_CLIENTS
                and (row.input_tokens, row.output_tokens) == (PROMPTS[0], TTFT_OUTPUT)
            ]
        if half == "fitted":
            late = [(ttft - own) / step for rows in found.values() for ttft, own, step in rows]
        num_late = float(np.median(late))
        for at, rows in found.items():
            steps = [(ttft - own) / step for ttft, own, step in rows]
            before = float(np.median([abs(own / ttft - 1) for ttft, own, _ in rows]))
            after = float(np.median([abs((own + num_late * step) / ttft - 1) for ttft, own, step in rows]))
            print(
                f"| {half} | {at} | {min(steps):.1f} to {max(steps):.1f} | {percent(before)} | "
                f"{percent(after)} |"
            )
    print(f"\n{num_late:.1f} steps, of the fitted half")


def _simulated(at: Deployment, row: Row, engine: str, steps_ahead: int) -> tuple[float, float]:
    """Return the mean TTFT and TPOT of a closed loop, milliseconds."""
    settings = ReplicaSettings(
        model=at.model,
        device=at.device,
        dtype=at.weights,  # type: ignore[arg-type]
        kv_cache_dtype=at.precision.kv,  # type: ignore[arg-type]
        tensor_parallel=at.tensor,
        engine=engine,  # type: ignore[arg-type]
        max_concurrency=row.concurrency,
        limits=SchedulerLimits(
            policy="sarathi",
            max_num_batched_tokens=8192,
            max_num_seqs=512,
            max_model_len=row.input_tokens + row.output_tokens,
        ),
    )
    simulation = build_simulation(settings)
    num_requests = REQUESTS_A_CLIENT * row.concurrency
    rng = np.random.default_rng(0)
    prompts, outputs = (
        rng.integers(int(SHORTEST * longest), longest + 1, num_requests)
        for longest in (row.input_tokens, row.output_tokens)
    )
    load = OfferedLoad(
        name="closed loop", num_prompt_tokens=prompts, num_output_tokens=outputs, arrivals=None
    )
    config = replace(simulation.config, steps_ahead=steps_ahead)
    records = simulate(load, config, simulation.step_time).records
    ttft = [record.delivery_times[0] - record.arrival for record in records]
    tpot = [(record.end - record.delivery_times[0]) / (len(record.delivery_times) - 1) for record in records]
    return 1e3 * float(np.mean(ttft)), 1e3 * float(np.mean(tpot))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", action="store_true")
    args = parser.parse_args()
    fitted, held = halves(cases_of(read_rows()))
    if args.parts:
        print_first_tokens(read_rows())
        print()
        print_late_answers(fitted, held)
    else:
        print_ttft(held)


if __name__ == "__main__":
    sys.exit(main())
