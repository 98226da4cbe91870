"""A refusal and what it came through are gone at once: a busy server looks for garbage every ten minutes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from onbeat.cluster.gate import Gate, GatePort
from onbeat.core.errors import InvalidRequest, OnbeatError, Overloaded, SLOUnattainable
from onbeat.core.protocols import EngineClient
from onbeat.core.request import Request
from onbeat.core.slo import SLO, ShedMode
from onbeat.metrics.tracker import RequestTracker
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.server.choices import Choice, TextOptions
from onbeat.server.errors import ApiError
from onbeat.server.fair_threads import FairThreads
from onbeat.server.generation import Generator
from tests.cpu.core.shedding import shedding_core
from tests.fakes_engine import ByteTokenizer
from tests.fleet.fleets import fleet_of
from tests.fleet.test_gates import two_gates
from tests.pure.scheduler.test_queue_bound import flood, make_driver
from tests.pure.scheduler.timed import make_request


def num_errors() -> int:
    return sum(issubclass(type(each), OnbeatError) for each in gc.get_objects())


@contextmanager
def no_error_left() -> Iterator[None]:
    """Check that the block leaves no error that only a look for garbage would find."""
    gc.collect()
    before = num_errors()
    gc.disable()
    try:
        yield
        assert num_errors() == before
    finally:
        gc.enable()


class RefusingKeeper:
    """Refuses all that it is asked for."""

    hashed_block_size = 0
    gate: GatePort

    def ask(self, request: Request, _block_hashes: Any) -> None:
        error = SLOUnattainable("late", predicted_ttft=1.0)
        asyncio.get_running_loop().call_soon(self.gate.refuse, request.request_id, error)

    def abort(self, request_id: str) -> None:
        """Hear that an answer's other choices are not wanted."""


def refused_request(name: str) -> Request:
    slo = SLO(ttft=0.01)
    return Request(request_id=name, prompt_token_ids=(1, 2), slo=slo, shed=ShedMode.REJECT)


@pytest.mark.parametrize("num_choices", [1, 4])
async def test_of_an_answer(num_choices: int) -> None:
    keeper = RefusingKeeper()
    keeper.gate = gate = Gate(cast(Any, keeper))
    generator = Generator(cast(EngineClient, gate), ByteTokenizer(), RequestTracker())

    async def ask(number: int) -> str:
        choices = [
            Choice(
                index=index, prompt_index=0, request=refused_request(f"{number}-{index}"), is_streamed=True
            )
            for index in range(num_choices)
        ]
        try:
            async for _ in generator.run(choices, TextOptions()):
                pass
        except ApiError as error:
            return str(error.code)
        return "none"

    with no_error_left():
        for number in range(3):
            assert await ask(number) == "slo_unattainable"
            await asyncio.sleep(0)


async def test_of_a_wish_to_the_keeper() -> None:
    async with fleet_of(1) as client, two_gates(client) as ((gate, _), _, _):
        with no_error_left():
            for _ in range(3):
                try:
                    await gate.drain("r9", seconds=1.0, restarts=False)
                except OnbeatError as error:
                    assert "r9" in str(error)  # noqa: PT017 -- pytest.raises would keep it
                await asyncio.sleep(0)


def test_of_an_engine() -> None:
    config = SchedulerConfig(
        policy="sarathi", num_blocks=64, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64
    )
    core = shedding_core(config)

    def ask(number: int) -> bool:
        try:
            core.add(refused_request(str(number)))
        except SLOUnattainable:
            return True
        return False

    try:
        with no_error_left():
            assert all(ask(number) for number in range(3))
    finally:
        core.shutdown()


def test_of_a_queue_that_is_full() -> None:
    driver = make_driver(0.1)
    while not flood(driver, 2):
        driver.step()

    def ask(number: int) -> bool:
        try:
            driver.scheduler.add(make_request(str(number), 1000, 2, arrival=driver.now), driver.now)
        except Overloaded:
            return True
        return False

    with no_error_left():
        assert all(ask(number) for number in range(3))


async def test_of_a_prompt() -> None:
    threads = FairThreads("test", num_threads=1)

    def refuse() -> None:
        raise InvalidRequest("too long")

    async def ask() -> bool:
        try:
            await threads.run("a", 1, refuse)
        except InvalidRequest:
            return True
        return False

    try:
        with no_error_left():
            assert all([await ask() for _ in range(3)])
            await asyncio.sleep(0.1)  # a thread lets go of its last work
    finally:
        threads.close()
