"""The keeper of several front ends, and who looks after it: what dies with either, and what goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.cpu.e2e.program import ServerProgram, is_running, serving, starting
from tests.cpu.e2e.test_death import Stream, replicas, text_of
from tests.cpu.e2e.test_front_ends import front_ends, streams_on_both
from tests.waiting import wait_for

KEYS = {"LIMITED": "of a caller with limits"}
HEADERS = {"Authorization": f"Bearer {KEYS['LIMITED']}"}
CLASSES = """
api_keys:
  - {key_env: LIMITED, max_open_requests: 3}
"""
ASKED = {"max_tokens": 500, "temperature": 0}
"""Of the model here: 10 s of one, so few tokens that they are little work for those who pass them on."""


@pytest.fixture(scope="module")
def limited(flags: Sequence[str | Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProgram]:
    """A server of which a key may have three requests open at once."""
    classes = tmp_path_factory.mktemp("limits") / "classes.yaml"
    classes.write_text(CLASSES)
    limits = ("--slo-classes", classes, "--api-key", KEYS["LIMITED"])
    with serving(*flags, *limits, env={**os.environ, **KEYS}) as program:
        yield program
        num_before = len(program.lines)
        program.send_signal(signal.SIGTERM)
        assert program.exit_code(30) == 0
        assert not any("Traceback" in line for line in program.lines[num_before:])


def ask_with_the_key(server: ServerProgram) -> int:
    """Return the status of an answer."""
    fields = {"prompt": "a", "max_tokens": 1, "ignore_eos": True}
    reply = httpx.post(f"{server.url}/v1/completions", json=fields, headers=HEADERS, timeout=60)
    return reply.status_code


@pytest.fixture(scope="module")
def whole(server: ServerProgram) -> str:
    """The text that nothing has disturbed."""
    return text_of(Stream(server.url, **ASKED).end(60))


def check(streams: Sequence[Stream], whole: str) -> None:
    """Wait until more of each has come, and look whether all of that is as if nothing had been."""
    for stream in streams:
        stream.go_on()
    for stream in streams:
        assert whole.startswith(text_of(stream.leave()))


def replace_keeper(server: ServerProgram, end: Callable[[int], object]) -> None:
    """End the keeper in some way, and wait until another one serves."""
    [keeper] = server.keepers
    num_lines = len(server.lines)
    end(keeper)
    wait_for(lambda: any("this keeper follows another" in line for line in server.lines[num_lines:]), 30)
    [other] = server.keepers
    assert other != keeper


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop_for_a_second(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(pid, signal.SIGCONT)


def test_streams_outlive_the_keeper(server: ServerProgram, whole: str) -> None:
    before = {each["replica"]: each["process_id"] for each in replicas(server)}
    gates = front_ends(server)
    streams = streams_on_both(server, **ASKED)
    for _ in range(2):
        replace_keeper(server, kill)
        for stream in streams:
            stream.go_on()
    for stream in streams:
        events = stream.end(60)
        assert text_of(events) == whole
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    wait_for(lambda: all(each["state"] == "ready" for each in replicas(server)), 30)
    assert {each["replica"]: each["process_id"] for each in replicas(server)} == before
    assert set(front_ends(server)) == set(gates)
    wait_for(lambda: not any(each["num_outstanding"] for each in replicas(server)))


def test_requests_that_come_while_there_is_no_keeper_are_served(server: ServerProgram, whole: str) -> None:
    [keeper] = server.keepers
    os.kill(keeper, signal.SIGSTOP)  # or a quick machine has another before they are asked
    with ThreadPoolExecutor(8) as pool:
        asked = {"prompt": "a", "ignore_eos": True, **ASKED, "max_tokens": 120}
        answers = [
            pool.submit(httpx.post, f"{server.url}/v1/completions", json=asked, timeout=60) for _ in range(8)
        ]
        time.sleep(0.3)
        replace_keeper(server, kill)
        for answer in answers:
            text = answer.result().json()["choices"][0]["text"]
            assert whole.startswith(text.rstrip("\ufffd"))  # the last token may end within a character
            assert len(text) > 40  # a character may take several tokens


def test_a_keeper_that_stands_still_for_a_second_loses_nothing(server: ServerProgram, whole: str) -> None:
    [keeper] = server.keepers
    gates = front_ends(server)
    streams = streams_on_both(server, **ASKED)
    stop_for_a_second(keeper)
    check(streams, whole)
    assert server.keepers == [keeper]
    assert set(front_ends(server)) == set(gates)


def test_a_front_end_and_the_keeper_die_at_once(server: ServerProgram, whole: str) -> None:
    streams = streams_on_both(server, **ASKED)
    victim = front_ends(server)[0]

    def kill_both(keeper: int) -> None:
        kill(victim)
        kill(keeper)

    replace_keeper(server, kill_both)
    for stream in streams:
        stream.go_on()
    others = [stream for stream in streams if not stream.is_broken()]
    assert 0 < len(others) < len(streams)
    check(others, whole)
    wait_for(lambda: len(set(front_ends(server)) - {victim}) == 2, 30)
    wait_for(lambda: not any(each["num_outstanding"] for each in replicas(server)), 30)


def test_an_engine_and_the_keeper_die_at_once(server: ServerProgram, whole: str) -> None:
    streams = streams_on_both(server, **ASKED)
    victim = replicas(server)[0]["process_id"]

    def kill_both(keeper: int) -> None:
        kill(victim)
        kill(keeper)

    replace_keeper(server, kill_both)
    check(streams, whole)
    wait_for(lambda: [each["state"] for each in replicas(server)] == ["ready", "ready"], 60)
    assert victim not in [each["process_id"] for each in replicas(server)]


def test_the_keeper_is_replaced_when_asked_for(server: ServerProgram, whole: str) -> None:
    streams = streams_on_both(server, **ASKED)
    replace_keeper(server, lambda _: server.change_fleet("restart", keeper=True).raise_for_status())
    check(streams, whole)


def test_front_ends_that_are_being_replaced_are_so_after_the_death_of_the_keeper(
    server: ServerProgram, whole: str
) -> None:
    before = set(front_ends(server))
    streams = streams_on_both(server, **ASKED)
    server.send_signal(signal.SIGHUP)
    wait_for(lambda: set(front_ends(server)) - before, 30)
    replace_keeper(server, kill)
    wait_for(lambda: any("being replaced" in line for line in server.lines), 30)
    wait_for(lambda: not before & set(front_ends(server)), 60)
    wait_for(lambda: len(front_ends(server)) == 2, 60)
    for stream in streams:
        assert text_of(stream.end(60)) == whole


def test_limits_of_a_key_hold_over_all_front_ends(limited: ServerProgram) -> None:
    streams = [Stream(limited.url, HEADERS, max_tokens=1300) for _ in range(12)]
    wait_for(lambda: sum(stream.error is not None for stream in streams) == 9)
    assert all("429" in str(stream.error) for stream in streams if stream.error)
    for stream in streams:
        if not stream.error:
            stream.wait_until_flowing()
            stream.leave()
    wait_for(lambda: ask_with_the_key(limited) == 200)
    assert not any("Traceback" in line for line in limited.lines)


def test_what_a_key_has_open_counts_at_the_next_keeper(limited: ServerProgram) -> None:
    taken = [Stream(limited.url, HEADERS, max_tokens=1300) for _ in range(3)]
    wait_for(lambda: replicas(limited)[0]["num_streaming"] == 3)
    assert ask_with_the_key(limited) == 429
    with ThreadPoolExecutor(1) as other:
        # One of them has not told the next keeper, when the other asks it.
        for gate in front_ends(limited):
            os.kill(gate, signal.SIGSTOP)
            replace_keeper(limited, kill)
            early = other.submit(ask_with_the_key, limited)
            time.sleep(0.5)
            os.kill(gate, signal.SIGCONT)
            assert early.result() == 429
    wait_for(lambda: replicas(limited)[0]["num_streaming"] == 3)
    for stream in taken:
        stream.go_on()
        stream.leave()
    wait_for(lambda: ask_with_the_key(limited) == 200)


def test_a_fleet_that_scales_itself_has_its_replicas_at_the_next_keeper(flags: Sequence[str | Path]) -> None:
    with serving(*flags, "--autoscale", "1..3", "--replicas", "2") as server:
        wait_for(lambda: [each["state"] for each in replicas(server)] == ["ready", "ready"], 30)
        before = [each["process_id"] for each in replicas(server)]
        stream = Stream(server.url, **ASKED)
        stream.wait_until_flowing()
        replace_keeper(server, kill)
        stream.go_on()
        stream.leave()
        wait_for(lambda: [each["state"] for each in replicas(server)] == ["ready", "ready"], 30)
        assert [each["process_id"] for each in replicas(server)] == before
        assert server.change_fleet("scale", min=3, max=3).status_code == 200
        wait_for(lambda: [each["state"] for each in replicas(server)] == ["ready"] * 3, 30)


def test_a_keeper_killed_before_it_serves_is_followed_by_one_that_does(flags: Sequence[str | Path]) -> None:
    with starting(*flags, "--replicas", "2") as server:
        wait_for(lambda: server.keepers and server.engine_pids, 60)
        kill(server.keepers[0])
        server.wait_until_ready()
        assert [each["state"] for each in replicas(server)] == ["ready", "ready"]
        Stream(server.url, max_tokens=20).end(60)
        server.send_signal(signal.SIGTERM)
        assert server.exit_code(30) == 0


def test_all_end_with_who_looks_after_the_keeper(server: ServerProgram) -> None:
    """The last one here, because it ends the server of the others."""
    processes = [*server.keepers, *server.engine_pids]
    assert len(processes) == 5
    kill(server.process.pid)
    wait_for(lambda: not any(map(is_running, processes)), 30)
