"""The socket between gates and their keeper: messages come whole, in order, and before the news of an end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import uvloop

from onbeat.cluster.local_wire import LocalLine, LocalWire
from tests.waiting import until

decode = msgspec.msgpack.decode


class Keeper:
    """Hears what comes over a wire, and echoes nothing."""

    def __init__(self, folder: Path) -> None:
        self.heard: list[object] = []
        self.wire = LocalWire(str(folder / "gates"), self.hear, self.heard.append)

    def hear(self, name: bytes, message: bytes) -> None:
        said = decode(message)
        if said == "raise":
            raise ValueError("of whoever hears it")
        self.heard.append((name, said))


class Gate:
    """One end of a line."""

    def __init__(self, folder: Path, name: bytes = b"gate") -> None:
        self.heard: list[object] = []
        self.num_opened = 0
        self.line = LocalLine(
            str(folder / "gates"), name, lambda told: self.heard.append(decode(told)), self.on_open
        )

    def on_open(self) -> None:
        self.num_opened += 1
        self.line.send(["open", self.num_opened])


@pytest.fixture
async def keeper(tmp_path: Path) -> AsyncIterator[Keeper]:
    keeper = Keeper(tmp_path)
    yield keeper
    keeper.wire.close()


async def test_messages_of_any_size_come_whole_and_in_order(keeper: Keeper, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    await until(lambda: b"gate" in keeper.wire.writers)
    said = [b"x" * size for size in (0, 1, 3, 255, 2**16, 5 * 2**20, *range(500))]
    for each in said:
        keeper.wire.send(b"gate", each)
        gate.line.send(each)
    await until(lambda: len(gate.heard) == len(said) and len(keeper.heard) == 1 + len(said))
    assert gate.heard == said
    assert keeper.heard == [(b"gate", ["open", 1]), *((b"gate", each) for each in said)]
    gate.line.close()


async def test_an_end_is_told_behind_all_that_was_said(keeper: Keeper, tmp_path: Path) -> None:
    gates = [Gate(tmp_path, b"%d" % number) for number in range(2)]
    await until(lambda: len(keeper.heard) == 2)
    keeper.heard.clear()
    for number in range(1000):
        gates[0].line.send(number)
    gates[0].line.close()
    await until(lambda: b"0" in keeper.heard)
    assert keeper.heard == [*((b"0", number) for number in range(1000)), b"0"]
    keeper.wire.send(b"0", "nobody hears it")
    keeper.wire.send(b"1", "go on")
    await until(lambda: gates[1].heard == ["go on"])
    gates[1].line.close()


async def test_a_line_begins_again_with_whoever_listens_next(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gate.line.send("nobody listens")
    await asyncio.sleep(0.05)
    for number in range(1, 4):
        keeper = Keeper(tmp_path)  # where the one before has left its socket
        await until(partial(len, keeper.heard))
        assert keeper.heard == [(b"gate", ["open", number])]
        keeper.wire.close()
        await until(partial(keeper.heard.__contains__, b"gate"))
    gate.line.close()


async def test_what_fails_with_one_message_ends_no_connection(
    keeper: Keeper, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(tmp_path)
    await until(lambda: keeper.heard)
    with caplog.at_level(logging.ERROR):
        gate.line.send("raise")
        gate.line.send("after")
        await until(lambda: len(keeper.heard) == 2)
    assert keeper.heard[1] == (b"gate", "after")
    assert "a message cannot be handled" in caplog.text
    gate.line.close()


def test_nobody_is_sent_anything_between_an_end_and_its_news(tmp_path: Path) -> None:
    """uvloop fails to write to what is closed; whoever sends has others to tell."""

    async def lose() -> None:
        keeper, gate = Keeper(tmp_path), Gate(tmp_path)
        await until(partial(len, keeper.heard))
        sent = asyncio.get_running_loop().create_future()

        def send() -> None:
            is_known = b"gate" in keeper.wire.writers
            keeper.wire.send(b"gate", "too late")
            sent.set_result(is_known)

        keeper.wire.writers[b"gate"].transport.abort()
        asyncio.get_running_loop().call_soon(send)
        assert await asyncio.wait_for(sent, 5.0)
        await until(partial(keeper.heard.__contains__, b"gate"))
        gate.line.close()
        keeper.wire.close()

    uvloop.run(lose())
