"""The hand-over of KV in an engine: who may have which block, and until when."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from onbeat.core.errors import InvalidRequest, KVUnavailable
from onbeat.core.request import FinishReason
from onbeat.engine.core import EngineCore
from onbeat.engine.executor import ThreadExecutor
from onbeat.engine.kv_access import BlockMemory, KVEndpoint, KVSource
from onbeat.engine.kv_handover import KVHandover
from onbeat.engine.kv_transfer import TcpTransport
from onbeat.recording.reader import Recording
from onbeat.recording.writer import create_record
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.simulator.replay.decisions import Replay
from tests.cpu.core.kv_engines import KEY, NUM_BLOCKS, Blocks, layout
from tests.fake_runner import FakeRunner
from tests.fake_step_time import LinearStepTime
from tests.pure.recording.recorded import make_header
from tests.pure.scheduler.driver import make_config, make_request

WAIT = 30.0


class SlowTransport(TcpTransport):
    """Copies once it is told to."""

    def __init__(self) -> None:
        super().__init__(KEY)
        self.may_end = threading.Event()
        self.num_pulls = 0

    def pull(self, source: KVSource, first_block: int, memory: BlockMemory, into: Sequence[int]) -> int:
        self.num_pulls += 1
        assert self.may_end.wait(WAIT)
        return len(into)


class Engine:
    """An engine without a model, whose clock is set by hand."""

    def __init__(self, path: Path | None = None, **changes) -> None:
        self.now = 1.0
        self.runner = FakeRunner()
        config = make_config(num_blocks=NUM_BLOCKS, enable_prefix_caching=False, **changes)
        self.transport = SlowTransport()
        memory = BlockMemory(Blocks(is_filled=False), layout(), num_blocks=NUM_BLOCKS)
        self.idle = itertools.repeat(True)
        self.core = EngineCore(
            Scheduler(config, LinearStepTime()),
            ThreadExecutor(self.runner),
            clock=lambda: self.now,
            recorder=create_record(path)(make_header(config)) if path else None,
            idle_work=lambda: next(self.idle),
            kv_memory=lambda: memory,
        )
        self.core.open_kv(self.transport)
        self.outputs: dict[str, list[int]] = {}

    @property
    def kv(self) -> KVHandover:
        assert self.core.kv is not None
        return self.core.kv

    @property
    def num_used_blocks(self) -> int:
        return self.core.scheduler.kv.pool.num_used_blocks

    def add(self, name: str, num_prompt: int, max_tokens: int) -> None:
        self.core.add(make_request(name, num_prompt, max_tokens, arrival=self.now))
        self.outputs[name] = []

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            message = self.core.step()
            for output in message.outputs if message else ():
                self.outputs[output.request_id] += output.new_token_ids

    def is_lent(self, source: KVSource) -> bool:
        try:
            self.kv._transfers.leases.block_ids(source.lease_id, source.serial)
        except KVUnavailable:
            return False
        return True


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Its record, replayed, must say the same."""
    path = tmp_path / "run.gz"
    engine = Engine(path)
    yield engine
    engine.transport.may_end.set()
    engine.core.scheduler.check_invariants()
    engine.core.shutdown()
    assert Replay(Recording(path), LinearStepTime()).run().difference is None


class TestLending:
    def test_full_blocks_while_the_request_runs(self, engine: Engine) -> None:
        engine.add("r", 40, 30)
        assert engine.kv.hold("r") is None
        engine.step(2)
        first = engine.kv.hold("r")
        assert first is not None
        assert len(first.block_ids) == 2
        engine.step(20)
        second = engine.kv.hold("r")
        assert second is not None
        assert second.block_ids[:2] == first.block_ids
        assert (len(second.block_ids), second.serial) == (3, first.serial)
        engine.kv.unhold("r")
        assert not engine.is_lent(second)

    def test_what_nobody_renews_ends(self, engine: Engine) -> None:
        engine.add("r", 40, 4)
        engine.step(2)
        source = engine.kv.hold("r", seconds=5)
        engine.step(20)
        assert "r" in engine.outputs
        assert engine.num_used_blocks == 2, "the request has ended, what is lent of it stays"
        assert source is not None
        engine.now += 4
        engine.core.do_idle_work()
        engine.kv.hold("r", seconds=5)
        engine.now += 4
        engine.core.do_idle_work()
        assert engine.is_lent(source)
        engine.now += 1
        engine.core.do_idle_work()
        assert not engine.is_lent(source)
        assert engine.num_used_blocks == 0

    def test_a_request_that_left_is_lent_whole(self, engine: Engine) -> None:
        engine.add("r", 40, 30)
        engine.step(2)
        held = engine.kv.hold("r", seconds=5)
        engine.kv.detach("r")
        (departure,) = engine.kv.take_departures()
        assert departure.detached is not None
        assert departure.source is not None
        assert held is not None
        assert departure.detached.num_kv_tokens == 40
        assert departure.source.block_ids[:2] == held.block_ids
        assert len(departure.source.block_ids) == 3
        engine.now += 100
        engine.core.do_idle_work()
        assert engine.is_lent(departure.source), "until it is freed or put back"
        assert engine.kv.reattach("r")
        assert not engine.is_lent(departure.source)
        assert not engine.kv.reattach("r")
        engine.step(40)
        assert len(engine.outputs["r"]) == 30

    def test_one_that_ends_first_has_not_left(self, engine: Engine) -> None:
        engine.add("r", 4, 1)
        engine.step(2)
        engine.kv.detach("r")
        assert [each.detached for each in engine.kv.take_departures()] == [None]
        assert engine.kv.take_departures() == []

    @pytest.mark.parametrize("ends_by", ["free", "abort"])
    def test_a_request_that_left_for_good(self, engine: Engine, ends_by: str) -> None:
        engine.add("r", 40, 30)
        engine.step(2)
        engine.kv.detach("r")
        (departure,) = engine.kv.take_departures()
        assert departure.source is not None
        if ends_by == "abort":
            (output,) = engine.core.abort(["r"])
            assert output.finish_reason is FinishReason.ABORT
        else:
            engine.kv.free("r")
        assert not engine.is_lent(departure.source)
        assert engine.num_used_blocks == 0
        assert not engine.core.has_work


