"""Small versions of two studies of speculative decoding; `benchmarks.papers.speculation_study` has them.

TurboSpec (Liu et al., arXiv 2406.14066): draft lengths by goodput are as good as the best fixed length at
each load. MLCEngine (blog.mlc.ai, October 2024): three drafts gain much with few users and nothing with many.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.papers.speculation_study import mlc, turbospec

SHARED = os.environ.get("ONBEAT_SHARED")


def latency(server: str, rate: int, acceptance: float, mode: str) -> float:
    assert SHARED is not None
    run = turbospec.LatencyRun(
        server=server,
        rate=rate,
        acceptance=acceptance,
        mode=mode,
        num_requests=16 + 2 * rate,
        coefficients=Path(SHARED) / turbospec.COEFFICIENTS,
    )
    return run.run()["latency"]


@pytest.mark.skipif(SHARED is None, reason="needs the published coefficients (ONBEAT_SHARED)")
@pytest.mark.parametrize(
    ("server", "acceptance"), [("Llama-8B, EAGLE", 0.9), ("Llama-70B TP 4, n-gram", 0.5)]
)
@pytest.mark.parametrize("rate", [1, 16])
def test_adaptive_drafts_are_as_good_as_the_best_fixed_ones(
    server: str, acceptance: float, rate: int
) -> None:
    found = {mode: latency(server, rate, acceptance, mode) for mode in turbospec.MODES}
    adaptive = found.pop(turbospec.ADAPTIVE)
    assert adaptive <= 1.05 * min(found.values())
    if rate == 1 and acceptance == 0.9:
        assert found[turbospec.NONE] >= 2 * adaptive


@pytest.fixture(scope="module")
def tpots() -> dict[int, dict[str, float]]:
    """Users -> how drafts are planned -> mean TPOT, seconds."""
    return {
        users: {
            mode: mlc.LoopRun(
                variant="with host", concurrency=users, mode=mode, num_requests=max(10, users + users // 2)
            ).run()["tpot"]
            for mode in mlc.MODES
        }
        for users in (1, 8, 64)
    }


def test_drafts_gain_with_few_users_and_nothing_with_many(tpots: dict[int, dict[str, float]]) -> None:
    gains = {users: modes[mlc.OFF] / modes[mlc.FIXED] for users, modes in tpots.items()}
    assert gains[1] >= 1.25
    assert gains[1] > gains[8] > gains[64]
    assert gains[64] <= 1.05


def test_adaptive_drafts_follow_the_better_curve(tpots: dict[int, dict[str, float]]) -> None:
    for modes in tpots.values():
        assert min(modes[mlc.OFF], modes[mlc.FIXED]) >= 0.98 * modes[mlc.ADAPTIVE]
