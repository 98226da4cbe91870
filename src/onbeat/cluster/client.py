"""The client of a fleet: the `EngineClient` that the server gets, for one replica as for many."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from types import TracebackType

from onbeat.cluster.config import TRANSPORTS
from onbeat.cluster.controller import FleetController
from onbeat.cluster.launcher import Launcher
from onbeat.cluster.life import Life
from onbeat.cluster.open_request import HandOut, OpenRequest, Origin, OutOfPlace
from onbeat.cluster.processes import START_TIMEOUT_SECONDS, MakeBuild
from onbeat.cluster.prompt_hashes import prompt_hashes
from onbeat.cluster.refusals import LOSSES, refusal
from onbeat.core.errors import (
    ConfigError,
    EngineDead,
    EngineError,
    InvalidRequest,
    OnbeatError,
    Overloaded,
    SLOUnattainable,
)
from onbeat.core.fleet import ReplicaId, ReplicaLoad, ReplicaView, ScalingView
from onbeat.core.protocols import Delivery, EngineInfo, EnginePulse, StepObserver
from onbeat.core.request import FinishReason, Request, RequestOutput
from onbeat.core.step import StepOutputs
from onbeat.engine.messages import AbortRequests
from onbeat.engine.owned_folder import OwnedFolder, check_length_of_socket_paths
from onbeat.engine.rejection import Rejected, unpack_rejection
from onbeat.metrics.fleet_counts import FleetCounts
from onbeat.scheduler.cluster.events import (
    Aborted,
    Arrived,
    Delivered,
    Refuse,
    Refused,
    Rescale,
    ScaleAsked,
    ScalingAsked,
    Send,
)
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.membership import FleetStatus, ReplicaState, ReplicaStatus
from onbeat.scheduler.cluster.routing import RoutingRequest
from onbeat.scheduler.cluster.scaling import ScaleBounds

logger = logging.getLogger("onbeat.cluster")


FIRST_REPORT_SECONDS = 30.0
"""A replica that is ready says how it stands at once."""


class FleetClient:
    """Starts replicas and hands each request's deliveries to its stream, wherever they come from.

    Parameters
    ----------
    fleet : decides; nobody else may tell it anything.
    launcher : starts the processes; closed with this.
    make_build : makes the engines inside them.
    num_replicas : to start with.
    bounds : of a fleet that decides on their number itself, once it has started; None leaves it as it is.
    hashes_prompts : whether the router looks at shared prefixes of prompts.
    observers : see every step message before the streams do.
    on_progress : called with one line of text at a time while engines start.
    start_timeout : seconds after which a replica that gets no place, or says nothing, while it starts is
        given up.
    kv_transports : by which replicas copy KV from one another, the best first; without any no stream moves.

    Attributes
    ----------
    counts : what the fleet does with requests, for metrics.
    """

    def __init__(  # noqa: PLR0913 -- who decides, who starts, and who hears of it
        self,
        fleet: Fleet,
        launcher: Launcher,
        make_build: MakeBuild,
        *,
        num_replicas: int = 1,
        bounds: ScaleBounds | None = None,
        hashes_prompts: bool = False,
        observers: Sequence[StepObserver] = (),
        on_progress: Callable[[str], None] = lambda _: None,
        start_timeout: float = START_TIMEOUT_SECONDS,
        kv_transports: Sequence[str] = TRANSPORTS["auto"],
    ) -> None:
        self._fleet = fleet
        self._num_replicas = num_replicas
        self._bounds = bounds
        self._hashes_prompts = hashes_prompts
        self._observers = list(observers)
        self._open: dict[str, OpenRequest] = {}
        self._hand_out = HandOut()
        self._by_name: dict[str, OpenRequest] = {}
        """Requests by the names under which replicas have them."""
        self.counts = FleetCounts()
        self._info: EngineInfo | None = None
        self._folder: OwnedFolder | None = None
        self.controller = FleetController(
            fleet,
            launcher,
            make_build,
            requests=self._open,
            listener=self,
            on_progress=on_progress,
            start_timeout=start_timeout,
            kv_transports=kv_transports,
        )

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDead("no replica has been started")
        return self._info

    @property
    def is_alive(self) -> bool:
        states = (ReplicaState.READY, ReplicaState.DRAINING)
        status = self._fleet.status()
        return any(status.count(state) for state in states) or _comes_back(status)

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
        self._observers.append(observer)

    async def start(self) -> None:
        """Start the replicas and wait until all are ready; entering the client does it if it is not done.

        Raises
        ------
        ConfigError : the engine cannot be built as configured, there is no room for as many replicas, or the
            path of temporary files is too long.
        EngineDead : a process ended or failed.
        """
        check_length_of_socket_paths()
        self._folder = OwnedFolder()
        controller = self.controller
        try:
            await controller.open(self._folder.path)
            # One before the others: what is wrong with all is said once, and soon.
            for number in sorted({1, self._num_replicas}):
                self.controller.check_room(number)
                controller.tell(ScaleAsked(number))
                await self._wait_until_ready(number)
            if self._bounds is not None:
                self.controller.check_room(self._bounds.most)
                await self._check_costs()
                controller.tell(ScalingAsked(self._bounds.least, self._bounds.most))
        except BaseException:
            await self._stop()
            raise
        controller.is_open = True
        self._info = next(life.info for life in controller.lives.values() if life.info is not None)

    async def _wait_until_ready(self, num_replicas: int) -> None:
        while self._fleet.status().count(ReplicaState.READY) < num_replicas:
            self.controller.changed.clear()
            self.controller.processes.raise_start_error()
            await self.controller.changed.wait()

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
                "autoscaling to the objective goes by predicted step times, and nothing predicts them here: "
                "serve with --policy slo or a --step-time-profile, or with --autoscale-policy freeness"
            )

    async def __aenter__(self) -> FleetClient:
        if self._info is None:
            await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stop()

    async def _stop(self) -> None:
        await self.controller.close()
        if self._folder is not None:
            self._folder.close()

    # --- the fleet as the server sees it (its `FleetView`) ------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return self._fleet.status().num_waiting

    @property
    def is_ready(self) -> bool:
        status = self._fleet.status()
        return status.count(ReplicaState.READY) > 0 or _comes_back(status)

    @property
    def scaling(self) -> ScalingView | None:
        return self._fleet.status().scaling

    @property
    def seconds_to_ready(self) -> float | None:
        if not self._fleet.status().count(ReplicaState.STARTING):
            return None
        return self.controller.processes.seconds_to_ready

    def replicas(self) -> Sequence[ReplicaView]:
        now = time.monotonic()
        stopped = ReplicaState.STOPPED
        return [self._view(each, now) for each in self._fleet.status().replicas if each.state is not stopped]

    def _view(self, status: ReplicaStatus, now: float) -> ReplicaView:
        life = self.controller.lives.get(status.replica)
        place = None if life is None else life.place
        return ReplicaView(
            replica=status.replica,
            state=status.state.value,
            why=status.why,
            role=self._fleet.role(status.replica),
            num_lives=status.num_lives,
            num_outstanding=status.num_outstanding,
            num_streaming=status.num_started,
            process_id=None if place is None else place.process_id,
            host="" if place is None else place.host,
            silence=None if life is None else now - life.heard,
            limits=status.limits,
            load=None if life is None else life.load,
        )

    def drain(self, replica: ReplicaId, *, seconds: float, restarts: bool) -> None:
        known = [each.replica for each in self.replicas()]
        if replica not in known:
            raise InvalidRequest(
                f"there is no replica {replica[:40]!r}; there are {', '.join(known) or 'none'}",
                param="replica",
                code="invalid_value",
            )
        self.controller.drain(replica, seconds=seconds, restarts=restarts)

    def scale(self, num_replicas: int) -> None:
        try:
            self.controller.check_room(num_replicas)
        except ConfigError as error:
            raise InvalidRequest(str(error), param="replicas", code="invalid_value") from error
        self.controller.scale(num_replicas)

    def autoscale(self, least: int, most: int) -> None:
        scaling = self.scaling
        if scaling is None:
            raise InvalidRequest(
                "this fleet does not decide on its size; give replicas, or start it with --autoscale",
                param="min",
                code="invalid_value",
            )
        try:
            bounds = ScaleBounds(least, most)
            self.controller.check_room(most)
        except ConfigError as error:
            raise InvalidRequest(str(error), param="min", code="invalid_value") from error
        self.controller.autoscale(bounds.least, bounds.most)

    def restart(self) -> None:
        self.controller.restart()

    def expect_end(self) -> None:
        self.controller.is_ending = True

    # --- requests -------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> AsyncGenerator[Delivery, None]:
        request_id = request.request_id
        routed = await self._describe(request)
        if request_id in self._open:
            raise InvalidRequest(f"request id {request_id!r} is in use; use a new one", param="request_id")
        if request.whole is not None:
            num_replicas = self._fleet.status().count(ReplicaState.READY)
            request = replace(request, whole=request.whole.share(num_replicas))
        opened = self._open[request_id] = OpenRequest(request)
        finished = False
        try:
            self.controller.tell(Arrived(routed))
            while not finished:
                item = await opened.stream.get()
                if isinstance(item, OnbeatError):
                    finished = True
                    raise item
                finished = item.output.finish_reason is not None
                if item.output.finish_reason is FinishReason.ERROR:
                    raise EngineError(item.output.error or "the engine failed on this request")
                yield item
        finally:
            if not finished:
                self.controller.tell(Aborted(request_id))
            self._by_name.pop(opened.name, None)
            del self._open[request_id]

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            opened = self._open.get(request_id)
            if opened is None:
                continue
            if opened.replica is not None:
                opened.is_aborted = True
                self.controller.send(opened.replica, AbortRequests([opened.name]))
            else:
                self.controller.tell(Aborted(request_id))
                output = RequestOutput(request_id, [], finish_reason=FinishReason.ABORT)
                self._hand_out.put(opened, Delivery(time.monotonic(), output))

    async def is_idle(self) -> bool:
        return not self._open

    async def _describe(self, request: Request) -> RoutingRequest:
        has_prefixes = self._hashes_prompts and len(self.controller.lives) > 1
        block_hashes = await prompt_hashes(request, self.info.block_size) if has_prefixes else ()
        return RoutingRequest.of(request, block_hashes)

    # --- what the controller hears (its `Listener`) -----------------------------------------------------

    def before_send(self, action: Send) -> None:
        opened = self._open[action.request_id]
        self._by_name.pop(opened.name, None)
        self.counts.count_routed(action.replica, action.why, num_sent_tokens=len(opened.token_ids))
        opened.expect(time.monotonic(), action.predicted_ttft)

    def on_sent(self, opened: OpenRequest) -> None:
        self._by_name[opened.name] = opened

    def on_refused(self, action: Refuse) -> None:
        opened = self._open[action.request_id]
        opened.replica = None
        self.counts.num_failed += action.reason in LOSSES or bool(opened.token_ids)
        self._hand_out.put(opened, refusal(action, opened))

    def on_moved(self, opened: OpenRequest, origin: Origin) -> None:
        self._by_name.pop(origin.name, None)
        self._by_name[opened.name] = opened
        assert opened.replica is not None
        self.counts.count_move(origin.replica, opened.replica, origin.why)

    def on_stayed(self, why: str) -> None:
        self.counts.moves[why, "stayed"] += 1

    def on_copied(self, num_bytes: int) -> None:
        self.counts.num_moved_bytes += num_bytes

    def on_rescaled(self, action: Rescale) -> None:
        direction = "up" if action.num_replicas > action.num_before else "down"
        self.counts.rescales[direction, action.why] += 1

    def on_lost(self, replica: ReplicaId) -> None:
        self.counts.lost[replica] += 1

    def before_report(self, replica: ReplicaId, load: ReplicaLoad) -> ReplicaLoad:
        if not load.blocked:
            return load
        opened = self._by_name.get(load.blocked)
        if opened is None or opened.replica != replica:
            return replace(load, blocked="")
        if opened.num_unreported:
            self._report(opened, replica, is_finished=False)
        return replace(load, blocked=opened.request.request_id)

    def before_loss(self, replica: ReplicaId) -> None:
        for opened in self._open.values():
            if opened.replica == replica and opened.num_unreported:
                self._report(opened, replica, is_finished=False)

    def on_stepped(self, life: Life, outputs: StepOutputs) -> None:
        now, replica = outputs.now, life.replica
        deliveries: list[tuple[OpenRequest, RequestOutput]] = []
        for output in outputs.outputs:
            opened = self._by_name.get(output.request_id)
            if opened is None or opened.replica != replica:
                continue  # taken back or ended since
            if output.finish_reason is FinishReason.EXPIRED and output.retry_after is not None:
                opened.rejection = Overloaded(
                    output.error or "too many requests wait",
                    code="server_overloaded",
                    retry_after=output.retry_after,
                    reason="queue_too_long",
                )
                self._tell_refusal(opened, replica, is_for_load=True, retry_after=output.retry_after)
                continue
            if (taken := self._take(opened, output, now)) is not None:
                deliveries.append((opened, taken))
        outputs.outputs = [output for _, output in deliveries]
        for observer in self._observers:
            observer.on_step(outputs, life.replica_number)
        for opened, output in deliveries:
            self._hand_out.put(opened, Delivery(now, output))
            is_finished = output.finish_reason is not None
            is_first = bool(output.new_token_ids) and not opened.has_begun
            opened.has_begun = opened.has_begun or is_first
            if is_first and opened.predicted_ttft is not None:
                self.counts.count_prediction(opened.predicted_ttft, now - opened.sent_time)
            if is_finished or is_first:
                self._report(opened, replica, is_finished=is_finished, cached=output.num_cached_tokens)

    def _take(self, opened: OpenRequest, output: RequestOutput, now: float) -> RequestOutput | None:
        if opened.moved_from is not None and output.new_token_ids:
            self.counts.move_gap.observe(now - opened.moved_from)
            opened.moved_from = None
        try:
            return opened.take(output, now)
        except OutOfPlace as error:
            logger.exception("the deliveries of %s do not fit together", opened.name)
            self._hand_out.put(opened, EngineError(f"the deliveries do not fit together: {error}"))
            self.controller.tell(Aborted(opened.request.request_id))
            return None

    def _report(self, opened: OpenRequest, replica: ReplicaId, *, is_finished: bool, cached: int = 0) -> None:
        """Tell the fleet how far a request is: at its first tokens, its end, and before it moves."""
        num_tokens, opened.num_unreported = opened.num_unreported, 0
        self.controller.tell(Delivered(replica, opened.request.request_id, num_tokens, cached, is_finished))
        if is_finished:
            opened.replica = None

    def on_rejected(self, life: Life, rejected: Rejected) -> None:
        opened = self._by_name.get(rejected.request_id)
        if opened is None or opened.replica != life.replica:
            return
        error = opened.rejection = unpack_rejection(rejected)
        is_for_load = isinstance(error, Overloaded | SLOUnattainable)
        self._tell_refusal(opened, life.replica, is_for_load=is_for_load, retry_after=rejected.retry_after)

    def _tell_refusal(
        self, opened: OpenRequest, replica: ReplicaId, *, is_for_load: bool, retry_after: float | None
    ) -> None:
        opened.replica = None
        self.controller.tell(Refused(replica, opened.request.request_id, is_for_load, retry_after))


def _comes_back(status: FleetStatus) -> bool:
    """Return whether a fleet has no replica only while nobody asks: the next request starts one."""
    scaling = status.scaling
    return scaling is not None and scaling.least == 0 and scaling.most > status.count(ReplicaState.DOWN)
