"""How long a process is kept from running: a starved one waits, a deadlocked one does not."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from onbeat.cluster.processor_time import ProcessorTime, ProcessorWaits, read_processor_time


def waits_of(*looks: tuple[float, float, bool] | None) -> float:
    """Return the seconds that a process waited: a look a second."""
    waits = ProcessorWaits()
    for now, look in enumerate(looks):
        waits.look(float(now), None if look is None else ProcessorTime(*look))
    return waits.seconds


@pytest.mark.parametrize(
    ("looks", "seconds"),
    [
        ([(5.0, 9.0, True)], 0.0),  # what was before the first look is not known
        ([(5.0, 9.0, False)] * 5, 0.0),  # a deadlock asks for nothing
        ([(5.0, 9.0, True)] * 5, 4.0),  # ready, and it never runs
        ([(0.0, 0.0, True), (0.1, 0.9, True), (0.2, 1.8, True)], 1.8),
        ([(0.0, 0.0, True), (1.0, 0.0, True), (2.0, 0.0, True)], 0.0),  # an endless loop has what it wants
        ([(0.0, 0.0, True), (4.0, 12.0, True)], 0.75),  # sixteen threads on four cores
        ([(0.0, 0.0, False), (0.001, 0.2, False)], 0.2),  # it wakes up for a moment and waits for that
        ([(0.0, 0.0, True), (0.0, 0.0, True), (0.0, 0.0, True), (0.1, 3.1, True)], 2 + 3.1 / 3.2),
        ([(0.0, 0.0, True), None, (0.1, 0.9, True)], 0.0),
        ([(1.0, 1.0, False), (0.5, 0.6, False)], 0.0),  # a process that it had started has ended
    ],
)
def test_waits(looks, seconds):
    assert waits_of(*looks) == pytest.approx(seconds)


def test_whoever_goes_on_begins_anew():
    waits = ProcessorWaits()
    for now in range(3):
        waits.look(float(now), ProcessorTime(1.0, 1.0, is_ready=True))
    waits.forget()
    waits.look(9.0, ProcessorTime(1.0, 1.0, is_ready=True))
    assert waits.seconds == 0.0


def test_a_process_is_read_with_its_threads_and_children():
    program = (
        "import subprocess, sys, threading, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
        "child.kill()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        first = read_processor_time(process.pid)
        assert first is not None
        while (later := read_processor_time(process.pid)) and later.running < first.running + 0.2:
            time.sleep(0.01)
        assert later is not None
        assert later.is_ready, "its child runs"
        process.stdin.close()


def test_of_a_process_that_is_gone_nothing_is_known():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert read_processor_time(process.pid) is None
    assert read_processor_time(os.getpid()) is not None
