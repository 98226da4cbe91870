"""From options to a fleet that can be started: who decides, who starts, and what each replica gets.

The CUDA devices of this machine, and which replica gets which.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from onbeat.cluster.client import FleetClient, Nursed
from onbeat.cluster.controller import FleetController
from onbeat.cluster.fleet_options import FleetOptions
from onbeat.cluster.launcher import Launcher, ReplicaNeeds
from onbeat.cluster.local_launcher import LocalLauncher, share_cores
from onbeat.cluster.roster import Roster
from onbeat.core.errors import ConfigError
from onbeat.core.fleet import ReplicaId, replica_number
from onbeat.core.kinds import ReplicaGroup, as_settings, kind_of
from onbeat.core.options import change
from onbeat.core.protocols import EngineInfo
from onbeat.engine.container import host_memory, usable_cores
from onbeat.engine.engine_config import EngineConfig, MemoryShare
from onbeat.engine.link import BuildEngine
from onbeat.engine.messages import WINDOW_TOKENS
from onbeat.perfmodel.device_spec import is_gpu
from onbeat.recording.fleet_log import fleet_record, plain
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.routers import make_router
from onbeat.scheduler.replica.token_budget import queue_seconds
from onbeat.scheduler.scheduler_config import DEFAULT_POLICY

if TYPE_CHECKING:
    from onbeat.engine.core import EngineCore


def visible_devices() -> list[str]:
    """Return the CUDA devices that this process may use, named as in `CUDA_VISIBLE_DEVICES`.

    The driver is asked for their number, so that no device is opened here.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(index) for index in range(_num_devices())]
    devices = []
    for device in named.split(","):
        if device.strip() in ("", "-1"):  # CUDA sees none from the first on that is not there
            break
        devices.append(device.strip())
    return devices


def share_devices(device: str, num_replicas: int) -> list[str]:
    """Share the CUDA devices of this machine out among replicas.

    Parameters
    ----------
    device : as in the engine's configuration; with `auto` replicas run on CUDA where there is any device.

    Returns
    -------
    devices : one a replica, and those of replicas that are added later; none where all run on the CPU, or on
        one device that was named.

    Raises
    ------
    ConfigError : there are fewer devices than the replicas need.
    """
    if device not in ("auto", "cuda") and not is_gpu(device):
        return []
    devices = visible_devices()
    if not devices:
        return []
    if len(devices) < num_replicas:
        raise ConfigError(
            f"{num_replicas} replicas need {num_replicas} CUDA devices, but there are {len(devices)}; give "
            f"--replicas {len(devices)}, --device cuda:0 to share that one, or --device cpu"
        )
    return devices


def _num_devices() -> int:
    try:
        driver = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if driver.nvmlInit_v2() or driver.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return 0
    driver.nvmlShutdown()
    return count.value


def engine_of(replica: ReplicaId, engine: EngineConfig, kinds: Sequence[ReplicaGroup]) -> EngineConfig:
    """Return the configuration of one replica: `r0` is of the first kind; added ones are like the last.

    Raises
    ------
    ConfigError : kinds name devices or degrees, but the engines do not stand in for devices; or an unknown
        policy.
    """
    if not kinds:
        return engine
    is_elsewhere = any(kind.device or kind.tensor_parallel_size for kind in kinds)
    if is_elsewhere and engine.load_format != "stand-in":
        raise ConfigError(
            "--kinds with a device or tp need --load-format stand-in; real engines may differ in "
            "their policies alone: start a server for each kind, with --replicas and "
            "--tensor-parallel-size"
        )
    kind = kind_of(replica_number(replica), kinds)
    return change(engine, **as_settings(kind, "device", "tensor_parallel_size", "policy"))


ROUTERS_OF_PREFIXES = ("prefix-affinity", "slo")
"""Those for which prompts are hashed."""

Build: TypeAlias = "Callable[[EngineConfig, Callable[[str], None]], tuple[EngineCore, EngineInfo]]"


