"""What the scheduler's process tells the API servers."""

from __future__ import annotations

import asyncio

import pytest

from onbeat.core.errors import ConfigError
from onbeat.vllm.telemetry import LATE, Publisher, Refusal, RequestNews, StepTimes, Subscriber, rank_address

NEWS = RequestNews(slo_id="a", refusal=Refusal(code=LATE, predicted_ttft=float("inf"), reason="late"))


async def test_a_message_comes_as_it_was_sent_from_every_rank(tmp_path):
    address = f"ipc://{tmp_path}/t"
    subscriber = Subscriber(address, 2)
    publishers = [Publisher(rank_address(address, rank)) for rank in range(2)]
    times = [StepTimes(rank=rank, predicted=0.5, measured=0.25) for rank in range(2)]

    async def tell() -> None:
        while True:  # who subscribes late misses what was sent before
            for publisher, each in zip(publishers, times, strict=True):
                publisher.send(NEWS)
                publisher.send(each)
            await asyncio.sleep(0.01)

    telling = asyncio.create_task(tell())
    heard: list[object] = []
    while not all(each in heard for each in (NEWS, *times)):
        heard.append(await subscriber.receive())
    telling.cancel()
    for each in (subscriber, *publishers):
        each.close()


async def test_what_cannot_be_sent_and_what_is_no_message_harm_nobody(tmp_path, caplog):
    address = f"ipc://{tmp_path}/t"
    publisher = Publisher(address)
    subscriber = Subscriber(address)
    waiting = asyncio.create_task(subscriber.receive())
    while not waiting.done():
        publisher.send({"kind": object()})
        publisher.send({"no": "kind"})
        publisher.send(NEWS)
        await asyncio.sleep(0.01)
    assert waiting.result() == NEWS
    assert caplog.text.count("said once") == 1
    subscriber.close()
    publisher.close()


def test_sending_to_nobody_or_to_one_who_does_not_read_never_waits(tmp_path):
    publisher = Publisher(f"ipc://{tmp_path}/t")
    for _ in range(20_000):
        publisher.send(NEWS)
    publisher.close()


def test_each_rank_has_its_own_address():
    assert rank_address("tcp://127.0.0.1:5557", 2) == "tcp://127.0.0.1:5559"
    assert rank_address("ipc:///a/b", 1) == "ipc:///a/b.1"
    assert rank_address("anything", 0) == "anything"
    with pytest.raises(ConfigError, match="ports"):
        rank_address("tcp://127.0.0.1:65535", 1)


def test_wrong_addresses_are_named():
    with pytest.raises(ConfigError, match="nowhere"):
        Publisher("tcp://nowhere.invalid:1")
    Publisher("tcp://127.0.0.1:*").close()


async def test_a_subscriber_names_a_wrong_address():
    with pytest.raises(ConfigError, match="ftp"):
        Subscriber("ftp://x")
