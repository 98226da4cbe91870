"""Gates behind a wire: each is slowed by its own backlog alone, and what one has asked for dies with it."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from onbeat.cluster.client import FleetClient
from onbeat.cluster.front_ends import FrontEnds
from onbeat.cluster.gate_client import GateClient
from onbeat.cluster.gate_host import GateDesk, GateHost
from onbeat.cluster.gate_messages import Ask, Status
from onbeat.core.request import FinishReason
from onbeat.core.slo import SLO
from onbeat.engine.messages import WINDOW_TOKENS
from onbeat.metrics import slo_counts
from onbeat.metrics.counts import RunCounts
from onbeat.metrics.declare import samples
from onbeat.metrics.exporter import MetricsExporter
from onbeat.metrics.merge import flat, snapshot
from onbeat.metrics.tracker import RequestTracker
from tests.fleet.fleets import check_all, collect, expected_tokens, fleet_of, make_request, start_requests
from tests.waiting import until


class Watched:
    """Front ends of which nobody is looked after."""

    def on_serving(self, name: str) -> None:
        """Hear it."""

    def hear(self, name: str) -> None:
        """Hear it."""

    def on_told(self, name: str) -> None:
        """Hear it."""


class Desk:
    """Grants nothing."""

    def close(self) -> None:
        """Forget nothing."""


def host_of(client: FleetClient, exporter: MetricsExporter) -> GateHost:
    return GateHost(
        client,
        client.folder,
        cast(FrontEnds, Watched()),
        exporter.others,
        on_ended=exporter._counts.slo.remember,
        make_desk=lambda: cast(GateDesk, Desk()),
    )


@asynccontextmanager
async def two_gates(client: FleetClient) -> AsyncIterator[tuple[list[GateClient], MetricsExporter, GateHost]]:
    """Serve two gates of a fleet, in this process but by their wire."""
    exporter = MetricsExporter(RunCounts(), model_name="fake")
    host = host_of(client, exporter)
    gates = [GateClient(host.endpoint, f"gate-{number}") for number in range(2)]
    try:
        for gate in gates:
            await gate.connect()
        yield gates, exporter, host
    finally:
        for gate in gates:
            gate.close()
        await host.close()


def started(gate: GateClient, count: int, prefix: str, **fields: Any) -> Any:
    return start_requests(cast(FleetClient, gate), count, prefix, **fields)


async def test_a_gate_that_falls_behind_slows_its_own_rows_alone() -> None:
    async with (
        fleet_of(1, step_seconds=0.001, window_tokens=WINDOW_TOKENS, num_blocks=4096) as client,
        two_gates(client) as ((behind, other), _, _),
    ):
        slow = started(behind, 2, "slow", max_tokens=1000)
        await until(lambda: all(f"slow{number}" in client.streams.open for number in range(2)))
        assert behind._line._writer is not None
        reader = behind._line._writer.transport
        assert isinstance(reader, asyncio.ReadTransport)
        reader.pause_reading()  # what comes for it waits, as for a process that does nothing
        await check_all(started(other, 2, "quick", max_tokens=1000))
        for number in range(2):
            num_delivered = len(client.streams.open[f"slow{number}"].token_ids)
            assert num_delivered <= 2 * WINDOW_TOKENS  # of those that it had, and the window behind them
        reader.resume_reading()
        await check_all(slow)


async def test_what_a_gate_had_asked_for_is_counted_when_it_dies() -> None:
    async with fleet_of(1) as client, two_gates(client) as ((dying, other), exporter, host):
        counts, done = RunCounts(), make_request("done", max_tokens=3)
        assert await collect(cast(FleetClient, dying), done) == expected_tokens(done)
        counts.finished["length"] += 1
        dying.say_counts(snapshot(flat(samples(counts))), {}, 0)
        tasks = [task for _, task in started(dying, 2, "lost", max_tokens=90_000)]
        going_on = started(other, 1, "other", max_tokens=200)
        await until(lambda: len(client.streams.open) >= 2 and "lost1" in client.streams.open)

        def ended() -> dict[str, float]:
            return {
                each.words[0]: each.value
                for each in exporter.samples()
                if each.metric.name == "requests_total"
            }

        assert ended()["length"] == 1
        assert ended()["abort"] == 0
        host._lose(b"gate-0", "its process has ended")
        assert ended()["length"] == 1
        assert ended()["abort"] == 2
        await until(lambda: not {"lost0", "lost1"} & client.streams.open.keys())
        for task in tasks:
            task.cancel()
        await check_all(going_on)
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]


async def test_another_keeper_is_asked_for_the_rest_of_what_is_open() -> None:
    async with fleet_of(2) as client, two_gates(client) as (gates, exporter, host):
        going_on = [
            each for gate in gates for each in started(gate, 3, gates.index(gate) * "b" + "a", max_tokens=300)
        ]
        await until(lambda: sum(bool(each.token_ids) for gate in gates for each in gate._asked.values()) == 6)
        await host.close()
        assert not client.streams.open
        going_on += started(gates[0], 1, "late", max_tokens=9)
        other = host_of(client, exporter)
        await check_all(going_on)
        assert client.counts.num_resumed == 6
        await other.close()


async def test_what_the_keeper_is_late_is_in_the_waits_of_gates() -> None:
    async with fleet_of(1) as client, two_gates(client) as ((gate, _), _, _):
        asked: list[Ask] = []
        send = gate._line.send
        gate._line.send = lambda message: asked.append(message) if isinstance(message, Ask) else send(message)  # type: ignore[method-assign]
        request = make_request("a", max_tokens=1, slo=SLO(ttft=60.0))
        stream = asyncio.ensure_future(anext(gate.generate(request)))
        await until(lambda: asked)
        usual = request.arrival - asked.pop().request.arrival
        status: Status = gate._status
        status.way, status.made = 30.0, time.monotonic()
        gate._on_message(status)
        assert gate.gate.hand_out.lag >= 30.0
        second = asyncio.ensure_future(
            anext(gate.generate(make_request("b", max_tokens=1, slo=SLO(ttft=60.0))))
        )
        while not asked:
            await asyncio.sleep(0)
        assert usual < 30.0
        assert asked[0].request.arrival <= time.monotonic() - 30.0
        for task in (stream, second):
            task.cancel()


_CONTAINERS = (dict, list, set, deque, OrderedDict, defaultdict, Counter)


def num_held() -> int:
    """Return how much all containers of this process hold together."""
    gc.collect()
    return sum(len(each) for each in gc.get_objects() if type(each) in _CONTAINERS)


async def test_requests_that_have_ended_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slo_counts, "WINDOW_SECONDS", 0.5)
    async with fleet_of(2, step_seconds=0.0) as client, two_gates(client) as (gates, _, _):
        trackers = [RequestTracker([counts]) for counts in (RunCounts(), RunCounts())]
        told: list[dict[str, int]] = [{}, {}]
        for gate, tracker in zip(gates, trackers, strict=True):
            gate.add_observer(tracker)

        async def serve(number: int) -> None:
            gate, tracker = gates[number % 2], trackers[number % 2]
            request = make_request(f"of-{number}", max_tokens=3, slo=SLO(ttft=10.0))
            tracker.open(request)
            async for delivery in gate.generate(request):
                output, now = delivery.output, time.monotonic()
                tracker.deliver(output, now, len(output.new_token_ids), made=delivery.time)
                if number % 5 == 0:
                    break  # its client leaves
            tracker.close(request.request_id, output.finish_reason or FinishReason.ABORT, now)

        async def serve_many(first: int) -> int:
            for start in range(first, first + 620, 20):
                if start == first + 600:
                    await asyncio.sleep(0.6)  # what was before is forgotten with the next
                await asyncio.gather(*(serve(start + number) for number in range(20)))
                for gate, tracker, before in zip(gates, trackers, told, strict=True):
                    counts = tracker._listeners[0]
                    assert isinstance(counts, RunCounts)
                    gate.say_counts(
                        snapshot(flat(samples(counts))), counts.slo.take_new(before), tracker.num_open
                    )
            for gate in gates:
                await gate.wish("about")  # what it has told before has been heard then
            await until(lambda: not client.streams.open)
            return num_held()

        await serve_many(0)
        before = await serve_many(1000)
        assert await serve_many(2000) < before + 200
