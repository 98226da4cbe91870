"""Who gets deliveries next, and what it means for objectives that they wait in the server."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.cluster.gate import MOST_AT_ONCE, ClientStream, HandOut
from onbeat.core.errors import SLOUnattainable
from onbeat.core.protocols import Delivery
from onbeat.core.request import RequestOutput
from onbeat.core.slo import SLO, Fate, ShedMode
from onbeat.engine.messages import TOLD_TOKENS, WINDOW_TOKENS
from tests.fleet.fleets import check_all, collect, expected_tokens, fleet_of, make_request, start_requests
from tests.waiting import until


def stream_of(name: str, caller: str) -> ClientStream:
    return ClientStream(name, caller)


def item(number: float) -> Delivery:
    return Delivery(number, RequestOutput("", []))


class Watched(deque[tuple[str, str, float]]):
    """The order in which streams get what is for them: caller, stream, number."""

    def watch(self, stream: ClientStream) -> ClientStream:
        put = stream.queue.put_nowait

        def put_nowait(each: Delivery) -> None:
            self.append((stream.caller, stream.request_id, each.time))
            put(each)

        stream.queue.put_nowait = put_nowait  # type: ignore[method-assign,assignment]
        return stream


async def test_a_flood_does_not_hold_up_another_callers_first_token() -> None:
    hand_out, order = HandOut(), Watched()
    flood = [order.watch(stream_of(f"f{number}", "flood")) for number in range(200)]
    for step in range(50):
        for each in flood:
            hand_out.put(each, item(step))
    hand_out.put(order.watch(stream_of("guest", "guest")), item(0))
    hand_out.put(order.watch(stream_of("new", "flood")), item(0))
    while not any(name == "new" for _, name, _ in order):
        await asyncio.sleep(0)
    names = [name for _, name, _ in order]
    assert names.index("guest") <= MOST_AT_ONCE + 2
    assert names.index("new") <= MOST_AT_ONCE + len(flood) + 2  # one of each, where 10,000 came before


@given(
    puts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=300),
    turns=st.lists(st.booleans(), min_size=1, max_size=20),
)
def test_each_stream_has_all_in_order_and_callers_take_turns(
    puts: list[tuple[int, int]], turns: list[bool]
) -> None:
    order = asyncio.run(_handed(puts, turns))
    for name in {name for _, name, _ in order}:
        numbers = [number for _, other, number in order if other == name]
        assert numbers == sorted(set(numbers))
    assert len(order) == len(puts)
    # Behind what was handed out at once, callers that have something waiting take turns.
    waiting = list(order)[MOST_AT_ONCE:]
    left = Counter(caller for caller, _, _ in waiting)
    if all(turns[:1]) and len(turns) == 1:
        shares: Counter[str] = Counter()
        for caller, _, _ in waiting:
            shares[caller] += 1
            busy = [each for each in left if shares[each] < left[each]]
            counts = [shares[each] for each in busy]
            assert not counts or max(counts) - min(counts) <= 1


async def _handed(puts: list[tuple[int, int]], turns: list[bool]) -> Watched:
    """Put numbered items; let the event loop go on behind each `True`, all the turns over again."""
    hand_out, order = HandOut(), Watched()
    streams: dict[tuple[int, int], ClientStream] = {}
    for number, (caller, stream) in enumerate(puts):
        if (caller, stream) not in streams:
            streams[caller, stream] = order.watch(stream_of(f"{caller}-{stream}", str(caller)))
        hand_out.put(streams[caller, stream], item(number))
        if not turns[number % len(turns)]:
            await asyncio.sleep(0)
    for _ in puts:
        await asyncio.sleep(0)
    return order


async def test_what_waits_for_a_request_that_has_ended_takes_no_turn() -> None:
    hand_out, order = HandOut(), Watched()
    gone, stays = (order.watch(stream_of(name, "a")) for name in ("gone", "stays"))
    for number in range(100):
        hand_out.put(gone, item(number))
    hand_out.put(stays, item(0))
    gone.waiting.clear()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [name for _, name, _ in order] == ["gone"] * MOST_AT_ONCE + ["stays"]


async def test_the_lag_is_the_way_and_the_turn() -> None:
    hand_out = HandOut()
    hand_out.hear(10.0, 10.25)
    assert hand_out.lag == pytest.approx(0.25)
    hand_out.hear(11.0, 10.9)  # clocks of two machines are not the same to the millisecond
    assert hand_out.lag == 0


@pytest.fixture
def lag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HandOut, "lag", property(lambda _: 5.0))


SLO_OF_2: dict[str, Any] = {"slo": SLO(ttft=2.0, tbt=1.0)}
FLEET: dict[str, Any] = {"policy": "slo", "max_num_batched_tokens": 512}


async def test_a_request_that_would_be_handed_over_late_is_refused(lag: None) -> None:
    async with fleet_of(1, **FLEET) as client:
        stream = client.generate(make_request("a", shed=ShedMode.REJECT, **SLO_OF_2))
        with pytest.raises(SLOUnattainable) as refused:
            await anext(stream)
    assert 5.0 <= refused.value.predicted_ttft < 6.0
    assert refused.value.retry_after is not None
    assert 3.0 <= refused.value.retry_after < 4.0


async def test_a_request_that_would_be_handed_over_late_is_relegated(lag: None) -> None:
    async with fleet_of(1, **FLEET) as client:
        request = make_request("a", max_tokens=3, shed=ShedMode.RELEGATE, **SLO_OF_2)
        fates = [delivery.output.fate async for delivery in client.generate(request)]
    assert set(fates) == {Fate.RELEGATED}


async def test_without_a_lag_it_is_served() -> None:
    async with fleet_of(1, **FLEET) as client:
        request = make_request("a", max_tokens=3, shed=ShedMode.REJECT, **SLO_OF_2)
        fates = [delivery.output.fate async for delivery in client.generate(request)]
    assert fates == [None] * 3


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_stream_that_nobody_takes_leaves_the_batch_and_comes_back(depth: int) -> None:
    limits: dict[str, Any] = {"max_in_flight_steps": depth, "window_tokens": WINDOW_TOKENS}
    async with fleet_of(1, step_seconds=0.001, **limits) as client:
        left = make_request("left", max_tokens=400)
        stream = client.generate(left)
        tokens = list((await anext(stream)).output.new_token_ids)
        await check_all(start_requests(client, 4, max_tokens=300))  # in which it could have had as many
        open_request = client.streams.open["left"]
        num_delivered = len(open_request.token_ids)
        assert WINDOW_TOKENS <= num_delivered <= WINDOW_TOKENS + depth
        async for delivery in stream:
            tokens += delivery.output.new_token_ids
        assert tokens == expected_tokens(left)


async def test_streams_that_nobody_takes_do_not_keep_others_out() -> None:
    limits: dict[str, Any] = {"max_num_seqs": 4, "window_tokens": WINDOW_TOKENS}
    async with fleet_of(1, step_seconds=0.001, **limits) as client:
        requests = [make_request(f"left{number}", max_tokens=200) for number in range(4)]
        streams = [client.generate(request) for request in requests]
        firsts = [(await anext(stream)).output.new_token_ids for stream in streams]
        await until(
            lambda: all(len(each.token_ids) >= WINDOW_TOKENS for each in client.streams.open.values())
        )
        await check_all(start_requests(client, 8, max_tokens=100))
        for request, stream, tokens in zip(requests, streams, firsts, strict=True):
            async for delivery in stream:
                tokens += delivery.output.new_token_ids
            assert tokens == expected_tokens(request)


async def test_a_stream_that_moves_while_nobody_takes_it_loses_nothing() -> None:
    limits: dict[str, Any] = {"keeps_kv": True, "window_tokens": WINDOW_TOKENS, "num_blocks": 1024}
    async with fleet_of(2, step_seconds=0.001, **limits) as client:
        left = make_request("left", max_tokens=900)
        stream = client.generate(left)
        tokens = list((await anext(stream)).output.new_token_ids)
        open_request = client.streams.open["left"]
        await until(lambda: len(open_request.token_ids) >= WINDOW_TOKENS)
        assert open_request.replica is not None
        await client.drain(open_request.replica, seconds=0.0, restarts=True)
        async for delivery in stream:
            tokens += delivery.output.new_token_ids
        assert tokens == expected_tokens(left)


async def test_few_messages_say_what_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet_of(1, step_seconds=0.002, window_tokens=WINDOW_TOKENS) as client:
        send, sent = client.controller.send, list[str]()

        def counted(replica: str, message: Any) -> None:
            sent.append(type(message).__name__)
            send(replica, message)

        monkeypatch.setattr(client.controller, "send", counted)
        requests = [make_request(f"q{number}", max_tokens=320) for number in range(8)]
        taken = await asyncio.gather(*(collect(client, request) for request in requests))
    assert taken == [expected_tokens(request) for request in requests]
    assert sent.count("Fetched") <= 8 * 320 // TOLD_TOKENS
    assert sent.count("Fetched") >= (320 - WINDOW_TOKENS) // TOLD_TOKENS
