"""Copies of KV blocks: whole, in time, and only of what is lent."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from onbeat.core.errors import ConfigError, KVUnavailable
from onbeat.engine import kv_transfer
from onbeat.engine.kv_access import BlockMemory, KVSource
from onbeat.engine.native.library import NativeLibrary
from onbeat.engine.torch.kv import region_of
from tests.cpu.core.kv_engines import (
    NUM_BLOCKS,
    LendingProcess,
    layout,
    make_transfers,
)
from tests.cpu.core.lending import BLOCK_BYTES, WAIT, short_pulls
from tests.cpu.engine.forwards import on_native
from tests.cpu.engine.tiny_models import StateCheckpoint, hf_tiny_model


class TestFromAnotherProcess:
    def test_blocks_arrive_where_they_are_wanted(self, lender: LendingProcess) -> None:
        source = lender.lend()
        blocks, own = make_transfers()
        assert own.pull(source, 2, [9, 0, 23]).result(WAIT) == 3 * BLOCK_BYTES
        assert [blocks.holds(*pair) for pair in ((9, 5), (0, 6), (23, 7))] == [True] * 3
        assert not any(part[1].any() for part in blocks.parts), "others are left alone"
        assert own.pull(source, 0, []).result(WAIT) == 0
        own.close()

    def test_what_is_lent_no_longer(self, lender: LendingProcess) -> None:
        source = lender.lend()
        _, own = make_transfers()
        lender.revoke()
        with pytest.raises(KVUnavailable, match=r"lease.*'r'"):
            own.pull(source, 0, [1]).result(WAIT)
        lender.lend()
        with pytest.raises(KVUnavailable, match=r"lease.*'r'"):
            own.pull(source, 0, [1]).result(WAIT)
        own.close()

    @pytest.mark.parametrize(
        "changes",
        [{"dtype": "float32"}, {"backend": "native"}, {"model": "other"}, {"activations": "int8"}],
    )
    def test_another_layout(self, lender: LendingProcess, changes: dict[str, Any]) -> None:
        (field,) = changes
        _, own = make_transfers(**changes)
        with pytest.raises(KVUnavailable, match=f" {field}: '{changes[field]}'"):
            own.pull(lender.lend(), 0, [1]).result(WAIT)
        own.close()

    def test_a_block_that_changes_on_the_way(
        self, lender: LendingProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = lender.lend()
        blocks, own = make_transfers()
        transport = own._transport
        pull = transport.pull

        def change(source: KVSource, first: int, memory: BlockMemory, into: Sequence[int]) -> int:
            num_bytes = pull(source, first, memory, into)
            blocks.parts[1][into[-1], 700] ^= 1
            return num_bytes

        monkeypatch.setattr(transport, "pull", change)
        with pytest.raises(KVUnavailable, match=r"4.*'r'"):
            own.pull(source, 2, [9, 0, 23]).result(WAIT)
        own.close()

    def test_a_block_that_changes_while_it_is_lent(self) -> None:
        blocks, lending = make_transfers(is_filled=True)
        lending.leases.grant("r", range(8))
        source = lending.summed(lending.leases.source("r", lending.endpoint)).result(WAIT)
        blocks.parts[0][5, 3] ^= 128
        _, own = make_transfers()
        with pytest.raises(KVUnavailable, match=r"5.*'r'"):
            own.pull(source, 0, range(8)).result(WAIT)
        assert own.pull(source, 0, range(5)).result(WAIT) == 5 * BLOCK_BYTES
        lending.close()
        own.close()

    def test_blocks_without_checksums(self, lender: LendingProcess) -> None:
        _, own = make_transfers()
        with pytest.raises(KVUnavailable, match=r"checksums.*'r'"):
            own.pull(replace(lender.lend(), checksums=()), 0, [1]).result(WAIT)
        own.close()

    @pytest.mark.parametrize(("first", "into"), [(9, [1, 2]), (-1, [1]), (0, [NUM_BLOCKS]), (0, [-1])])
    def test_blocks_that_are_not_there(self, lender: LendingProcess, first: int, into: list[int]) -> None:
        _, own = make_transfers()
        with pytest.raises(KVUnavailable, match="were asked for"):
            own.pull(lender.lend(), first, into).result(WAIT)
        own.close()


def test_a_dead_source() -> None:
    process = LendingProcess()
    source = process.lend()
    process.kill()
    _, own = make_transfers()
    with pytest.raises(KVUnavailable, match="refused"):
        own.pull(source, 0, [1]).result(WAIT)
    own.close()


def test_a_copy_waits_for_steps_that_may_write_there(monkeypatch: pytest.MonkeyPatch) -> None:
    short_pulls(monkeypatch, 0.2)
    _, lending = make_transfers(is_filled=True)
    lending.leases.grant("r", range(8))
    source = lending.summed(lending.leases.source("r", lending.endpoint)).result(WAIT)
    blocks, own = make_transfers()
    step: Future[None] = Future()
    with pytest.raises(KVUnavailable, match=r"a step .* 0\.2 s"):
        own.pull(source, 0, [5], after=step).result(WAIT)
    assert not blocks.holds(5, 0)
    step.set_exception(RuntimeError("it failed, and writes no more"))
    assert own.pull(source, 0, [5], after=step).result(WAIT) == BLOCK_BYTES
    lending.close()
    own.close()


def test_each_block_is_read_once_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    _, lending = make_transfers(is_filled=True)
    read: list[int] = []
    checksum = BlockMemory.checksum

    def watched(memory: BlockMemory, block_id: int) -> int:
        read.append(block_id)
        return checksum(memory, block_id)

    monkeypatch.setattr(BlockMemory, "checksum", watched)
    for num_blocks in (2, 4, 4):
        lending.leases.grant("r", range(num_blocks))
        source = lending.summed(lending.leases.source("r", lending.endpoint)).result(WAIT)
        assert len(source.checksums) == num_blocks
    assert read == [0, 1, 2, 3]
    lending.leases.revoke("r")
    lending.leases.grant("r", [3])
    lending.summed(lending.leases.source("r", lending.endpoint)).result(WAIT)
    assert read == [0, 1, 2, 3, 3], "it may hold something else by now"
    lending.close()


class TestLeases:
    def test_a_name_is_lent_again_as_something_else(self) -> None:
        table = kv_transfer.Leases()
        first = table.grant("r", [1, 2])
        assert table.grant("r", [1, 2, 3]).serial == first.serial
        table.revoke("r")
        table.revoke("r")
        second = table.grant("r", [4])
        assert second.serial != first.serial
        with pytest.raises(KVUnavailable):
            table.block_ids("r", first.serial)
        assert table.block_ids("r", second.serial) == (4,)

    def test_there_is_an_end_to_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kv_transfer, "MOST_LEASES", 2)
        table = kv_transfer.Leases()
        for name in "ab":
            table.grant(name, [1])
        with pytest.raises(KVUnavailable, match="2 requests"):
            table.grant("c", [1])
        table.revoke("a")
        table.grant("c", [1])


class TestAccess:
    def test_views_write_to_the_block(self) -> None:
        blocks, own = make_transfers()
        for view in own.memory.views(3):
            view[:] = bytes([7]) * len(view)
        assert all(part[3].eq(7).all() for part in blocks.parts)
        assert sum(int(part.ne(0).sum()) for part in blocks.parts) == BLOCK_BYTES
        own.close()

    def test_kv_on_a_device(self) -> None:
        with pytest.raises(ConfigError, match="meta"):
            region_of(torch.zeros(2, 2, device="meta"))

    def test_the_native_cache_is_one_piece(self, native_library: NativeLibrary) -> None:
        checkpoint = StateCheckpoint(hf_tiny_model("llama3", torch.float64))
        forward = on_native(native_library, checkpoint)(num_blocks=4, block_size=32)
        (region,) = forward.kv_regions()
        config = checkpoint.config
        head = config.head_dim + -(-config.head_dim // 16) * 16
        assert region.block_bytes == config.num_layers * config.num_kv_heads * 32 * head * 4
        memory = BlockMemory(forward, layout(block_bytes=region.block_bytes, block_size=32), num_blocks=4)
        assert [len(view) for view in memory.views(3)] == [region.block_bytes]
