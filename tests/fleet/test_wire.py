"""The port that replicas connect to, before strangers and before what a replica should not say."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
import zmq

from onbeat.cluster.life import Life
from onbeat.cluster.streams import Streams
from onbeat.core.errors import ConfigError
from onbeat.core.protocols import StepOutputs
from onbeat.core.request import Request, RequestOutput, TokenLogprobs
from onbeat.engine.messages import (
    Died,
    FromEngine,
    Shutdown,
    Stepped,
    decode_from_engine,
    encode,
    in_portions,
)
from tests.fleet.fleets import RemoteLauncher, check_all, fleet_of, start_requests, state_of
from tests.waiting import at_most, until


@pytest.fixture
def sockets():
    """DEALER sockets, closed at the end."""
    context = zmq.Context()
    opened = []

    def make():
        opened.append(context.socket(zmq.DEALER))
        return opened[-1]

    yield make
    for socket in opened:
        socket.close(linger=0)
    context.term()


def connect(sockets, endpoint, *, identity=b"stranger", server_key=None):
    socket = sockets()
    socket.routing_id = identity
    if server_key is not None:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = server_key
    socket.connect(endpoint)
    return socket


async def test_strangers_on_an_encrypted_port_change_nothing(sockets, caplog) -> None:
    async with fleet_of(2, launcher=RemoteLauncher()) as client:
        door = client.controller._wire.access
        assert door is not None
        endpoint = client.controller._wire.endpoint
        started = start_requests(client, 6, max_tokens=200)
        await until(lambda: sum(view.num_streaming for view in client.replicas()) == 6)
        name = client.controller.lives["r0"].name
        random_bytes = random.Random(0).randbytes
        for size in (1, 64, 5000):
            _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(endpoint).port)
            writer.write(random_bytes(size))
            await writer.drain()
            writer.close()
        wrong_key, _ = zmq.curve_keypair()
        for server_key in (None, wrong_key):  # neither gets through the handshake, whatever it calls itself
            socket = connect(sockets, endpoint, identity=name, server_key=server_key)
            socket.send(encode(Died("so says a stranger")), flags=zmq.NOBLOCK)
        known_key = connect(sockets, endpoint, identity=name, server_key=door.public_key)
        known_key.send(encode(Died("so says a stranger")), flags=zmq.NOBLOCK)
        await until(lambda: door.num_strangers >= 1)
        await check_all(started)
        assert client.controller._wire.num_dropped == 0
        assert [view.num_lives for view in client.replicas()] == [1, 1]
    told = [record for record in caplog.records if "is not of this fleet" in record.getMessage()]
    assert len(told) == 1


async def test_an_expelled_key_opens_no_door(sockets) -> None:
    launcher = RemoteLauncher()
    async with fleet_of(1, launcher=launcher) as client:
        keys = client.controller.lives["r0"].public_key
        door = client.controller._wire.access
        assert door is not None
        assert door.callback("fleet", keys)
        client.controller._lose(client.controller.lives["r0"], "a test says so")
        assert not door.callback("fleet", keys)
        await check_all(start_requests(client, 2))


async def test_one_that_calls_itself_as_a_replica_does_gets_nothing(sockets) -> None:
    async with fleet_of(1, launcher=RemoteLauncher()) as client:
        endpoint, name = client.controller._wire.endpoint, client.controller.lives["r0"].name
        connect(sockets, endpoint, identity=name).send(encode(Died("so says a stranger")), flags=zmq.NOBLOCK)
        await check_all(start_requests(client, 2))
        await asyncio.sleep(0.1)
        assert client.replicas()[0].num_lives == 1


async def test_a_replica_that_talks_nonsense_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async with fleet_of(2) as client:
        started = start_requests(client, 4, max_tokens=100)
        await until(lambda: all(view.num_streaming == 2 for view in client.replicas()))
        wire = client.controller._wire
        wire._take([client.controller.lives["r0"].name, b"\xc1 nonsense"])
        await until(lambda: state_of(client, "r0") == "starting", timeout=1)
        await check_all(started)
    assert "be read" in caplog.text


async def test_no_listener_stops_the_reading(caplog: pytest.LogCaptureFixture) -> None:
    """What fails at one message fails at no other: the descriptor does not tell of those that wait."""
    said: list[str] = []

    def fail(text: str) -> None:
        said.append(text)
        raise OSError(28, "No space left on device")

    client = fleet_of(2)
    client.controller._on_progress = fail
    async with at_most(20), client:
        assert [view.state for view in client.replicas()] == ["ready", "ready"]
        assert len(said) == 2
        on_message = client.controller._wire._on_message
        failures = iter([KeyError("one"), ValueError("two")])

        def fail_twice(name: bytes, message: FromEngine) -> None:
            on_message(name, message)
            if (failure := next(failures, None)) is not None:
                raise failure

        client.controller._wire._on_message = fail_twice
        await check_all(start_requests(client, 4))
        assert next(failures, None) is None
    told = [record for record in caplog.records if "cannot be handled" in record.getMessage()]
    assert len(told) == len(said) + 2


async def test_what_an_earlier_life_says_is_dropped() -> None:
    async with fleet_of(2) as client:
        started = start_requests(client, 4, max_tokens=100)
        await until(lambda: all(view.num_streaming == 2 for view in client.replicas()))
        earlier = client.controller.lives["r0"]
        client.controller._lose(earlier, "a test says so")
        await until(lambda: state_of(client, "r0") == "ready")
        outputs = [RequestOutput(f"q{i}", [96], num_previous_tokens=3) for i in range(4)]
        client.controller._wire._take([earlier.name, encode(next(in_portions(StepOutputs(0.0, outputs))))])
        await check_all(started)


@pytest.mark.parametrize("num_previous", [0, 90])
async def test_a_gap_or_a_repeat_ends_the_stream(num_previous, caplog: pytest.LogCaptureFixture) -> None:
    async with fleet_of(1) as client:
        [(request, task)] = start_requests(client, 1, max_tokens=900)
        await until(lambda: client.replicas()[0].num_streaming == 1)
        output = RequestOutput(request.request_id, [96], num_previous_tokens=num_previous)
        life = client.controller.lives["r0"]
        client.controller._wire._take([life.name, encode(next(in_portions(StepOutputs(0.0, [output]))))])
        with pytest.raises(Exception, match="fit together"):
            await task
        await until(lambda: client.replicas()[0].num_outstanding == 0)
        await check_all(start_requests(client, 2, "later"))
    assert "deliveries of q0" in caplog.text


async def test_a_replica_that_ends_of_itself_is_lost_once() -> None:
    async with fleet_of(2) as client:
        started = start_requests(client, 4, max_tokens=100)
        await until(lambda: all(view.num_streaming == 2 for view in client.replicas()))
        client.controller.send("r1", Shutdown())
        await check_all(started)
        assert client.counts.lost == {"r1": 1}


async def test_an_endpoint_that_cannot_be_bound_is_told(monkeypatch) -> None:
    launcher = RemoteLauncher()

    async def open_elsewhere(_folder) -> str:
        return "tcp://203.0.113.1:*"

    monkeypatch.setattr(launcher, "open", open_elsewhere)
    with pytest.raises(ConfigError, match=r"tcp://203\.0\.113\.1"):
        await fleet_of(1, launcher=launcher).start()


async def test_scores_of_prompts_come_in_parts_of_which_none_is_long_and_count_from_one_replica_alone() -> (
    None
):
    reports = [TokenLogprobs(n, -0.5, tuple(range(20)), (-1.0,) * 20, n) for n in range(5000)]
    streams = Streams(lambda _: None)
    gate = Mock()
    for name in "abc":
        streams.begin(Request(request_id=name, prompt_token_ids=range(9)), gate)
    opened = dict(streams.open)
    given = {"a": reports, "b": [], "c": None}
    for replica in ("r0", "r1"):  # the first is lost before its step is told
        step = [
            RequestOutput(open_request.next_attempt(replica).request_id, [5], prompt_logprobs=given[name])
            for name, open_request in opened.items()
        ]
        for open_request in opened.values():
            streams.on_sent(open_request)
        messages = [encode(message) for message in in_portions(StepOutputs(1.0, step))]
        assert max(map(len, messages)) < 300_000 < sum(map(len, messages))
        for message in messages[:-1] if replica == "r0" else messages:
            stepped = decode_from_engine(message)
            assert isinstance(stepped, Stepped)
            streams.on_stepped(
                cast(Life, SimpleNamespace(replica=replica, replica_number=0)), stepped.outputs
            )
    delivered = [output for call in gate.deliver.call_args_list for output in call.args[1]]
    assert [output.request_id for output in delivered] == ["a", "b", "c"]
    for output in delivered:
        assert (output.prompt_logprobs, output.new_token_ids) == (given[output.request_id], [5])


def test_what_a_replica_still_tells_of_a_stream_that_was_taken_up_twice_is_none_of_its_tokens() -> None:
    """A gate's connection breaks twice soon: the replica has not yet heard that the first attempt is over."""
    streams, gate = Streams(lambda _: None), Mock()
    life = cast(Life, SimpleNamespace(replica="r0", replica_number=0))
    resumed = Request(request_id="a", prompt_token_ids=range(9), resumed_token_ids=(1, 2, 3))
    names = []
    for _ in range(2):
        streams.end("a")
        streams.begin(resumed, gate)
        names.append(streams.open["a"].next_attempt("r0").request_id)
        streams.on_sent(streams.open["a"])
    late = RequestOutput(names[0], [5], num_previous_tokens=7)
    right = RequestOutput(names[1], [4], num_previous_tokens=3)
    streams.on_stepped(life, StepOutputs(1.0, [late, right]))
    assert not gate.refuse.called
    [call] = gate.deliver.call_args_list
    assert [(output.request_id, output.new_token_ids) for output in call.args[1]] == [("a", [4])]
