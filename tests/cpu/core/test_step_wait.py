"""Waiting for a step and for messages at once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest
import zmq

from onbeat.engine import process
from onbeat.engine.process import StepWait


class Wiring:
    """A socket pair, a wait, and what was read."""

    def __init__(self):
        self.context = zmq.Context()
        self.inbox = self.context.socket(zmq.PULL)
        self.outbox = self.context.socket(zmq.PUSH)
        self.inbox.bind("inproc://messages")
        self.outbox.connect("inproc://messages")
        self.wait = StepWait(self.inbox)
        self.read: list[bytes] = []
        self.num_calls = 0

    def read_inbox(self):
        self.num_calls += 1
        while self.inbox.poll(0):
            self.read.append(self.inbox.recv())

    def is_read(self, count: int, *, within: float) -> bool:
        """Wait until so many messages were read; return whether they were."""
        end = time.monotonic() + within
        while len(self.read) < count and time.monotonic() < end:
            time.sleep(0.001)
        return len(self.read) >= count

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


def test_messages_are_read_when_they_come(wiring, monkeypatch):
    """The step ends only after the second message, and that is sent only after the first was read."""
    monkeypatch.setattr(process, "WAKE_SECONDS", 60.0)  # nothing but the messages wakes it in time
    step: Future[None] = Future()
    was_read: list[bool] = []

    def send_and_end() -> None:
        for count in (1, 2):
            time.sleep(0.05)  # by then the other thread waits
            wiring.outbox.send(b"%d" % count)
            was_read.append(wiring.is_read(count, within=10.0))
        step.set_result(None)

    sender = threading.Thread(target=send_and_end)
    sender.start()
    wiring.wait.until_done(step, wiring.read_inbox)
    assert step.done()
    sender.join()
    assert was_read == [True, True]
    assert wiring.read == [b"1", b"2"]
    assert wiring.num_calls <= 3, "it asks again and again"


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
