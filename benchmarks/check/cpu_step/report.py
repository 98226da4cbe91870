"""The page of a run, from its saved document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.pages import markdown_table, middle, percent, write_document
from onbeat.perfmodel.model_sizes import ModelSpec

from .floor import Case, WeightBytes
from .numbers import Subject, all_limits, case_result, neighbour_result

Document = dict[str, Any]
STEP_COLUMNS = [
    "step",
    "ms",
    "floor, ms",
    "step over floor",
    "quickest over floor",
    "outside the forward pass",
]


def write(document: Document, stem: Path) -> None:
    """Write STEM.json and STEM.md."""
    text = render(document)
    print(f"\n{text}", flush=True)
    write_document(document, stem, text)


def render(document: Document) -> str:
    """Return the page."""
    settings = ", ".join(f"{name} {value}" for name, value in document["settings"].items())
    parts = [
        f"# Steps of the CPU engine: {document['settings']['backend']}, {document['dtype']}",
        f"{document['at']}, commit {document['commit']}; {document['machine']}, "
        f"{document['threads']} threads.",
        f"    {document['command']}",
        f"{document['model']['name']}; {settings}. In this process, random tokens, KV blocks scattered, "
        "greedy. Medians over rounds, with least and most in brackets.",
        steps_part(document),
        neighbour_part(document),
        host_part(document),
        limits_part(document),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def steps_part(document: Document) -> str:
    """Return the table of steps over their floors."""
    rounds = document["rounds"]
    if not rounds:
        return ""
    subject = Subject(
        model=ModelSpec(**document["model"]),
        weights=WeightBytes(**document["weight_bytes"]),
        kv_bytes=document["kv_bytes"],
    )
    rows = []
    for values in document["cases"]:
        case = Case(**values)
        result = case_result(case, rounds, subject)
        rows.append(
            [
                case.name,
                middle(_ms(result.steps)),
                middle(_ms(result.floors)),
                middle(list(result.ratios)),
                f"{result.best_ratio:.2f}",
                percent(sorted(result.host_shares)[len(rounds) // 2]),
            ]
        )
    intro = (
        "A step is `ModelRunner.execute`: input, forward pass, sampling. Its floor is the sum of those of "
        "its parts: weights or KV over read bandwidth, or operations over the rate of a matrix product, "
        "whichever takes longer, by the limits just before and just after the steps of a case (the mean of "
        "both floors). The quickest step is held against the floor by the highest limits of all rounds."
    )
    return f"{intro}\n\n{markdown_table(STEP_COLUMNS, rows)}"


def neighbour_part(document: Document) -> str:
    """Return the table of steps beside a busy process."""
    rounds = document["neighbour"]
    if not rounds:
        return ""
    rows = []
    for name in rounds[0]["quiet"]:
        result = neighbour_result(name, rounds)
        cells = [f"{1e3 * value:.2f}" for value in (result.quiet, result.busy, result.longest_busy)]
        rows.append([name, *cells, middle(list(result.ratios))])
    columns = ["step", "quiet, ms", "busy, ms", "longest busy, ms", "busy over quiet"]
    return f"Beside one foreign process that never rests:\n\n{markdown_table(columns, rows)}"


def host_part(document: Document) -> str:
    """Return the table of the engine loop's own time."""
    found = document["host"]
    if not found:
        return ""
    rows = []
    for batch in dict.fromkeys(each["batch"] for each in found):
        own = [each for each in found if each["batch"] == batch]
        shares = [100 * (1 - each["forward"] / each["step"]) for each in own]
        rows.append(
            [
                batch,
                middle(_ms([each["step"] for each in own])),
                middle(_ms([each["forward"] for each in own])),
                middle(list(shares), 1),
            ]
        )
    columns = ["batch", "from step to step, ms", "in the forward pass, ms", "outside it, %"]
    return (
        "Decodes in the engine's own loop (scheduler, executor and runner, one step planned ahead):\n\n"
        + markdown_table(columns, rows)
    )


def limits_part(document: Document) -> str:
    """Return the machine's limits in every round."""
    rows = []
    for index, one in enumerate(document["rounds"]):
        limits = all_limits([one])
        reads = sorted(each["read"] / 1e9 for each in limits)
        products = sorted(each["multiply"] / 1e9 for each in limits)
        rows.append(
            [
                index + 1,
                f"{reads[0]:.1f} to {reads[-1]:.1f}",
                f"{products[0]:.0f} to {products[-1]:.0f}",
            ]
        )
    if not rows:
        return ""
    columns = ["round", "read, GB/s", "matmul, GFLOP/s"]
    return f"Limits of the machine, least to most:\n\n{markdown_table(columns, rows)}"


def _ms(seconds: Sequence[float]) -> list[float | None]:
    return [1e3 * value for value in seconds]
