"""A client of one engine process without a fleet: what tests of the process and its messages speak through.

It starts nothing again and fails its streams when the process ends, so that they see what the process does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType

import zmq
import zmq.asyncio

from onbeat.cluster.client import OwnedFolder, check_length_of_socket_paths
from onbeat.cluster.local_launcher import terminal_ignored
from onbeat.core.errors import (
    ConfigError,
    EngineDead,
    EngineError,
    InvalidRequest,
    OnbeatError,
)
from onbeat.core.protocols import Delivery, EngineInfo, EnginePulse, StepObserver
from onbeat.core.request import FinishReason, Request
from onbeat.engine.link import BuildEngine, EngineLink
from onbeat.engine.messages import (
    AbortRequests,
    AddRequest,
    Died,
    FromEngine,
    Heartbeat,
    Progress,
    Ready,
    Rejected,
    Shutdown,
    StartFailed,
    Stepped,
    ToEngine,
    decode_from_engine,
    encode,
)
from onbeat.engine.process import run_engine_process
from tests.forking import forking

logger = logging.getLogger("onbeat.engine")

LAST_WORDS_SECONDS = 0.5
"""How long the last message of a process that has ended may still be on its way."""
STOP_TIMEOUT_SECONDS = 5.0
"""How long the process may take to end before it is killed."""

_DEAD_MESSAGE = "the engine process has ended; see the server's log and start the server again"

_Item = Delivery | OnbeatError


class ProcessEngineClient:
    """Starts an engine process and speaks to it; one reader task hands deliveries to their streams.

    Parameters
    ----------
    build : makes the engine inside the new process; must be picklable.
    observers : see every step message before the streams do.
    on_progress : called with one line of text at a time while the engine starts.
    """

    def __init__(
        self,
        build: BuildEngine,
        *,
        observers: Sequence[StepObserver] = (),
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._build = build
        self._observers = list(observers)
        self._on_progress = on_progress
        self._streams: dict[str, asyncio.Queue[_Item]] = {}
        self._info: EngineInfo | None = None
        self._pulse = EnginePulse(0.0)
        self._is_alive = False
        self._why_dead = _DEAD_MESSAGE
        self._reader: asyncio.Task[None] | None = None

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDead("the engine has not been started")
        return self._info

    @property
    def is_alive(self) -> bool:
        return self._is_alive

    @property
    def pulse(self) -> EnginePulse:
        return self._pulse

    @property
    def process_id(self) -> int | None:
        return self._process.pid

    def add_observer(self, observer: StepObserver) -> None:
        """Let one more object see the step messages from now on."""
        self._observers.append(observer)

    def check_alive(self) -> None:
        """Raise `EngineDead` if the process has ended, or cannot run a step any more."""
        if not self._is_alive:
            raise EngineDead(self._why_dead)

    async def start(self) -> None:
        """Start the process and wait until it is ready; entering the client does it if it is not done.

        Raises
        ------
        ConfigError : the engine cannot be built as configured, or the path of temporary files is too long.
        EngineDead : the process ended or failed.
        """
        check_length_of_socket_paths()
        self._folder = OwnedFolder()
        folder = self._folder.path
        link = EngineLink(endpoint=f"ipc://{folder}/engine")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.bind(link.endpoint)
        self._process = forking().Process(
            target=run_engine_process, args=(self._build, link), name="onbeat-engine", daemon=True
        )
        with terminal_ignored():
            self._process.start()
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._on_process_end)
        try:
            self._info = await self._wait_until_ready()
        except BaseException:
            self._process.kill()  # it reads no messages before it is ready, and there is nothing to save
            await self._stop()
            raise
        self._pulse = EnginePulse(time.monotonic())
        self._is_alive = True
        self._reader = asyncio.create_task(self._read(), name="onbeat-engine-reader")

    async def __aenter__(self) -> ProcessEngineClient:
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

    async def generate(self, request: Request) -> AsyncGenerator[Delivery, None]:
        self.check_alive()
        request_id = request.request_id
        if request_id in self._streams:
            raise InvalidRequest(f"request id {request_id!r} is in use; use a new one", param="request_id")
        stream: asyncio.Queue[_Item] = asyncio.Queue()
        self._streams[request_id] = stream
        self._send(AddRequest(request))
        finished = False
        try:
            while not finished:
                item = await stream.get()
                if isinstance(item, OnbeatError):
                    finished = True
                    raise item
                finished = item.output.finish_reason is not None
                if item.output.finish_reason is FinishReason.ERROR:
                    raise EngineError(item.output.error or "the engine failed on this request")
                yield item
        finally:
            del self._streams[request_id]
            if not finished and self._is_alive:
                self._send(AbortRequests([request_id]))

    async def is_idle(self) -> bool:
        return not self._streams

    # --- life of the process --------------------------------------------------------------------------

    async def _wait_until_ready(self) -> EngineInfo:
        ended = asyncio.create_task(self._ended.wait())
        try:
            while True:
                received = asyncio.ensure_future(self._receive())
                await asyncio.wait({ended, received}, return_when=asyncio.FIRST_COMPLETED)
                # Its last words may still be on their way.
                done, _ = await asyncio.wait({received}, timeout=LAST_WORDS_SECONDS)
                if not done:
                    received.cancel()
                    code = self._process.exitcode
                    raise EngineDead(f"the engine process ended while it started (exit code {code})")
                match await received:
                    case Progress(text):
                        self._on_progress(text)
                    case Ready(info):
                        return info
                    case StartFailed(message, is_user_error):
                        raise ConfigError(message) if is_user_error else EngineDead(message)
        finally:
            ended.cancel()

    def _on_process_end(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.sentinel)
        if self._is_alive:
            self._process.join()  # its files are closed; its exit code follows within milliseconds
            logger.error("the engine process has ended (exit code %s)", self._process.exitcode)
        self._is_alive = False
        self._ended.set()
        loop.call_later(LAST_WORDS_SECONDS, self._fail_streams)

    def _on_last_words(self, message: str) -> None:
        logger.error("the engine has died: %s", message)
        self._why_dead = message
        self._is_alive = False
        self._fail_streams()

    def _fail_streams(self) -> None:
        """Fail every open stream: nobody may wait for an engine that is gone."""
        for stream in self._streams.values():
            stream.put_nowait(EngineDead(self._why_dead))

    async def _stop(self) -> None:
        self._is_alive = False
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        if not self._ended.is_set():
            if self._info is not None:  # before, there is nobody to hear it
                self._send(Shutdown())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), STOP_TIMEOUT_SECONDS)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._socket.close()
        self._context.term()
        self._folder.close()

    # --- messages -------------------------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        # without a limit a message is queued at once: nothing is waited for
        self._socket.send(encode(message), flags=zmq.NOBLOCK)

    async def _receive(self) -> FromEngine:
        message: FromEngine = decode_from_engine(await self._socket.recv())
        return message

    async def _read(self) -> None:
        try:
            await self._read_messages()
        except Exception:
            # Without its reader every stream would wait for ever: treat it as the end of the engine.
            logger.exception("reading from the engine failed")
            self._process.kill()

    async def _read_messages(self) -> None:
        while True:
            match await self._receive():
                case Heartbeat(pulse):
                    self._pulse = pulse
                case Stepped(outputs):
                    self._pulse = EnginePulse(outputs.now)
                    for observer in self._observers:
                        observer.on_step(outputs)
                    for output in outputs.outputs:
                        if stream := self._streams.get(output.request_id):
                            stream.put_nowait(Delivery(outputs.now, output))
                case Died(message):
                    self._on_last_words(message)
                case Rejected() as rejected:
                    if stream := self._streams.get(rejected.request_id):
                        stream.put_nowait(rejected.error())