def open_fleet(
    options: FleetOptions,
    engine: EngineConfig,
    build: Build,
    stack: ExitStack,
    *,
    on_progress: Callable[[str], None],
    nursed: Nursed = Nursed(),  # noqa: B008 -- it does not change
) -> FleetClient:
    """Return the client of a fleet that has not been started.

    Parameters
    ----------
    engine : of each replica, which gets its share of cores and memory.
    build : makes an engine in its process; can be pickled.
    stack : closes the record, if there is one.
    on_progress : called with one line of text at a time while engines start.
    nursed : what one before this process has left.

    Raises
    ------
    ConfigError : the record cannot be written, or there are fewer CUDA devices than the replicas need.
    MissingExtra : the launcher is not installed.
    """
    asked, policy = options.fleet, engine.limits.policy or DEFAULT_POLICY
    engine_of("r0", engine, asked.kinds)  # refuses kinds that the engines cannot be of
    launcher = _launcher(options, engine, nursed.roster)
    engine = share_machine(engine, options)
    router = asked.router_for(policy)
    on_decision = None
    is_many = asked.most_replicas > 1 or asked.autoscale is not None
    rules = asked.rules(max_wait_seconds=queue_seconds(policy, engine.limits.max_queue_seconds))
    num_replicas = asked.first_replicas
    if nursed.num_before and nursed.roster is not None:
        num_replicas = len(nursed.roster.places("r")) or num_replicas
        if engine.record is not None:
            engine = replace(engine, record=Path(f"{engine.record}.k{nursed.num_before}"))
    if engine.record is not None and is_many:
        about = {**asdict(options), **asdict(asked), "router": router, "fleet": plain(rules)}
        on_decision = stack.enter_context(fleet_record(engine.record, about))
    fleet = Fleet(make_router(router), rules, on_decision=on_decision)
    controller = FleetController(
        fleet,
        launcher,
        partial(_build_of, engine=engine, build=build, is_many=is_many, kinds=asked.kinds),
        start_timeout=options.start_timeout,
        on_progress=on_progress,
        moves_kv=options.kv_transport != "none",
    )
    return FleetClient(
        controller,
        num_replicas=num_replicas,
        lora_modules=engine.lora_modules,
        bounds=asked.autoscale,
        hashes_prompts=router in ROUTERS_OF_PREFIXES,
        nursed=nursed,
    )


def _launcher(options: FleetOptions, engine: EngineConfig, roster: Roster | None) -> Launcher:
    is_idle = _computes_nothing(engine)
    if options.launcher == "local":
        if is_idle:
            return LocalLauncher(roster=roster)
        num_replicas = options.fleet.most_replicas
        devices = share_devices(engine.device, num_replicas)
        return LocalLauncher(share_cores(num_replicas, engine.threads), devices, roster)
    from onbeat.cluster.ray_launcher import RayLauncher

    return RayLauncher(
        options.ray_address or "auto",
        ReplicaNeeds(
            device="cpu" if is_idle else engine.device,
            num_cpus=engine.threads or (1 if is_idle else None),
        ),
        port=options.fleet_port or 0,
        start_timeout=options.start_timeout,
    )


def share_machine(engine: EngineConfig, options: FleetOptions) -> EngineConfig:
    """Return the configuration of one engine: of several on this machine each has its share, once for all."""
    engine = replace(engine, reports_load=True, window_tokens=WINDOW_TOKENS)
    num_replicas = options.fleet.most_replicas
    if num_replicas == 1 or options.launcher != "local" or _computes_nothing(engine):
        return engine
    return replace(
        engine,
        threads=engine.threads or max(usable_cores() // num_replicas, 1),
        memory_share=engine.memory_share or MemoryShare(host_memory().num_bytes, num_replicas),
    )


def _computes_nothing(engine: EngineConfig) -> bool:
    """Return whether an engine stands in for a device: it needs no cores, and hardly any memory."""
    return engine.load_format == "stand-in"


def _build_of(
    replica: ReplicaId,
    life: int,
    *,
    engine: EngineConfig,
    build: Build,
    is_many: bool,
    kinds: tuple[ReplicaGroup, ...],
) -> BuildEngine:
    """Return what makes the engine of one life of a replica: it writes a record of its own."""
    engine = engine_of(replica, engine, kinds)
    record = engine.record
    if record is not None and (is_many or life):
        suffix = f".{replica}" + (f".{life}" if life else "")
        engine = replace(engine, record=record.with_name(record.name + suffix))
    return partial(build, engine)
