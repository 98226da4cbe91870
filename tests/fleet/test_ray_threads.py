"""Calls of Ray in threads of their own, which may return when nobody waits any more."""

from __future__ import annotations

import asyncio
import threading

import pytest

from onbeat.cluster.ray_launcher import _in_thread


async def test_a_call_returns_what_it_has_or_raises() -> None:
    assert await _in_thread(int, "7") == 7
    with pytest.raises(ValueError, match="invalid literal"):
        await _in_thread(int, "x")


async def test_a_call_may_end_after_whoever_waited_for_it(caplog: pytest.LogCaptureFixture) -> None:
    may_end, failures = threading.Event(), list[object]()
    threading.excepthook, hook = failures.append, threading.excepthook
    try:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_in_thread(may_end.wait), 0.01)
        may_end.set()
        for thread in threading.enumerate():
            if thread.name == "onbeat-ray":
                await asyncio.to_thread(thread.join)
        await asyncio.sleep(0)
    finally:
        threading.excepthook = hook
    assert not failures
    assert not caplog.records