class TestRoom:
    def source(self, num_blocks: int) -> KVSource:
        endpoint = KVEndpoint(layout=layout(), host="127.0.0.1", port=1)
        checksum = zlib.crc32(bytes(layout().block_bytes))
        return KVSource(
            endpoint=endpoint,
            lease_id="r",
            serial=1,
            block_ids=tuple(range(num_blocks)),
            checksums=(checksum,) * num_blocks,
        )

    def test_slots_and_blocks_are_kept(self, engine: Engine) -> None:
        assert engine.kv.reserve("m", 300)
        assert not engine.kv.reserve("n", 100)
        engine.add("r", 200, 4)
        engine.step(3)
        assert not engine.outputs["r"], "there is no room for it"
        engine.kv.release("m")
        engine.kv.release("m")
        engine.step(20)
        assert len(engine.outputs["r"]) == 4

    def test_no_slot_is_left(self) -> None:
        engine = Engine(max_num_seqs=2, max_num_batched_tokens=32)
        assert engine.kv.reserve("m", 10)
        assert engine.kv.reserve("n", 10)
        assert not engine.kv.reserve("o", 10)
        engine.add("r", 4, 4)
        engine.step(3)
        assert not engine.outputs["r"]
        engine.core.shutdown()

    def test_what_is_released_while_a_copy_runs_goes_back_afterwards(self, engine: Engine) -> None:
        assert engine.kv.reserve("m", 40)
        pull = engine.kv.pull("m", self.source(3), 0)
        while not engine.transport.num_pulls:
            pass
        engine.kv.release("m")
        engine.core.do_idle_work()
        assert engine.num_used_blocks == 3
        assert not engine.core.do_idle_work(), "nothing else writes to memory meanwhile"
        engine.transport.may_end.set()
        pull.result(WAIT)
        assert engine.core.do_idle_work()
        assert engine.num_used_blocks == 0

    def test_a_copy_waits_for_the_step_that_may_write_to_its_blocks_alone(self, engine: Engine) -> None:
        engine.transport.may_end.set()
        engine.runner.step_seconds = 0.4
        engine.add("r", 40, 30)
        engine.add("gone", 40, 30)
        engine.core.launch()
        assert engine.kv.reserve("m", 40)
        engine.kv.pull("m", self.source(3), 0).result(WAIT)
        step = engine.core.oldest_step
        assert step is not None
        assert not step.done(), "its blocks were free when the step was planned"
        engine.core.abort(["gone"])
        assert engine.kv.reserve("n", 40)
        engine.kv.pull("n", self.source(3), 0).result(WAIT)
        assert step.done(), "these may have been those of a request in the step"
        engine.core.collect()
        engine.core.abort(["r"])
        engine.kv.release("m")
        engine.kv.release("n")

    def test_a_lease_does_not_end_while_a_copy_runs(self, engine: Engine) -> None:
        assert engine.kv.reserve("m", 40, seconds=5)
        pull = engine.kv.pull("m", self.source(3), 0)
        while not engine.transport.num_pulls:
            pass
        engine.now += 10
        engine.core.do_idle_work()
        assert engine.num_used_blocks == 3
        engine.transport.may_end.set()
        pull.result(WAIT)
        engine.core.do_idle_work()
        assert engine.num_used_blocks == 0

    def test_more_is_copied_than_was_reserved(self, engine: Engine) -> None:
        engine.kv.reserve("m", 40)
        with pytest.raises(KVUnavailable, match=r"4.*'m'.*3"):
            engine.kv.pull("m", self.source(4), 0)
        with pytest.raises(KVUnavailable, match=r"4.*'n'.*0"):
            engine.kv.pull("n", self.source(4), 0)
        engine.kv.release("m")

    def test_adoption_needs_room_that_is_filled(self, engine: Engine) -> None:
        engine.add("r", 40, 30)
        engine.step(2)
        engine.kv.detach("r")
        (departure,) = engine.kv.take_departures()
        detached = departure.detached
        assert detached is not None
        moved = detached.moved(make_request("s", 40, 30))
        with pytest.raises(InvalidRequest, match=r"'m'.*0.*40"):
            engine.kv.adopt("m", moved, detached)
        engine.kv.reserve("m", 40)
        engine.kv.pull("m", self.source(3), 0)
        with pytest.raises(KVUnavailable, match="on its way"):
            engine.kv.adopt("m", moved, detached)
        engine.transport.may_end.set()
        engine.kv._transfers._pool.submit(int).result(WAIT)
        while engine.kv.is_pulling:
            pass
        engine.kv.adopt("m", moved, detached)
        engine.kv.free("r")
        engine.outputs["s"] = list(detached.output_token_ids)
        engine.step(40)
        assert len(engine.outputs["s"]) == 30
        assert engine.num_used_blocks == 0


def test_a_step_loop_that_computes_without_torch_does_not_load_it() -> None:
    code = "import sys, onbeat.engine.process; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
