"""The page of `benchmarks.vllm.compare`: onbeat and vLLM together beside vLLM's best budget of each load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.intervals import geometric_mean
from benchmarks.harness.pages import markdown_table, percent
from benchmarks.serve.peers.pairs import by_round, spread

PLUG_IN, BACKEND = OURS = ("onbeat", "onbeat --backend vllm")
"""onbeat inside vLLM's server, and vLLM's workers under onbeat's server."""
TBT_OVER_GAP = 2.5
ROOM = 0.9
"""Where vLLM's best share of good requests is below, there is something to gain."""


def page(document: Mapping[str, Any]) -> str:
    """Return the page of all runs so far."""
    runs, names = document["runs"], list(document["servers"])
    num_rounds = 1 + max(run["round"] for run in runs)
    best = {load: best_of(runs, names, load) for load in document["objectives"]}
    ours = [name for name in names if name in OURS]
    return (
        "\n\n".join(
            (
                "# onbeat and vLLM together, beside vLLM's best token budget",
                f"{document['at']}, commit {document['commit']}; {document['machine']}.",
                f"    {document['command']}",
                f"Interleaved rounds: {num_rounds}. Closed loops; one prompt in eight has 1,500 tokens, "
                "answers have 150 on average. A request is good if its first token comes within "
                f"{document['ttft_ms']:.0f} ms and its own P99 gap is within the objective of its load, "
                f"{TBT_OVER_GAP:g} times the median gap that vLLM has there without long prompts "
                "(unless it was given). "
                "Values are medians over the rounds, with least and most in brackets. Ratios are taken "
                "within a round, to the budget of vLLM with the most good requests at this concurrency.",
                *(
                    text
                    for own in ours
                    for text in (summary(document, best, own), *criteria(runs, best, own))
                ),
                table(document),
                others(runs),
                commands(document),
            )
        )
        + "\n"
    )


def best_of(runs: Sequence[Mapping[str, Any]], names: Sequence[str], load: str) -> str:
    """Return the plain vLLM with the most good requests under a load, then with the most output."""

    def score(name: str) -> tuple[float, float]:
        return _median(runs, name, load, "attainment"), _median(runs, name, load, "output_throughput")

    return max((name for name in names if name not in OURS), key=score)


def ratios(runs: Sequence[Mapping[str, Any]], ours: str, its: str, load: str, key: str) -> list[float]:
    """Return our value over its, of each round; a share of none counts as one request of a hundred."""
    floor = 0.01 if key == "attainment" else 1e-9
    own, other = by_round(runs, ours, load, key), by_round(runs, its, load, key)
    return [max(own[index], floor) / max(other[index], floor) for index in sorted(own) if index in other]


def summary(document: Mapping[str, Any], best: Mapping[str, str], ours: str) -> str:
    runs = document["runs"]
    rows = [
        [
            load,
            f"{tbt:.0f}",
            best[load],
            _text(runs, best[load], load, "attainment"),
            _text(runs, ours, load, "attainment"),
            _spread_text(ratios(runs, ours, best[load], load, "attainment")),
            _spread_text(ratios(runs, ours, best[load], load, "output_throughput")),
        ]
        for load, tbt in document["objectives"].items()
    ]
    header = ["concurrency", "TBT objective, ms", "best vLLM", "good: its", ours, "ours over its"]
    return markdown_table([*header, "tokens/s, ours over its"], rows)


def criteria(runs: Sequence[Mapping[str, Any]], best: Mapping[str, str], ours: str) -> list[str]:
    """Return sentences: what share of good requests and output came to."""
    good = {
        load: (_median(runs, ours, load, "attainment"), _median(runs, its, load, "attainment"))
        for load, its in best.items()
    }
    lower = [load for load, (own, other) in good.items() if own < other]
    lines = [
        f"{ours} has fewer good requests at concurrency {', '.join(lower)}."
        if lower
        else f"{ours} has at least as many good requests at every concurrency."
    ]
    room = [load for load, (_, other) in good.items() if other < ROOM]
    if room:
        gains = [_middle(ratios(runs, ours, best[load], load, "attainment")) for load in room]
        lines.append(
            f"Where vLLM's best keeps fewer than {ROOM:.0%} good, {ours} has "
            f"{geometric_mean(gains):.2f} times as many (geometric mean; concurrency {', '.join(room)})."
        )
    output = [_middle(ratios(runs, ours, its, load, "output_throughput")) for load, its in best.items()]
    lines.append(f"Its output is {min(output):.2f} times vLLM's or more.")
    return lines


def table(document: Mapping[str, Any]) -> str:
    runs = document["runs"]
    rows = [
        [
            load,
            name,
            _text(runs, name, load, "attainment"),
            _text(runs, name, load, "output_throughput", 1),
            _pair(runs, name, load, "p50_ttft_ms", "p99_ttft_ms"),
            _pair(runs, name, load, "p50_itl_ms", "p99_itl_ms"),
        ]
        for load in document["objectives"]
        for name in document["servers"]
    ]
    header = ["concurrency", "server", "good", "output tokens/s", "TTFT P50 / P99, ms", "gaps P50 / P99, ms"]
    return markdown_table(header, rows)


def others(runs: Sequence[Mapping[str, Any]]) -> str:
    most = max(run["cpu"]["others"] for run in runs)
    return f"Other programs took {percent(most)} of the processor time at most, in any run."


def commands(document: Mapping[str, Any]) -> str:
    """Return how the servers were started, without the folders of this machine."""
    lines = []
    for name, entry in document["servers"].items():
        words = [
            word.rsplit("/", 1)[-1] if word.startswith("/") else word for word in entry["command"].split()
        ]
        lines.append(f"{name}: `{' '.join(words)}`")
    return "\n\n".join(lines)


def _median(runs: Sequence[Mapping[str, Any]], name: str, load: str, key: str) -> float:
    return _middle(list(by_round(runs, name, load, key).values()))


def _middle(values: Sequence[float]) -> float:
    found = spread(values)
    return 0.0 if found is None else found.median


def _text(runs: Sequence[Mapping[str, Any]], name: str, load: str, key: str, digits: int = 2) -> str:
    return _spread_text(list(by_round(runs, name, load, key).values()), digits)


def _pair(runs: Sequence[Mapping[str, Any]], name: str, load: str, *keys: str) -> str:
    return " / ".join(f"{_median(runs, name, load, key):.0f}" for key in keys)


def _spread_text(values: Sequence[float], digits: int = 2) -> str:
    found = spread(values)
    return "-" if found is None else found.text(digits)
