"""The client of a fleet: the `EngineClient` that the server gets, for one replica as for many.

Temporary directories that the next start removes where their process was killed.

A process that is killed removes nothing. So each directory has a file that its process holds locked, and the
system gives the lock back whenever and however that process ends. Unlike a process id in the file, a lock is
not fooled by ids that are used again, or that mean another process in another container.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import zmq

from onbeat.cluster.controller import FleetController
from onbeat.cluster.gate import Gate, GatePort
from onbeat.cluster.roster import Roster
from onbeat.core.errors import ConfigError, EngineDead, InvalidRequest
from onbeat.core.fleet import ReplicaId, ReplicaView, ScalingView
from onbeat.core.protocols import Delivery, EngineInfo, EnginePulse, StepObserver
from onbeat.core.request import Adapter, Request
from onbeat.scheduler.cluster.events import Arrived, RoutingRequest, ScaleAsked, ScalingAsked
from onbeat.scheduler.cluster.membership import ReplicaState
from onbeat.scheduler.cluster.scaling import ScaleBounds

PREFIX = "onbeat-"
_LOCK = "lock"


class OwnedFolder:
    """A new temporary directory, which only this user can read and which goes with `close`.

    Making one removes those of this user whose processes have ended without removing them.

    Attributes
    ----------
    path : the directory.
    secret : which processes know that have come from this one by a fork.
    """

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(32)
        remove_abandoned(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Locked before it has its name: another start that finds the file finds it locked.
        unnamed = self.path / f"{_LOCK}.new"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / _LOCK)

    def outlive_exec(self) -> None:
        """Let another program that takes the place of this process keep it: a start after that removes it."""
        os.set_inheritable(self._lock, True)  # noqa: FBT003 -- its only form

    def close(self) -> None:
        """Remove the directory with what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned(parent: Path) -> None:
    """Remove this user's directories whose process is gone.

    Parameters
    ----------
    parent : the directory for temporary files, to which others may write: nothing there is followed, and what
        is not a directory of ours with a lock stays.
    """
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            about = folder.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue  # it has no lock file, or is being removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            logger.debug("removed %s, which a process that was killed had left", folder)
        except BlockingIOError:
            pass  # its process lives
        finally:
            os.close(lock)


def check_length_of_socket_paths() -> None:
    """Raise ConfigError if sockets in the directory for temporary files would have too long a path."""
    parent = tempfile.gettempdir()
    length = len(os.fsencode(parent)) + len("/onbeat-abcdefgh/engine")
    if length > zmq.IPC_PATH_MAX_LEN:
        raise ConfigError(
            f"sockets in {parent}, the directory for temporary files, would have paths of {length} bytes; "
            f"the system takes {zmq.IPC_PATH_MAX_LEN}: set TMPDIR to a shorter path, such as /tmp"
        )


logger = logging.getLogger("onbeat.cluster")


LAST_WORDS_SECONDS = 0.5
"""What a keeper that is to end has to tell whoever asked for it."""
FIRST_REPORT_SECONDS = 30.0
"""A replica that is ready says how it stands at once."""


class Nursed(NamedTuple):
    """What a keeper has from its nurse; nothing where it has none."""

    num_before: int = 0
    """Keepers that have served, and were killed."""
    folder: OwnedFolder | None = None
    roster: Roster | None = None

    @property
    def machine(self) -> str:
        """A name that all keepers here have, and no other machine."""
        assert self.folder is not None
        return f"{socket.gethostname()}.{self.folder.path.name.removeprefix(PREFIX)}"

    @property
    def mark(self) -> Path:
        """The file that says that this one serves."""
        assert self.folder is not None
        return self.folder.path / f"serves.{self.num_before}"


