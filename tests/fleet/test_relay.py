"""Gates whose keeper is on another machine: its death, a broken connection, another clock, strangers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from onbeat.cluster import gate_client
from onbeat.cluster.client import FleetClient
from onbeat.cluster.front_ends import FrontEnds
from onbeat.cluster.gate_client import GateClient, GateRelay
from onbeat.cluster.gate_host import GateHost, gates_endpoint
from onbeat.cluster.gate_messages import Ask, Counted, Wish, by_keepers_clock
from onbeat.cluster.lease import LeaseRecord
from onbeat.metrics.counts import RunCounts
from onbeat.metrics.exporter import MetricsExporter
from onbeat.metrics.slo_counts import EndedRequest
from tests.fleet.fleets import check_all, fleet_of, make_request, start_requests
from tests.fleet.test_gates import Watched, host_of
from tests.waiting import until

SECRET = "of all machines"


@asynccontextmanager
async def keeper(**fleet: Any) -> AsyncIterator[tuple[FleetClient, GateHost, LeaseRecord]]:
    """Run a keeper that gates of other machines reach."""
    async with fleet_of(1, **fleet) as client:
        host = host_of(client, MetricsExporter(RunCounts(), model_name="fake"))
        try:
            yield client, host, LeaseRecord("there", host.open_far("tcp://127.0.0.1:*", SECRET))
        finally:
            await host.close()


@asynccontextmanager
async def far_gate(folder: Path, found: LeaseRecord) -> AsyncIterator[tuple[GateClient, GateRelay]]:
    """Run a gate of a machine without a keeper."""
    relay = GateRelay(folder, cast(FrontEnds, Watched()), SECRET)
    relay.follow(found)
    gate = GateClient(gates_endpoint(folder), "gate")
    try:
        await gate.connect()
        yield gate, relay
    finally:
        gate.close()
        relay.close()


def asked(gate: GateClient, prefix: str, **fields: Any) -> Any:
    return start_requests(cast(FleetClient, gate), 4, prefix, **fields)


def has(client: FleetClient, num_tokens: int) -> bool:
    return all(len(each.token_ids) > num_tokens for each in client.streams.open.values())


async def test_a_gate_is_served_from_another_machine(tmp_path: Path) -> None:
    async with keeper() as (client, host, found), far_gate(tmp_path, found) as (gate, relay):
        assert gate.info == client.info
        await check_all(asked(gate, "a"))
        going_on = asked(gate, "b", max_tokens=900)
        await until(lambda: len(client.streams.open) == 4)
        relay._lose(b"gate")  # its process has ended
        await until(lambda: not client.streams.open and not host._gates)
        for _, task in going_on:
            task.cancel()
        await asyncio.wait([task for _, task in going_on])


async def test_streams_go_on_where_a_connection_breaks(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(gate_client, "SILENT_SECONDS", 0.3)
    async with (
        keeper(step_seconds=0.004) as (client, host, found),
        far_gate(tmp_path, found) as (gate, relay),
    ):
        going_on = asked(gate, "a", max_tokens=900)
        for num_tokens in (50, 300):
            await until(lambda: len(client.streams.open) == 4)
            await until(partial(has, client, num_tokens))
            for line in relay._lines.values():
                line._socket.disconnect(found.address)  # what was on its way is lost
            await asyncio.sleep(0.35)
            relay.follow(found)
        await check_all(going_on)
        await until(lambda: len(host._gates) == 1)


async def test_a_gate_that_was_silent_for_long_begins_again(tmp_path: Path, monkeypatch: Any) -> None:
    async with keeper(step_seconds=0.004) as (client, host, found), far_gate(tmp_path, found) as (gate, _):
        going_on = asked(gate, "a", max_tokens=900)
        await until(lambda: len(client.streams.open) == 4)
        monkeypatch.setattr("onbeat.cluster.gate_host.SILENT_SECONDS", -1.0)
        await until(lambda: not host._gates)
        monkeypatch.undo()
        gate.say_counts([], {}, 4)  # as it does every second
        await check_all(going_on)


async def test_streams_go_on_at_a_keeper_on_another_machine(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first, _, found = await stack.enter_async_context(keeper(step_seconds=0.004))
        second, _, other = await stack.enter_async_context(keeper(step_seconds=0.004))
        gate, relay = await stack.enter_async_context(far_gate(tmp_path, found))
        going_on = asked(gate, "a", max_tokens=900)
        await until(lambda: len(first.streams.open) == 4)
        await until(partial(has, first, 50))
        relay.follow(LeaseRecord("there", ""))  # it starts
        later = asked(gate, "b", max_tokens=5)
        await asyncio.sleep(0.2)
        relay.follow(other)
        await until(lambda: len(second.streams.open) >= 4)
        await check_all(later)
        await check_all(going_on)


async def test_who_does_not_know_the_secret_is_turned_away(tmp_path: Path) -> None:
    async with keeper() as (_, host, found):
        relay = GateRelay(tmp_path, cast(FrontEnds, Watched()), "another")
        relay.follow(found)
        gate = GateClient(gates_endpoint(tmp_path), "gate")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(gate.connect(), 0.5)
        assert not host._gates
        gate.close()
        relay.close()


async def test_another_clock_changes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    async with keeper() as (client, host, found):
        status = host._status

        def by_another_clock() -> Any:
            told = status()
            told.made -= 5000.0
            told.pulse = replace(told.pulse, time=told.pulse.time - 5000.0)
            told.clock = "another"
            return told

        monkeypatch.setattr(host, "_status", by_another_clock)
        async with far_gate(tmp_path, found) as (gate, _):
            assert gate._offset == pytest.approx(5000, abs=0.1)
            assert gate.pulse.time == pytest.approx(client.pulse.time, abs=1)
            gate.ask(replace(make_request("a", max_tokens=900), arrival=6000.0), [])
            await until(lambda: "a" in client.streams.open)
            assert client.streams.open["a"].request.arrival == pytest.approx(1000, abs=0.1)
            gate.abort("a")


def test_the_times_that_a_gate_tells() -> None:
    ask = Ask(replace(make_request("a"), arrival=10.0), [], [1], 11.0)
    told = by_keepers_clock(ask, 4.0)
    assert isinstance(told, Ask)
    assert told.rest.arrival == 6.0
    assert told.rest.first_token_time == 7.0
    assert ask.request.arrival == 10.0  # another keeper is told, too
    ended = EndedRequest(10.0, 1, 0.0, is_ttft=True, is_good=True)
    counted = by_keepers_clock(Counted([], {"default": [ended]}, 0), 4.0)
    assert isinstance(counted, Counted)
    assert counted.ended["default"][0].end == 6.0
    opened = by_keepers_clock(Wish(0, "open_call", {"arrival": 10.0, "call": {}}), 4.0)
    closed = by_keepers_clock(Wish(1, "close_call", {"number": 1, "end": {"end": 10.0}}), 4.0)
    assert isinstance(opened, Wish)
    assert isinstance(closed, Wish)
    assert opened.arguments["arrival"] == 6.0
    assert closed.arguments["end"]["end"] == 6.0
