"""What the scheduler's process tells others."""

from __future__ import annotations

import asyncio

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape, SchedulerState, StepStats
from onbeat.vllm.telemetry import Publisher, Subscriber, hello_message, rank_address, stats_of, step_message

HELLO = hello_message({"scheduler": {}})
STATS = StepStats(
    *(7, 1.0, 1.5, BatchShape.of_decodes(3, 99), 3, 2, 100, 40, 1, 64, 32, 0.001, 0.002),
    predicted_seconds=0.4,
    scheduler=SchedulerState(num_relegated=2, decode_slacks=[0.1, -0.2]),
)


async def test_a_step_comes_as_it_was_sent_from_every_rank(tmp_path):
    address = f"ipc://{tmp_path}/t"
    subscriber = Subscriber(address, 2)
    publishers = [Publisher(rank_address(address, rank), HELLO) for rank in range(2)]

    async def tell() -> None:
        while True:  # who subscribes late misses what was sent before
            for rank, publisher in enumerate(publishers):
                publisher.send(step_message(STATS, rank=rank, rows=[("a", 5, 1, True)], counts=[1]))
            await asyncio.sleep(0.01)

    telling = asyncio.create_task(tell())
    heard: set[int] = set()
    while heard != {0, 1}:
        message = await subscriber.receive()
        if message["kind"] == "hello":
            continue
        assert stats_of(message) == STATS
        assert message["rows"] == [["a", 5, 1, True]]
        heard.add(message["rank"])
    telling.cancel()
    for each in (subscriber, *publishers):
        each.close()


async def test_what_cannot_be_sent_and_what_is_no_message_harm_nobody(tmp_path, caplog):
    address = f"ipc://{tmp_path}/t"
    publisher = Publisher(address, {"no": "kind"})
    subscriber = Subscriber(address)
    waiting = asyncio.create_task(subscriber.receive())
    while not waiting.done():
        publisher.send({"kind": object()})
        publisher.send({"no": "kind"})
        publisher.send({"kind": "step"})
        await asyncio.sleep(0.01)
    assert waiting.result() == {"kind": "step"}
    assert caplog.text.count("said once") == 1
    subscriber.close()
    publisher.close()


async def test_whoever_comes_late_hears_what_it_is_without_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr("onbeat.vllm.telemetry.HELLO_SECONDS", 0.05)
    publisher = Publisher(f"ipc://{tmp_path}/t", HELLO)
    subscriber = Subscriber(f"ipc://{tmp_path}/t")
    assert await subscriber.receive() == HELLO
    assert await subscriber.receive() == HELLO
    subscriber.close()
    publisher.close()


def test_sending_to_nobody_or_to_one_who_does_not_read_never_waits(tmp_path):
    publisher = Publisher(f"ipc://{tmp_path}/t", HELLO)
    for _ in range(20_000):
        publisher.send(HELLO)
    publisher.close()


def test_each_rank_has_its_own_address():
    assert rank_address("tcp://127.0.0.1:5557", 2) == "tcp://127.0.0.1:5559"
    assert rank_address("ipc:///a/b", 1) == "ipc:///a/b.1"
    assert rank_address("anything", 0) == "anything"
    with pytest.raises(ConfigError, match="ports"):
        rank_address("tcp://127.0.0.1:65535", 1)


def test_wrong_addresses_are_named(tmp_path):
    with pytest.raises(ConfigError, match="choose another address"):
        Publisher("tcp://nowhere.invalid:1", HELLO)
    publisher = Publisher("tcp://127.0.0.1:*", HELLO)
    publisher.close()


async def test_a_subscriber_names_a_wrong_address():
    with pytest.raises(ConfigError, match="no address of ZeroMQ"):
        Subscriber("ftp://x")