class FleetClient:
    """Starts replicas and hands each request's deliveries to its stream, wherever they come from.

    Parameters
    ----------
    controller : has been told nothing yet, and is told nothing by others; closed with this.
    num_replicas : to start with.
    lora_modules : name and folder of each LoRA adapter to start with.
    bounds : of a fleet that decides on their number itself, once it has started; None leaves it as it is.
    hashes_prompts : whether the router looks at shared prefixes of prompts.
    nursed : what another process has made for this one. Where a keeper has served before, its replicas run,
        and one that is ready is enough.

    Attributes
    ----------
    streams : of the requests that have not ended.
    counts : what the fleet does with requests, for metrics.
    """

    def __init__(
        self,
        controller: FleetController,
        *,
        num_replicas: int = 1,
        lora_modules: Sequence[tuple[str, str]] = (),
        bounds: ScaleBounds | None = None,
        hashes_prompts: bool = False,
        nursed: Nursed = Nursed(),  # noqa: B008 -- it does not change
    ) -> None:
        self.controller, self._fleet = controller, controller.fleet
        self._num_replicas = num_replicas
        self._lora_modules = lora_modules
        self._bounds = bounds
        self._hashes_prompts = hashes_prompts
        self.streams = controller.streams
        self.gate = Gate(self)
        controller.on_heard = self.gate.hear
        self.counts = self.streams.counts
        self._info: EngineInfo | None = None
        self._folder, self._takes_over = nursed.folder, nursed.num_before > 0
        self._is_nursed = nursed.folder is not None

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDead("no replica has been started")
        return self._info

    @property
    def folder(self) -> Path:
        """For sockets of this fleet, once it is started; nobody but this user can enter it."""
        assert self._folder is not None
        return self._folder.path

    @property
    def is_alive(self) -> bool:
        return self._fleet.count(ReplicaState.DRAINING) > 0 or self.is_ready

    @property
    def pulse(self) -> EnginePulse:
        """That of the replica which was heard of last; from another one's hang requests suffer alone."""
        lives = [life for life in self.controller.lives.values() if life.info is not None]
        if not lives and self.is_alive:
            return EnginePulse(time.monotonic())  # nobody is there who could hang
        return max(
            (life.present_pulse for life in lives), key=lambda pulse: pulse.time, default=EnginePulse(0.0)
        )

    def add_observer(self, observer: StepObserver) -> None:
        """Let one more object see the step messages from now on."""
        self.streams.observers.append(observer)
        self.gate.observers.append(observer)

    async def start(self) -> None:
        """Start the replicas and wait until all are ready; entering the client does it if it is not done.

        Raises
        ------
        ConfigError : the engine cannot be built as configured, there is no room for as many replicas, or the
            path of temporary files is too long.
        EngineDead : a process ended or failed.
        """
        check_length_of_socket_paths()
        self._folder = self._folder or OwnedFolder()
        self.controller.kv_key = self._folder.secret
        controller = self.controller
        try:
            await controller.open(self._folder.path)
            # One before the others: what is wrong with all is said once, and soon.
            for number in sorted({1, self._num_replicas})[-1 if self._takes_over else 0 :]:
                self.controller.check_capacity(number)
                controller.tell(ScaleAsked(number))
                await self._wait_until_ready(1 if self._takes_over else number)
            self._info = next(life.info for life in controller.lives.values() if life.info is not None)
            await self._load_first_adapters()
            if self._bounds is not None:
                self.controller.check_capacity(self._bounds.most)
                await self._check_costs()
                controller.tell(ScalingAsked(self._bounds.least, self._bounds.most))
        except BaseException:
            await self._stop()
            raise
        controller.is_open = True

    async def _wait_until_ready(self, num_replicas: int) -> None:
        while self._fleet.count(ReplicaState.READY) < num_replicas:
            self.controller.changed.clear()
            may_get_ready = self._takes_over and self.controller.lives
            if (error := self.controller.processes.first_error) is not None and not may_get_ready:
                raise error
            await self.controller.changed.wait()

    async def _load_first_adapters(self) -> None:
        for name, path in self._lora_modules:
            try:
                await self.load_adapter(name, path)
            except InvalidRequest as error:
                raise ConfigError(str(error)) from error

    async def _check_costs(self) -> None:
        """Raise ConfigError where the fleet scales by predicted steps, and its replicas predict none."""
        if not self._fleet.scales_by_costs:
            return
        lives = self.controller.lives
        end = time.monotonic() + FIRST_REPORT_SECONDS
        while not (loads := [each.load for each in lives.values() if each.load]):
            if time.monotonic() > end:
                raise EngineDead(f"no replica has said within {FIRST_REPORT_SECONDS:.0f} s how it stands")
            await asyncio.sleep(0.01)
        if loads[0].costs is None:
            raise ConfigError(
                "--autoscale needs predicted step times, and nothing predicts them here: give "
                "--policy slo or a --step-time-profile"
            )

    async def __aenter__(self) -> FleetClient:
        if self._info is None:
            await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stop()

    async def _stop(self) -> None:
        await self.controller.close()
        if self._folder is not None:
            self._folder.close()

    # --- the fleet as the server sees it (its `FleetView`) ------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return self._fleet.num_waiting

    @property
    def is_ready(self) -> bool:
        return self._fleet.count(ReplicaState.READY) > 0 or self._comes_back

    @property
    def _comes_back(self) -> bool:
        """Whether it has no replica only while nobody asks: the next request starts one."""
        scaling = self.scaling
        if scaling is None or scaling.least:
            return False
        return scaling.most > self._fleet.count(ReplicaState.DOWN)

    @property
    def scaling(self) -> ScalingView | None:
        return self._fleet.scaling

    @property
    def seconds_to_ready(self) -> float | None:
        if not self._fleet.count(ReplicaState.STARTING):
            return None
        return self.controller.processes.seconds_to_ready

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self.controller.adapters.by_name

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> None:
        await self.controller.adapters.load(name, path, most=self.info.max_loras, in_place=in_place)

    async def unload_adapter(self, name: str) -> None:
        del self.controller.adapters.by_name[name]

    def replicas(self) -> Sequence[ReplicaView]:
        now = time.monotonic()
        stopped = ReplicaState.STOPPED
        return [self._view(each, now) for each in self._fleet.replicas() if each.state != stopped]

    def _view(self, view: ReplicaView, now: float) -> ReplicaView:
        """Return how a replica stands, with what is known of its process."""
        role, life = self._fleet.role(view.replica), self.controller.lives.get(view.replica)
        if life is None:
            return replace(view, role=role)
        view = replace(view, role=role, silence=now - life.heard, load=life.load)
        place = life.place
        return view if place is None else replace(view, process_id=place.process_id, host=place.host)

    async def drain(self, replica: ReplicaId, *, seconds: float, restarts: bool) -> None:
        known = [each.replica for each in self.replicas()]
        if replica not in known:
            raise InvalidRequest(
                f"there is no replica {replica[:40]!r}; there are {', '.join(known) or 'none'}",
                param="replica",
            )
        serving = [each for each in known if self._serves(each)]
        if serving == [replica] and not (restarts or self._comes_back):
            raise InvalidRequest(
                f"{replica} is the last replica; without it the server answers nobody. Start another one "
                "before (POST /fleet/scale), send restart, or end the server itself with SIGTERM",
                param="replica",
                code="last_replica",
            )
        self.controller.drain(replica, seconds=seconds, restarts=restarts)

    def _serves(self, replica: ReplicaId) -> bool:
        """Return whether a replica takes requests, or is about to."""
        return self._fleet.state(replica) is ReplicaState.READY or self._fleet.is_coming(replica)

    async def scale(self, num_replicas: int) -> None:
        try:
            self.controller.check_capacity(num_replicas)
        except ConfigError as error:
            raise InvalidRequest(str(error), param="replicas") from error
        self.controller.ask(ScaleAsked(num_replicas))

    async def autoscale(self, least: int, most: int) -> None:
        try:
            bounds = ScaleBounds(least, most)
            self.controller.check_capacity(most)
            self.controller.ask(ScalingAsked(bounds.least, bounds.most))
        except ConfigError as error:
            raise InvalidRequest(str(error), param="min") from error

    async def restart(self, *, keeper: bool = False) -> None:
        if not keeper:
            self.controller.restart()
        elif self._is_nursed:  # whoever asked hears before that it is done
            asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, os.kill, os.getpid(), signal.SIGKILL)
        else:
            raise InvalidRequest(
                "the keeper is in the process of the only front end; start with --front-ends 2 or more",
                param="keeper",
            )

    def expect_end(self) -> None:
        self.controller.is_ending = True

    # --- requests -------------------------------------------------------------------------------------

    def generate(self, request: Request) -> AsyncGenerator[Delivery, None]:
        return self.gate.generate(request)

    # --- what gates ask for (their `Keeper`) --------------------------------------------------------------

    @property
    def hashed_block_size(self) -> int:
        # with one replica there is nothing to choose
        return self.info.limits.block_size if self._hashes_prompts and len(self.controller.lives) > 1 else 0

    def ask(self, request: Request, block_hashes: Sequence[bytes], gate: GatePort | None = None) -> None:
        """Have a request served for a gate, by default this process's own."""
        gate = gate or self.gate
        routed = RoutingRequest.of(request, block_hashes)
        if request.whole is not None:
            share = request.whole.share(self._fleet.count(ReplicaState.READY))
            request = replace(request, whole=share)
        try:
            self.streams.begin(request, gate)
        except InvalidRequest as error:
            gate.refuse(request.request_id, error)
            return
        self.controller.tell(Arrived(routed))

    def abort(self, request_id: str) -> None:
        self.streams.abort(request_id)

    def fetched(self, num_tokens: Mapping[str, int]) -> None:
        for replica, fetched in self.streams.by_replica(num_tokens).items():
            self.controller.send(replica, fetched)
