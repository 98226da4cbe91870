"""Fleets of engines without a model: the token at position p is p % 97, so it shows where it belongs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from onbeat.cluster.client import FleetClient
from onbeat.cluster.controller import FleetController
from onbeat.cluster.launcher import Launcher, ReplicaPlace, ReplicaSpec
from onbeat.core.fleet import ReplicaId
from onbeat.core.request import Request, SamplingParams
from onbeat.engine.link import BuildEngine, CurveKeys
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.membership import FleetRules
from onbeat.scheduler.cluster.routers import make_router
from onbeat.scheduler.cluster.scaling import ScaleBounds
from tests.fake_runner import build_fake_engine
from tests.forking import QuickLauncher
from tests.waiting import at_most

make_launcher: Callable[[], Launcher] = QuickLauncher
"""Of fleets for which a test names none."""


class RemoteLauncher(QuickLauncher):
    """Starts processes that connect as those of other machines do: by tcp, encrypted."""

    async def open(self, folder: Path) -> str:
        return "tcp://127.0.0.1:*"

    async def start(self, spec: ReplicaSpec) -> ReplicaPlace:
        public, secret = zmq.curve_keypair()
        spec.admits(public)
        keys = CurveKeys(public, secret, server=spec.fleet_key)
        return await super().start(replace(spec, link=replace(spec.link, keys=keys)))


def fleet_of(
    num_replicas: int,
    *,
    router: str = "least-outstanding",
    make_build: Callable[[ReplicaId, int], BuildEngine] | None = None,
    step_seconds: float = 0.005,
    launcher: Launcher | None = None,
    moves_kv: bool = True,
    num_prefill: int = 0,
    pool_rule: str = "adaptive",
    move_rule: str = "mend",
    autoscale: str = "",
    max_wait_seconds: float | None = None,
    bounds: ScaleBounds | None = None,
    hashes_prompts: bool = False,
    lora_modules: Sequence[tuple[str, str]] = (),
    **options: Any,
) -> FleetClient:
    """Return the client of a fleet that has not been started; options are those of `build_fake_engine`."""
    build = partial(build_fake_engine, step_seconds=step_seconds, **options)
    rules = FleetRules(
        num_prefill=num_prefill,
        pool_rule=pool_rule,
        move_rule=move_rule,
        autoscale=autoscale,
        max_wait_seconds=max_wait_seconds,
    )
    controller = FleetController(
        Fleet(make_router(router), rules),
        launcher or make_launcher(),
        make_build or (lambda _replica, _life: build),
        moves_kv=moves_kv,
    )
    return FleetClient(
        controller,
        num_replicas=num_replicas,
        lora_modules=lora_modules,
        bounds=bounds,
        hashes_prompts=hashes_prompts,
    )


def make_request(name: str, *, num_prompt: int = 5, max_tokens: int = 50, **fields: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(range(num_prompt)),
        sampling=SamplingParams(max_tokens=max_tokens),
        arrival=time.monotonic(),
        **fields,
    )


def expected_tokens(request: Request) -> list[int]:
    start = len(request.prompt_token_ids)
    return [(start + k) % 97 for k in range(request.sampling.max_tokens)]


async def collect(client: FleetClient, request: Request) -> list[int]:
    """Return the tokens of a request, as they come."""
    tokens: list[int] = []
    async for delivery in client.generate(request):
        tokens += delivery.output.new_token_ids
    return tokens


def start_requests(
    client: FleetClient, count: int, prefix: str = "q", *, num_prompt: int = 5, **fields: Any
) -> list[tuple[Request, asyncio.Task[list[int]]]]:
    requests = [make_request(f"{prefix}{i}", num_prompt=num_prompt + i, **fields) for i in range(count)]
    return [(request, asyncio.create_task(collect(client, request))) for request in requests]


async def check_all(started: list[tuple[Request, asyncio.Task[list[int]]]], timeout: float = 30) -> None:
    """Check that each stream had all of its tokens, once and in order."""
    async with at_most(timeout):
        for request, task in started:
            assert await task == expected_tokens(request), request.request_id


def pid_of(client: FleetClient, replica: ReplicaId) -> int:
    return next(view.process_id for view in client.replicas() if view.replica == replica) or 0


def send_signal(client: FleetClient, replica: ReplicaId, number: signal.Signals) -> int:
    """Signal the process of a replica; return its id."""
    process_id = pid_of(client, replica)
    os.kill(process_id, number)
    return process_id


def state_of(client: FleetClient, replica: ReplicaId) -> str:
    return next((view.state for view in client.replicas() if view.replica == replica), "stopped")


def lives_of(client: FleetClient, replica: ReplicaId) -> int:
    return next((view.num_lives for view in client.replicas() if view.replica == replica), 0)


def is_ready(client: FleetClient, replica: ReplicaId) -> bool:
    return state_of(client, replica) == "ready"


def has_lives(client: FleetClient, replica: ReplicaId, count: int) -> bool:
    return lives_of(client, replica) == count


def is_there(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True
