"""Waiting for a step and for messages at once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest
import zmq

from onbeat.engine.step_wait import StepWait


class Wiring:
    """A socket pair, a wait, and what was read."""

    def __init__(self):
        self.context = zmq.Context()
        self.inbox = self.context.socket(zmq.PULL)
        self.outbox = self.context.socket(zmq.PUSH)
        self.inbox.bind("inproc://messages")
        self.outbox.connect("inproc://messages")
        self.wait = StepWait(self.inbox)
        self.read: list[tuple[float, bytes]] = []
        self.num_calls = 0

    def read_inbox(self):
        self.num_calls += 1
        while self.inbox.poll(0):
            self.read.append((time.monotonic(), self.inbox.recv()))

    def close(self):
        self.wait.close()
        self.context.destroy(linger=0)


@pytest.fixture
def wiring():
    wiring = Wiring()
    yield wiring
    wiring.close()


def end_later(step: Future[None], seconds: float) -> threading.Thread:
    thread = threading.Timer(seconds, step.set_result, (None,))
    thread.start()
    return thread


def test_a_step_that_has_ended_is_not_waited_for(wiring):
    step: Future[None] = Future()
    step.set_result(None)
    wiring.wait.until_done(step, wiring.read_inbox)
    assert wiring.num_calls == 0


def test_messages_are_read_when_they_come(wiring):
    step: Future[None] = Future()
    start = time.monotonic()
    timers = [end_later(step, 0.3)]
    for index, delay in enumerate((0.05, 0.15)):
        timers.append(threading.Timer(delay, wiring.outbox.send, (b"%d" % index,)))
        timers[-1].start()
    wiring.wait.until_done(step, wiring.read_inbox)
    assert time.monotonic() - start >= 0.29
    assert [text for _, text in wiring.read] == [b"0", b"1"]
    assert [moment - start for moment, _ in wiring.read] == pytest.approx([0.05, 0.15], abs=0.06)
    assert wiring.num_calls <= 3, "it asks again and again"
    for timer in timers:
        timer.join()


def test_a_late_bell_does_not_end_the_next_wait(wiring):
    """A step whose end was seen without its bell leaves a byte behind."""
    wiring.wait.ring()
    step: Future[None] = Future()
    start = time.monotonic()
    thread = end_later(step, 0.1)
    wiring.wait.until_done(step, wiring.read_inbox)
    assert time.monotonic() - start >= 0.09
    thread.join()


def test_many_steps_in_a_row(wiring):
    for _ in range(300):
        step: Future[None] = Future()
        thread = end_later(step, 0.0)
        wiring.wait.until_done(step, wiring.read_inbox)
        assert step.done()
        thread.join()
