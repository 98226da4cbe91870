"""A server that stands still while its engine goes on: what it says of itself is what its clients saw."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.cpu.e2e.program import ServerProgram, serving
from tests.cpu.e2e.tiny_directory import write_tiny_directory
from tests.fleet.test_stand_ins import STAND_IN
from tests.waiting import wait_for

STOP_SECONDS = 2.5


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProgram]:
    with serving(write_tiny_directory(tmp_path / "tiny"), *STAND_IN) as program:
        yield program


class Seen:
    """A stream as its client sees it."""

    def __init__(self, server: ServerProgram, **fields: Any) -> None:
        self.events: list[tuple[float, Any]] = []
        self.start = time.monotonic()
        usage = {"include_usage": True, "continuous_usage_stats": True}
        self._body = {
            "prompt": "1 2 3",
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
            "stream_options": usage,
            **fields,
        }
        self._netloc = urlsplit(server.url).netloc
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        connection = http.client.HTTPConnection(self._netloc, timeout=120)
        connection.request(
            "POST", "/v1/completions", json.dumps(self._body), {"content-type": "application/json"}
        )
        with connection.getresponse() as reply:
            assert reply.status == 200, reply.read()
            for line in reply:
                if line.startswith(b"data: {"):
                    self.events.append((time.monotonic() - self.start, json.loads(line[6:])))
        connection.close()

    def end(self) -> Any:
        """Wait for the end; return what the answer says of its objectives, if it had any."""
        self._reader.join(120)
        return self.events[-1][1].get("slo")

    @property
    def text(self) -> str:
        return "".join(choice["text"] for _, event in self.events for choice in event["choices"])

    @property
    def token_times(self) -> list[float]:
        """When each token came, seconds from the start; half a character comes with its other half."""
        times: list[float] = []
        for moment, event in self.events:
            times += [moment] * (event["usage"]["completion_tokens"] - len(times))
        return times


def stop_for(server: ServerProgram, seconds: float) -> None:
    server.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    server.send_signal(signal.SIGCONT)


def test_a_verdict_says_what_the_client_saw(server: ServerProgram) -> None:
    objectives = {"ttft_ms": 500, "tbt_ms": 10}
    seen = Seen(server, max_tokens=3000, slo=objectives)
    wait_for(lambda: len(seen.events) > 10)
    stop_for(server, STOP_SECONDS)
    slo = seen.end()
    times = seen.token_times
    late = sum(moment > max(0.5, times[0]) + 0.01 * token for token, moment in enumerate(times))
    assert late > 10
    assert slo["token_attainment"] == pytest.approx(1 - late / 3000, abs=0.02)
    assert slo["met"] is False
    assert slo["engine_ttft_ms"] <= slo["ttft_ms"] <= 1e3 * times[0]
    assert server.metrics()["onbeat_slo_attainment{unnamed}"] == 0


def test_an_engine_does_not_go_on_for_long_without_its_server(server: ServerProgram) -> None:
    seen = Seen(server, max_tokens=3000)
    wait_for(lambda: len(seen.events) > 10)
    stop_for(server, STOP_SECONDS)
    gone_on = time.monotonic() - seen.start
    seen.end()
    times = seen.token_times
    assert len(times) == 3000
    # a reader that others hold up has more at once; without a stop of the engine it were 1,500 and more
    assert sum(gone_on < moment < gone_on + 0.2 for moment in times) < 1000
    again = Seen(server, max_tokens=3000)
    again.end()
    assert again.text == seen.text
