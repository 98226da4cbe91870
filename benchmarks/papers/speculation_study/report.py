"""What the runs say: tables and claims, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from benchmarks.harness.intervals import geometric_mean
from benchmarks.harness.pages import markdown_table
from benchmarks.harness.store import Results
from benchmarks.papers.speculation_study import mlc, turbospec
from benchmarks.papers.speculation_study.plan import Plan, mlc_run, turbospec_run

NEAR_BEST = 1.05
"""Adaptive latency over that of the best fixed length, at most."""
NEVER_BELOW = 0.98
"""Adaptive throughput of a stream over that of the better curve, at least."""
GAIN = 0.25
"""Latency that drafts save at low concurrency, at least."""
GONE = 1.05
"""Gain of fixed drafts at high concurrency, at most."""


def markdown(results: Results, plan: Plan, note: str) -> str:
    """Return the whole report."""
    parts = ["# Speculative decoding: the study in simulation", note]
    for section in (_turbospec(results, plan), _mlc(results, plan)):
        parts += section
    return "\n\n".join(parts) + "\n"


def claim(text: str, *, holds: bool) -> str:
    return f"* **{'holds' if holds else 'DOES NOT HOLD'}**: {text}"


# --- TurboSpec ---------------------------------------------------------------------------------------------


def latencies(results: Results, plan: Plan, server: str, acceptance: float) -> dict[int, dict[str, float]]:
    """Return rate -> mode -> mean latency, seconds; rates that are not complete are left out."""
    found = {}
    for rate in turbospec.RATES:
        cells = {
            mode: results.get(turbospec_run(server, rate, acceptance, mode, plan)) for mode in turbospec.MODES
        }
        if all(cells.values()):
            found[rate] = {mode: cell["latency"] for mode, cell in cells.items() if cell is not None}
    return found


def over_best(modes: dict[str, float]) -> float:
    """Return the adaptive latency over the lowest of none and all fixed lengths."""
    return modes[turbospec.ADAPTIVE] / min(
        value for mode, value in modes.items() if mode != turbospec.ADAPTIVE
    )


def _turbospec(results: Results, plan: Plan) -> Iterator[str]:
    ratios, firsts, rows = [], [], []
    for server, acceptance in product(turbospec.SERVERS, turbospec.ACCEPTANCES):
        for rate, modes in latencies(results, plan, server, acceptance).items():
            ratio, gain = over_best(modes), modes[turbospec.NONE] / modes[turbospec.ADAPTIVE]
            ratios.append(ratio)
            if rate == min(turbospec.RATES) and acceptance == max(turbospec.ACCEPTANCES):
                firsts.append((server, gain))
            rows.append(
                [
                    server,
                    f"{acceptance:g}",
                    str(rate),
                    *(f"{modes[mode]:.2f}" for mode in turbospec.MODES),
                    f"{ratio:.3f}",
                    f"{gain:.2f}",
                ]
            )
    if not rows:
        return
    yield "## Against fixed lengths, by rate (TurboSpec)"
    yield claim(
        f"adaptive is within {NEAR_BEST:g}x of the best of none and fixed "
        f"{', '.join(map(str, turbospec.FIXED))} at each rate and acceptance: at most {max(ratios):.3f}x, in "
        f"the mean {geometric_mean(ratios):.3f}x "
        f"({sum(ratio > NEAR_BEST for ratio in ratios)} of {len(ratios)} are above)",
        holds=max(ratios) <= NEAR_BEST,
    )
    yield "\n".join(
        claim(
            f"at 1 request/s and acceptance {max(turbospec.ACCEPTANCES):g} it is at least 2x better than "
            f"none: {server} {gain:.2f}x",
            holds=gain >= 2,
        )
        for server, gain in firsts
    )
    yield "Mean latency, seconds:"
    yield markdown_table(
        ["server", "acceptance", "requests/s", *turbospec.MODES, "adaptive / best", "none / adaptive"], rows
    )


# --- MLCEngine ---------------------------------------------------------------------------------------------


def tpots(results: Results, plan: Plan, variant: str) -> dict[int, dict[str, float]]:
    """Return concurrency -> mode -> mean TPOT, seconds; levels that are not complete are left out."""
    found = {}
    for users in mlc.CONCURRENCIES:
        cells = {mode: results.get(mlc_run(variant, users, mode, plan)) for mode in mlc.MODES}
        if all(cells.values()):
            found[users] = {mode: cell["tpot"] for mode, cell in cells.items() if cell is not None}
    return found


def _mlc(results: Results, plan: Plan) -> Iterator[str]:
    yield "## By concurrency (MLCEngine's set-up)"
    for variant in mlc.VARIANTS:
        levels = tpots(results, plan, variant)
        if not levels:
            continue
        yield f"### Step times: {variant}"
        yield "\n".join(_mlc_claims(levels))
        yield "Mean TPOT, ms:"
        yield markdown_table(
            ["users", *mlc.MODES, "fixed saves", "adaptive saves", "better / adaptive"],
            (
                [
                    str(users),
                    *(f"{modes[mode] * 1e3:.2f}" for mode in mlc.MODES),
                    f"{1 - modes[mlc.FIXED] / modes[mlc.OFF]:.0%}",
                    f"{1 - modes[mlc.ADAPTIVE] / modes[mlc.OFF]:.0%}",
                    f"{_of_better(modes):.3f}",
                ]
                for users, modes in levels.items()
            ),
        )


def _of_better(modes: dict[str, float]) -> float:
    """Return a stream's speed with adaptive drafts over that of the better of off and fixed."""
    return min(modes[mlc.OFF], modes[mlc.FIXED]) / modes[mlc.ADAPTIVE]


def _mlc_claims(levels: dict[int, dict[str, float]]) -> Iterator[str]:
    low = {users: 1 - modes[mlc.FIXED] / modes[mlc.OFF] for users, modes in levels.items() if users <= 8}
    listed = ", ".join(f"{users}: {saved:.0%}" for users, saved in low.items())
    yield claim(f"fixed drafts save at least {GAIN:.0%} of TPOT with 1 to 8 users ({listed})",
                holds=bool(low) and min(low.values()) >= GAIN)  # fmt: skip
    high = {users: modes[mlc.OFF] / modes[mlc.FIXED] for users, modes in levels.items() if users >= 64}
    listed = ", ".join(f"{users}: {gain:.2f}x" for users, gain in high.items())
    yield claim(f"with 64 users and more the gain of fixed drafts is at most {GONE:g}x ({listed})",
                holds=bool(high) and max(high.values()) <= GONE)  # fmt: skip
    worst = min(map(_of_better, levels.values()))
    yield claim(
        f"adaptive drafts are never below {NEVER_BELOW:g} of the better curve (at least {worst:.3f})",
        holds=worst >= NEVER_BELOW,
    )
