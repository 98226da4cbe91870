"""Whether other programs take the processors: from counts of a made-up machine, and on this one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from onbeat.engine.step_times import Others, OthersMeter
from tests.busy_loops import busy_loops
from tests.told import numbers

TICKS = os.sysconf("SC_CLK_TCK")


class FakeMachine:
    """Two cores and a third that this process may not run on; times in seconds."""

    def __init__(self, folder: Path) -> None:
        self.stat = folder / "stat"
        self.now = self.own = self.others = 0.0
        self.write()

    def write(self) -> None:
        busy, idle = int((self.own + self.others) * TICKS / 2), int(self.now * TICKS)
        # user, nice, system, idle, iowait, irq, softirq, steal, guest (which is within user), guest_nice
        half, rest = busy // 2, busy - busy // 2
        core = f"{half} 0 0 {idle} {idle} 0 0 {rest} {half} 0"
        self.stat.write_text(
            f"cpu  1 2 3 4 5 6 7 8 9 0\ncpu0 {core}\ncpu1 {core}\ncpu2 {'9' * 9} 0\nintr 1 2\n"
        )

    def pass_time(self, *, wall: float, own: float, others: float) -> None:
        self.now += wall
        self.own += own
        self.others += others
        self.write()

    def meter(self, num_threads: int = 2, cores: frozenset[int] = frozenset({0, 1})) -> OthersMeter:
        return OthersMeter(
            num_threads,
            stat=self.stat,
            clock=lambda: self.now,
            own_seconds=lambda: self.own,
            cores=cores,
        )


def test_what_others_take_is_what_this_process_does_not(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.pass_time(wall=5.0, own=2.0, others=3.0)
    meter = machine.meter()
    machine.pass_time(wall=2.0, own=2.0, others=1.5)
    found = meter.read()
    assert found is not None
    assert found.num_cores == pytest.approx(0.75, abs=0.02)
    assert found.is_busy
    assert numbers(found) == [0.8, 2]


@pytest.mark.parametrize(
    ("others", "is_busy"),
    [
        (Others(0.1, num_allowed=2, num_threads=2), False),
        (Others(1.0, num_allowed=2, num_threads=2), True),
        (Others(1.0, num_allowed=2, num_threads=1), False),  # the core beside it
        (Others(60.0, num_allowed=64, num_threads=4), False),
        (Others(61.0, num_allowed=64, num_threads=4), True),
    ],
)
def test_busy_is_what_leaves_too_little_for_all_threads(others: Others, is_busy: bool) -> None:
    assert others.is_busy == is_busy


def test_what_cannot_be_known_is_not_said(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    meter, of_other_cores = machine.meter(), machine.meter(cores=frozenset({0, 7}))
    machine.pass_time(wall=0.05, own=0.0, others=0.1)
    assert meter.read() is None, "too short"
    machine.pass_time(wall=1.0, own=0.0, others=0.1)
    assert meter.read() is not None
    assert of_other_cores.read() is None
    machine.stat.unlink()
    assert meter.read() is None


@pytest.mark.alone
def test_loops_on_all_cores_are_seen() -> None:
    cores = len(os.sched_getaffinity(0))
    with busy_loops(cores):
        meter = OthersMeter(cores)
        time.sleep(0.5)
        found = meter.read()
    assert found is not None
    assert found.is_busy
    assert found.num_cores > 0.5 * cores


@pytest.mark.alone
def test_own_work_is_not_that_of_others() -> None:
    meter = OthersMeter(1)
    idle = OthersMeter(1, own_seconds=lambda: 0.0)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        pass
    counted, all_of_it = meter.read(), idle.read()
    assert counted is not None
    assert all_of_it is not None
    assert all_of_it.num_cores - counted.num_cores > 0.1
