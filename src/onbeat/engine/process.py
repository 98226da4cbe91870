"""The engine process: one thread that reads requests, steps, and sends what each step delivered."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from onbeat.core.errors import EngineDead, OnbeatError, RequestRejected
from onbeat.core.protocols import EngineInfo
from onbeat.core.settled_memory import settled_memory
from onbeat.core.step import StepOutputs
from onbeat.engine.core import EngineCore
from onbeat.engine.messages import (
    AbortRequests,
    AddRequest,
    Died,
    Heartbeat,
    Progress,
    Ready,
    Shutdown,
    StartFailed,
    Stepped,
    decode_to_engine,
    encode,
)
from onbeat.engine.rejection import pack_rejection
from onbeat.engine.step_wait import WAKE_SECONDS, StepWait

logger = logging.getLogger("onbeat.engine")

HEARTBEAT_SECONDS = 1.0
"""After this long without another message the engine says that it lives."""
LINGER_SECONDS = 1.0
"""How long the last messages may take to reach the parent."""

BuildEngine = Callable[[Callable[[str], None]], tuple[EngineCore, EngineInfo]]
"""Called in the engine process with a function that reports progress."""


@dataclass(frozen=True, slots=True)
class EngineAddresses:
    """ZeroMQ endpoints; each is bound by whoever receives there."""

    to_engine: str
    from_engine: str


def run_engine_process(build: BuildEngine, addresses: EngineAddresses) -> None:
    """Entry point of the process: build the engine, then serve until told to stop or orphaned."""
    # Ctrl-C and service managers signal the whole group; the parent decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    outbox = context.socket(zmq.PUSH)
    for socket in (inbox, outbox):
        socket.set_hwm(0)  # an unread message waits in memory; a full queue must not stop the step loop
    inbox.bind(addresses.to_engine)
    outbox.connect(addresses.from_engine)
    try:
        core, info = build(lambda text: outbox.send(encode(Progress(text))))
    except OnbeatError as error:
        outbox.send(encode(StartFailed(str(error), is_user_error=True)))
    except Exception as error:
        logger.exception("the engine could not start")
        outbox.send(encode(StartFailed(f"{type(error).__name__}: {error}", is_user_error=False)))
    else:
        with settled_memory():
            outbox.send(encode(Ready(info)))
            _serve(core, inbox, outbox)
    finally:
        is_orphaned = (parent := multiprocessing.parent_process()) is not None and not parent.is_alive()
        context.destroy(linger=0 if is_orphaned else int(LINGER_SECONDS * 1000))
    if is_orphaned:
        os._exit(1)  # nobody waits: taking the interpreter apart takes longer than all else


def _serve(core: EngineCore, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
    """Serve until told to stop; an engine that can run no step any more says why and ends the process."""
    loop = _EngineLoop(core, inbox, outbox)
    try:
        loop.run()
    except EngineDead as error:
        outbox.send(encode(Died(str(error))))
        sys.exit(1)
    finally:
        core.shutdown()
        loop.close()


class _EngineLoop:
    """Launches steps, and takes messages while they run; sleeps on the inbox when there is nothing to run.

    A request is queued, refused or aborted when it comes, not when the step under way has ended.
    """

    def __init__(self, core: EngineCore, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
        self._core = core
        self._inbox = inbox
        self._outbox = outbox
        self._last_word = time.monotonic()
        self._stopped = False
        # Not getppid(): the parent may have died while the model was loaded.
        parent = multiprocessing.parent_process()
        self._wait = StepWait(inbox, parent=parent.sentinel if parent else None, on_wake=self._beat)

    def run(self) -> None:
        core = self._core
        while not (self._stopped or self._wait.is_orphaned):
            if not core.has_work:
                core.scheduler.check_invariants()
                core.check_alive()
                if not self._wait.for_message(0 if core.do_idle_work() else WAKE_SECONDS):
                    continue
            self._read_inbox()
            launched = core.launch()
            self._send(core.take_expired())
            step = core.oldest_step
            if step is None or (launched and core.has_room):
                continue
            self._wait.until_done(step, self._read_inbox)
            if not self._wait.is_orphaned:
                self._send(core.collect())

    def close(self) -> None:
        """Let go of what a step under way might still use; call it when none runs any more."""
        self._wait.close()

    def _beat(self) -> None:
        """Say that the engine lives, if it has said nothing for a while."""
        now = time.monotonic()
        if now - self._last_word >= HEARTBEAT_SECONDS:
            self._last_word = now
            self._outbox.send(encode(Heartbeat(self._core.pulse())))

    def _read_inbox(self) -> None:
        """Take every message that is there."""
        while True:
            try:
                data = self._inbox.recv(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            message = decode_to_engine(data)
            match message:
                case AddRequest():
                    self._add(message)
                case AbortRequests():
                    outputs = self._core.abort(message.request_ids)
                    if outputs:
                        self._send(StepOutputs(time.monotonic(), outputs))
                case Shutdown():
                    self._stopped = True

    def _add(self, message: AddRequest) -> None:
        request_id = message.request.request_id
        try:
            self._core.add(message.request)
        except RequestRejected as error:
            self._outbox.send(encode(pack_rejection(request_id, error)))

    def _send(self, outputs: StepOutputs | None) -> None:
        if outputs is not None:
            self._last_word = time.monotonic()
            self._outbox.send(encode(Stepped(outputs)))
