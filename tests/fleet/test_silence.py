"""How long a replica was silent is judged by time in which its server ran itself."""

from __future__ import annotations

from typing import Any, cast

import pytest

from onbeat.cluster.life import LIMITS, Life
from onbeat.cluster.processes import PAUSE_SECONDS, Processes
from onbeat.core.protocols import EngineInfo, EnginePulse

START = 1000.0
PAUSE = 300.0


class NoProcess:
    """A launcher of nothing: no process is suspended, and nobody knows what one has got of the processors."""

    def is_suspended(self, *_: object) -> bool:
        return False

    def processor_time(self, *_: object) -> None:
        return None


class Watched:
    """A replica that says nothing more, and the server's looks at it."""

    def __init__(self, pulse: EnginePulse) -> None:
        self.lost: list[str] = []
        launcher = cast(Any, NoProcess())
        self._processes = Processes(
            launcher, cast(Any, None), on_lost=lambda _, why: self.lost.append(why), start_timeout=600.0
        )
        self.life = Life("r0", 0, START)
        self.life.info, self.life.pulse = cast(EngineInfo, object()), pulse
        self._processes.lives["r0"] = self.life

    def look_until(self, start: float, end: float, *, hears: bool = False) -> float | None:
        """Look ten times a second; return when it was lost, seconds from the start."""
        for tenth in range(round((end - start) * 10)):
            now = start + tenth / 10
            if hears:
                self.life.heard = now
            self._processes.check(now)
            if self.lost:
                return now - start
        return None


def test_a_replica_has_a_fresh_period_once_its_server_goes_on() -> None:
    watched = Watched(EnginePulse(START))
    assert watched.look_until(START, START + 1) is None
    lost = watched.look_until(START + PAUSE, START + PAUSE + 60)
    assert lost == pytest.approx(LIMITS.silence_seconds - 1, abs=2 * PAUSE_SECONDS)
    (why,) = watched.lost
    assert f" {LIMITS.silence_seconds:.0f} s" in why


def test_so_has_its_step() -> None:
    """Who stops a group of processes stops the engine, too: its step is as old as before when it goes on."""
    watched = Watched(EnginePulse(START, START, 0.01))
    assert watched.look_until(START, START + 1, hears=True) is None
    lost = watched.look_until(START + PAUSE, START + PAUSE + 60, hears=True)
    assert lost == pytest.approx(LIMITS.step_seconds - 1, abs=2 * PAUSE_SECONDS)


def test_pauses_add_up_and_hide_no_silence() -> None:
    watched = Watched(EnginePulse(START))
    for number in range(3):
        begin = START + number * PAUSE
        assert watched.look_until(begin, begin + 4) is None
    assert watched.look_until(START + 3 * PAUSE, START + 3 * PAUSE + 60) == pytest.approx(
        LIMITS.silence_seconds - 12, abs=4 * PAUSE_SECONDS
    )


def test_a_start_that_was_stopped_is_not_given_up_for_that() -> None:
    watched = Watched(EnginePulse(START))
    watched.life.info, watched.life.place = None, cast(Any, object())
    assert watched.look_until(START, START + 1) is None
    assert watched.look_until(START + 2 * PAUSE + 100, START + 2 * PAUSE + 110) is None
