"""Engines between which streams are moved while they run, stage by stage, as a controller would do it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from onbeat.core.request import FinishReason, Request
from onbeat.engine.core import EngineCore
from onbeat.engine.executor import ThreadExecutor
from onbeat.engine.guided_draw import Guides
from onbeat.engine.kv_access import BlockMemory, GivesKV, KVLayout, KVSource, region_bytes
from onbeat.engine.kv_handover import KVHandover
from onbeat.engine.kv_transfer import TcpTransport
from onbeat.engine.loaded_model import states_of
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.native.library import NativeLibrary
from onbeat.engine.sampler import Sampler
from onbeat.engine.speculation.proposer import Proposer
from onbeat.scheduler.replica.move_agent import Departure
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.text.tokenizer import load_tokenizer
from tests.cpu.core.kv_engines import KEY
from tests.cpu.engine.forwards import MakeForward, on_native, on_torch
from tests.cpu.engine.tiny_models import StateCheckpoint, hf_tiny_model, tiny_model
from tests.cpu.speculation.runs import LIMITS, make_request
from tests.fake_step_time import LinearStepTime

WAIT = 60.0
"""Seconds, for what takes a step or a copy."""
MOST_STEPS = 4
"""That are taken during a copy: it makes a connection, in a second or more of a busy machine, in which short
streams would all end."""


def exact(name: str = "llama3") -> MakeForward:
    return on_torch(tiny_model(name, torch.float64).weights)


@functools.cache
def invariant(library: NativeLibrary, name: str = "llama3") -> MakeForward:
    """Return a native engine whose numbers do not depend on what else is in a step."""
    checkpoint = StateCheckpoint(hf_tiny_model(name, torch.float64))
    return on_native(library, checkpoint, dtype=torch.bfloat16, batch_invariant=True)


def requests_of_text(gguf: Path, count: int, **sampling: Any) -> list[Request]:
    """Return requests for a real model: the odd ones are sampled, and half shun what they said."""
    token_ids = load_tokenizer(gguf).encode((Path(__file__).parents[3] / "LICENSE").read_text())
    return [
        make_request(
            f"r{index}",
            token_ids[40 * index : 55 * index + 20],
            24,
            seed=index,
            temperature=float(index % 2),
            repetition_penalty=1.1 if index < count / 2 else 1.0,
            **sampling,
        )
        for index in range(count)
    ]


def make_core(
    make_forward: MakeForward,
    *,
    overlapped: bool = False,
    make_proposer: Callable[[], Proposer] | None = None,
    recorder: Any = None,
    model: str = "tiny",
    guides: Guides | None = None,
    **limits: Any,
) -> EngineCore:
    """Build an engine whose KV can be handed over."""
    config = SchedulerConfig(**{**LIMITS, **limits})
    more: dict[str, Any] = {"num_tables": config.num_tables} if config.num_tables > 1 else {}
    forward = make_forward(num_blocks=config.num_pages, block_size=config.block_size, **more)
    assert isinstance(forward, GivesKV)
    sampler = Sampler(forward.config.vocab_size)
    runner = ModelRunner(config, forward, sampler, make_proposer and make_proposer())
    runner.guides = guides
    states = states_of(runner)
    layout = KVLayout(
        model=model,
        weights="plain",
        dtype="any",
        block_size=config.block_size,
        block_bytes=region_bytes(forward.kv_regions()),
        state_bytes=region_bytes(states.regions) if states else 0,
        backend=forward.settings["backend"],
    )
    memory = BlockMemory(forward, layout, num_blocks=config.num_pages, states=states)
    ticks = itertools.count()
    core = EngineCore(
        Scheduler(config, LinearStepTime()),
        ThreadExecutor(runner, on_shutdown=forward.close),
        max_in_flight_steps=2 if overlapped else 1,
        clock=lambda: next(ticks) * 1e-3,
        recorder=recorder,
        kv_memory=lambda: memory,
    )
    core.open_kv(TcpTransport(KEY))
    return core


@dataclass
class Streams:
    """What clients have been sent, and how their streams ended."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, FinishReason] = field(default_factory=dict)
    num_bytes: int = 0
    num_moves: int = 0
    num_in_prompt: int = 0
    """Moves of requests whose prompt was still being computed."""

    def take(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            assert output.error is None, output.error
            assert output.request_id not in self.ends, "a delivery after the last"
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason


class Pair:
    """Two engines, stepped in turn, and the streams that run in them."""

    def __init__(self, cores: Sequence[EngineCore], *, most_steps: int = MOST_STEPS) -> None:
        self.cores, self.most_steps = cores, most_steps
        self.streams = Streams()
        self.requests: dict[str, Request] = {}
        self.at: dict[str, int] = {}
        self.departures: dict[str, Departure[KVSource]] = {}

    def add(self, request: Request, where: int) -> None:
        self.requests[request.request_id], self.at[request.request_id] = request, where
        self.streams.tokens[request.request_id] = []
        self.cores[where].add(request)

    def step(self) -> bool:
        """Step both engines; False once neither has work."""
        for core in self.cores:
            if not core.has_work:
                continue
            message = core.step()
            if message is not None:
                self.streams.take(message.outputs)
            for departure in kv_of(core).take_departures():
                self.departures[departure.request_id] = departure
        return any(core.has_work for core in self.cores)

    def wait(self, future: Future[int]) -> int:
        """Step on while a copy runs, as engines do, but not to the streams' ends."""
        for _ in range(self.most_steps):
            if future.done():
                break
            self.step()
        num_bytes = future.result(WAIT)
        self.streams.num_bytes += num_bytes
        return num_bytes

    def move(self, request_id: str) -> bool:
        """Move a stream to the other engine in two stages; False where it has ended, or could not go."""
        request = self.requests[request_id]
        source, destination = (
            kv_of(self.cores[index]) for index in (self.at[request_id], 1 - self.at[request_id])
        )
        num_tokens = len(request.prompt_token_ids) + len(self.streams.tokens[request_id])
        if request_id in self.streams.ends or not destination.reserve(request_id, num_tokens + 16):
            return False
        held = source.hold(request_id)
        num_copied = 0
        if held is not None:
            self.wait(destination.pull(request_id, source.summed(held).result(WAIT), 0))
            num_copied = len(held.block_ids)
        source.detach(request_id)
        while request_id not in self.departures:
            for departure in source.take_departures():
                self.departures[departure.request_id] = departure
            if request_id not in self.departures:
                self.step()
        departure = self.departures.pop(request_id)
        if departure.detached is None:
            destination.release(request_id)
            source.unhold(request_id)
            return False
        detached, rest = departure.detached, departure.source
        assert rest is not None
        assert list(detached.output_token_ids) == self.streams.tokens[request_id]
        num_tokens = len(request.prompt_token_ids) + len(detached.output_token_ids)
        if not destination.reserve(request_id, num_tokens):
            destination.release(request_id)
            assert source.reattach(request_id)
            return False
        self.wait(destination.pull(request_id, source.summed(rest).result(WAIT), num_copied))
        destination.adopt(request_id, detached.moved(request), detached)
        source.free(request_id)
        self.at[request_id] = 1 - self.at[request_id]
        self.streams.num_moves += 1
        self.streams.num_in_prompt += 0 < detached.num_kv_tokens < len(request.prompt_token_ids)
        return True

    def run(self, random: Random, *, share: float) -> Streams:
        """Run all streams to their ends; after each step each is moved with this probability."""
        while self.step():
            for request_id in list(self.requests):
                if request_id not in self.streams.ends and random.random() < share:
                    self.move(request_id)
        return self.streams

    def close(self) -> None:
        for core in self.cores:
            core.scheduler.check_invariants()
            for request_id in self.requests:
                kv_of(core).unhold(request_id)
            assert core.scheduler.kv.pool.num_used_blocks == 0, "blocks leaked"
            assert core.scheduler.kv.snapshots.num_taken == 0, "places of states leaked"
            core.shutdown()


def kv_of(core: EngineCore) -> KVHandover:
    assert core.kv is not None
    return core.kv


def undisturbed(core: EngineCore, batches: Sequence[Sequence[Request]]) -> Streams:
    """Run requests in one engine, batch after batch."""
    streams = Streams()
    for requests in batches:
        for request in requests:
            streams.tokens[request.request_id] = []
            core.add(request)
        while core.has_work:
            message = core.step()
            if message is not None:
                streams.take(message.outputs)
    core.shutdown()
    return streams
