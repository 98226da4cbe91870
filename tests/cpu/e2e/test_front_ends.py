"""Front ends as processes of their own: what dies with one, what lives on, and what they share."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import openai
import pytest
from openai.resources.responses import Responses

from tests.cpu.e2e.program import MODEL, ServerProgram, connections, is_running
from tests.cpu.e2e.test_death import Stream, replicas, text_of
from tests.waiting import wait_for


def front_ends(server: ServerProgram) -> list[int]:
    """Return the process ids of the front ends."""
    engines = {each["process_id"] for each in replicas(server)}
    return [pid for pid in server.engine_pids if pid not in engines]


def num_connections(server: ServerProgram, pid: int) -> int:
    """Return how many clients a front end is connected with."""
    return len(connections(server, pid))


def streams_on_both(server: ServerProgram, **fields: object) -> list[Stream]:
    """Open streams until each front end has two."""
    streams: list[Stream] = []
    while min(num_connections(server, pid) for pid in front_ends(server)) < 2:
        assert len(streams) < 64, "one front end gets no connection"
        streams.append(Stream(server.url, **fields))
        streams[-1].wait_until_flowing()
    return streams


def test_a_front_ends_death_breaks_its_own_streams_alone(server: ServerProgram) -> None:
    asked = {"max_tokens": 350, "temperature": 0}
    expected = text_of(Stream(server.url, **asked).end(60))
    streams = streams_on_both(server, **asked)
    victim, other = front_ends(server)
    num_broken = num_connections(server, victim)
    engines = [each["process_id"] for each in replicas(server)]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: len(set(front_ends(server)) - {victim}) == 2, 30)
    for stream in streams:
        stream.go_on()
    others = [stream for stream in streams if not stream.is_broken()]
    assert len(streams) - len(others) == num_broken
    for stream in others:
        assert text_of(stream.end(60)) == expected
    assert [each["process_id"] for each in replicas(server)] == engines
    assert is_running(other)
    wait_for(lambda: not any(each["num_outstanding"] for each in replicas(server)))
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 4}, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 4


@contextmanager
def responses_of(server: ServerProgram, pid: int) -> Iterator[Responses]:
    """Give the block a client that is connected with a front end: its first request goes there."""
    with ExitStack() as stack:
        for _ in range(64):
            http = stack.enter_context(openai.DefaultHttpxClient(timeout=60))
            connection = http.get(f"{server.url}/health").extensions["network_stream"]
            if connection.get_extra_info("client_addr")[1] in connections(server, pid):
                url = f"{server.url}/v1"
                yield openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http).responses
                return
    raise AssertionError("a front end gets no connection")


RESPONSE: dict[str, Any] = {
    "model": MODEL,
    "max_output_tokens": 120,
    "extra_body": {"ignore_eos": True},
}


def test_a_response_is_read_on_and_gone_on_from_at_any_front_end(server: ServerProgram) -> None:
    one, other = front_ends(server)
    read: list[Any] = []
    with (
        responses_of(server, one) as client,
        client.create(input="a", background=True, stream=True, **RESPONSE) as stream,
    ):
        for event in stream:
            read.append(event)
            if len(read) == 20:
                break
    response_id = read[0].response.id
    with responses_of(server, other) as client:
        after = read[-1].sequence_number
        with client.retrieve(response_id, stream=True, starting_after=after) as stream:
            read += stream
    assert [event.sequence_number for event in read] == list(range(len(read)))
    assert read[-1].type == "response.incomplete"
    text = "".join(event.delta for event in read if event.type == "response.output_text.delta")
    for pid in (one, other):
        with responses_of(server, pid) as client:
            assert client.retrieve(response_id).output_text == text == read[-1].response.output_text
    with responses_of(server, other) as client:
        asked = {"model": RESPONSE["model"], "input": "b", "previous_response_id": response_id}
        assert client.input_tokens.count(**asked).input_tokens > 100
    with responses_of(server, one) as client:
        begun = client.create(input="b", background=True, **RESPONSE)
    with responses_of(server, other) as client:
        assert client.cancel(begun.id).status in ("cancelled", "incomplete")
    with responses_of(server, other) as client:
        client.delete(response_id)
    with responses_of(server, one) as client, pytest.raises(openai.NotFoundError):
        client.retrieve(response_id)


def test_what_a_dead_front_end_was_making_is_gone_and_counted(server: ServerProgram) -> None:
    victim, other = front_ends(server)
    with responses_of(server, victim) as client:
        kept = client.create(input="a", **RESPONSE)
    before = settled(server)["onbeat_requests_total{abort}"]  # a front end tells its ends every second
    with responses_of(server, victim) as client:
        lost = client.create(input="a", background=True, **RESPONSE | {"max_output_tokens": 1200})
    wait_for(lambda: any(httpx.get(f"{server.url}/state").json()["replica_outstanding"].values()), 30)
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: len(set(front_ends(server)) - {victim}) == 2, 30)
    with responses_of(server, other) as client:
        assert client.retrieve(kept.id).output_text == kept.output_text
    with responses_of(server, other) as client, pytest.raises(openai.NotFoundError):
        client.retrieve(lost.id)
    assert settled(server)["onbeat_requests_total{abort}"] == before + 1


def settled(server: ServerProgram) -> dict[str, float]:
    """Return the metrics once no front end has anything new to tell: each tells every second."""
    while True:
        before = server.metrics()
        time.sleep(2.5)
        now = server.metrics()
        names = ("onbeat_output_tokens_total", "onbeat_requests_total{length}")
        if all(before[name] == now[name] for name in names):
            return now


def test_any_front_end_shows_the_numbers_of_all(server: ServerProgram) -> None:
    before = settled(server)
    with ThreadPoolExecutor(8) as pool:
        asked = {"prompt": "a", "max_tokens": 5, "ignore_eos": True, "slo": {"ttft_ms": 9000}}
        done = list(
            pool.map(lambda _: httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60), range(16))
        )
    assert [answer.status_code for answer in done] == [200] * 16
    rises = {"onbeat_output_tokens_total": 80, "onbeat_requests_total{length}": 16}

    now = settled(server)
    assert {name: now[name] - before[name] for name in rises} == rises
    judged = [
        value for name, value in server.metrics().items() if re.match(r"onbeat_slo_requests_.*unnamed", name)
    ]
    assert sum(judged) == 16
    state = httpx.get(f"{server.url}/state").json()
    assert state["output_tokens_total"] == server.metrics()["onbeat_output_tokens_total"]


def test_front_ends_are_replaced_without_a_refused_connection(server: ServerProgram) -> None:
    old = front_ends(server)
    streams = [Stream(server.url, max_tokens=200) for _ in range(8)]
    for stream in streams:
        stream.wait_until_flowing()
    stop, statuses = threading.Event(), list[int]()

    def ask() -> None:
        while not stop.is_set():
            reply = httpx.post(
                f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60
            )
            statuses.append(reply.status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    server.send_signal(signal.SIGHUP)
    wait_for(lambda: not set(old) & set(front_ends(server)), 60)
    stop.set()
    asking.join()
    assert set(statuses) == {200}
    for stream in streams:
        stream.end(60)


def test_a_front_end_that_is_replaced_makes_its_responses_before_it_ends(server: ServerProgram) -> None:
    old = front_ends(server)
    with responses_of(server, old[0]) as client:
        begun = client.create(input="a", background=True, **RESPONSE | {"max_output_tokens": 270})
    server.send_signal(signal.SIGHUP)
    wait_for(lambda: not set(old) & set(front_ends(server)), 60)
    with responses_of(server, front_ends(server)[0]) as client:
        made = client.retrieve(begun.id)
    assert made.status == "incomplete"
    assert made.usage is not None
    assert made.usage.output_tokens == 270


def test_the_fleet_can_be_changed_by_any_front_end(server: ServerProgram) -> None:
    refused = server.change_fleet("drain", replica="r9")
    assert refused.status_code == 400
    assert "r0" in refused.json()["error"]["message"]
    assert server.change_fleet("scale", replicas=1).status_code == 200
    wait_for(lambda: len(replicas(server)) == 1, 30)


def test_calls_of_a_job_are_one_job_wherever_they_come(server: ServerProgram) -> None:
    for number in range(1, 9):  # each by a connection of its own
        fields = {"prompt": "a", "max_tokens": 2, "slo": {"job": {"id": "j", "e2e_ms": 60_000}}}
        answer = httpx.post(f"{server.url}/v1/completions", json=fields, timeout=60).json()
        assert answer["slo"]["job"]["calls"] == number
