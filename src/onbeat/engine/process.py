"""The engine process: one thread that reads requests, steps, and sends what each step delivered.

Wait for messages and for the end of a step, with an eye on the parent process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket as sockets
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from types import FrameType
from typing import Any

import zmq

from onbeat.core.errors import EngineDead, OnbeatError, RequestRejected
from onbeat.core.handover import MoveTask, MoveVerb
from onbeat.core.protocols import EnginePulse, StepOutputs
from onbeat.core.request import FinishReason, RequestOutput
from onbeat.core.settled_memory import settled_memory
from onbeat.engine import messages
from onbeat.engine.core import EngineCore
from onbeat.engine.grammar_port import CompilingRequests
from onbeat.engine.kv_access import KVSource
from onbeat.engine.kv_transfer import TcpTransport
from onbeat.engine.link import BuildEngine, EngineLink
from onbeat.engine.messages import encode
from onbeat.engine.progress import Detail
from onbeat.output import unblocked_output
from onbeat.scheduler.replica.move_agent import MoveAgent
from onbeat.version import __version__

WAKE_SECONDS = 0.5
"""The longest wait without a look around."""


class StepWait:
    """Sleeps until a step has ended, and wakes up for each message that comes meanwhile.

    The thread that runs steps rings by a byte in a pipe, which the poller watches beside the inbox: nothing
    is asked over and over, and neither of the two waits for the other.

    Parameters
    ----------
    inbox : where messages come.
    parent : a file descriptor that can be read once the parent process has ended; None without one.

    Attributes
    ----------
    is_orphaned : whether the parent process was found to have ended; no wait lasts from then on.
    on_wake : called every now and then, at least once in `WAKE_SECONDS` of waiting.
    """

    def __init__(self, inbox: zmq.Socket[bytes], *, parent: int | None = None) -> None:
        self.is_orphaned = False
        self.on_wake: Callable[[], None] = lambda: None
        self.inbox = inbox
        self._parent = parent
        self._bell, self._button = os.pipe()
        for end in (self._bell, self._button):
            os.set_blocking(end, False)
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)
        self._poller.register(self._bell, zmq.POLLIN)
        if parent is not None:
            self._poller.register(parent, zmq.POLLIN)

    def for_message(self, seconds: float) -> bool:
        """Wait for a message, for a while at most, while no step runs; return whether there is one."""
        return self.inbox in self._poll(seconds)

    def until_done(self, step: Future[Any], read_inbox: Callable[[], None]) -> None:
        """Return once the step has ended, or the parent process.

        Parameters
        ----------
        read_inbox : takes all messages that are there; called whenever there are some.
        """
        if step.done():
            return
        step.add_done_callback(lambda _: self.ring())
        while not (step.done() or self.is_orphaned):
            if self.inbox in self._poll(WAKE_SECONDS):
                read_inbox()

    def _poll(self, seconds: float) -> set[Any]:
        ready = {source for source, _ in self._poller.poll(int(seconds * 1e3))}
        if self._bell in ready:
            os.read(self._bell, 64)  # perhaps of a step before, whose end was seen without it
        if self._parent in ready:
            self.is_orphaned = True
        self.on_wake()
        return ready

    def close(self) -> None:
        """Close the pipe; no step may run any more."""
        os.close(self._bell)
        os.close(self._button)

    def ring(self) -> None:
        """Let a wait look around; any thread may call it."""
        with contextlib.suppress(BlockingIOError):  # it has been rung often enough
            os.write(self._button, b"!")


logger = logging.getLogger("onbeat.engine")

HEARTBEAT_SECONDS = WAKE_SECONDS
"""After this long without another message the engine says that it lives."""
LINGER_SECONDS = 1.0
"""How long the last messages may take to reach the parent."""
STALL_SECONDS = 0.05
"""The longest wait for another engine's part before this one looks what else it could run."""


def run_engine_process(build: BuildEngine, link: EngineLink) -> None:
    """Entry point of the process: build the engine, then serve until told to stop or orphaned."""
    # Terminals and service managers signal the whole group; the parent decides when the engine ends.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if link.cores:
        os.sched_setaffinity(0, link.cores)
    if link.cuda_device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = link.cuda_device
    with unblocked_output():
        is_orphaned = _build_and_serve(build, link)
    # Everything is closed: taking the interpreter apart takes longer than all else, and somebody may wait.
    os._exit(1 if is_orphaned else 0)


def _say(socket: zmq.Socket[bytes], text: str) -> None:
    """Tell whoever it serves how far the start is; details are for the log."""
    if isinstance(text, Detail):
        logger.debug("%s", text)
    else:
        socket.send(encode(messages.Progress(text)))


def _build_and_serve(build: BuildEngine, link: EngineLink) -> bool:
    """Run an engine from its start to its end; return whether whoever it served is gone."""
    context = zmq.Context()
    guardian = link.open_guardian()
    socket = _connect(context, link)
    socket.send(encode(messages.Hello(__version__)))
    try:
        core, info = build(partial(_say, socket))
    except OnbeatError as error:
        socket.send(encode(messages.StartFailed(str(error), is_user_error=True)))
    except Exception as error:
        logger.exception("the engine could not start")
        socket.send(encode(messages.StartFailed(f"{type(error).__name__}: {error}", is_user_error=False)))
    else:
        with settled_memory():
            ready = messages.Ready(info, core.kv_layout)
            socket.send(encode(ready))
            if info.generates:
                core.grammars.warm_up()  # while whoever it serves has yet to hear that it is ready
            _EngineLoop(core, StepWait(socket, parent=guardian), link, ready).serve()
    finally:
        is_orphaned = guardian is not None and bool(select.select([guardian], [], [], 0)[0])
        context.destroy(linger=0 if is_orphaned else int(LINGER_SECONDS * 1000))
    return is_orphaned


def _connect(context: zmq.Context[zmq.Socket[bytes]], link: EngineLink) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)  # an unread message waits in memory; a full queue must not stop the step loop
    socket.ipv6 = "[" in link.endpoint
    if link.identity:
        socket.routing_id = link.identity
    if link.keys is not None:
        link.keys.put_on(socket)
    socket.connect(link.endpoint)
    return socket


def _own_address(endpoint: str) -> str:
    """Return the address by which this machine reaches an endpoint, where others can reach it, too."""
    if not endpoint.startswith("tcp://"):
        return "127.0.0.1"
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    with sockets.socket(family, sockets.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])


class _EngineLoop:
    """Launches steps, and takes messages while they run; sleeps on the inbox when there is nothing to run.

    A request is queued, refused or aborted when it comes, not when the step under way has ended.
    """

    def __init__(self, core: EngineCore, wait: StepWait, link: EngineLink, ready: messages.Ready) -> None:
        self._core, self._wait, self._socket = core, wait, wait.inbox
        wait.on_wake = self._beat
        self._address = _own_address(link.endpoint)
        self._ready = ready
        self._last_word = time.monotonic()
        self._num_taken = 0
        self._stopped = False
        self._wants_to_leave = False
        self._compiling = CompilingRequests(core.grammars, self._wait.ring)
        self._moves = self._open_moves()
        if link.leaves_on_sigterm:
            signal.signal(signal.SIGTERM, self._ask_to_leave)

    def _open_moves(self) -> MoveAgent[KVSource]:
        return MoveAgent(
            self._core.kv, answer=lambda answer: self._say(messages.MoveAnswer(answer)), ring=self._wait.ring
        )

    def serve(self) -> None:
        """Serve until told to stop; an engine that can run no step any more says why and ends the process."""
        try:
            self._run()
        except EngineDead as error:
            self._say(messages.Died(str(error)))
            sys.exit(1)
        finally:
            self._core.shutdown()
            self._wait.close()

    def _run(self) -> None:
        core = self._core
        self._send(core.take_load())
        while not (self._stopped or self._wait.is_orphaned):
            self._add_compiled()
            if not core.has_work:
                seconds = 0 if core.do_idle_work() else WAKE_SECONDS
                if not self._wait.for_message(seconds):
                    if seconds:  # a look at every block: nobody waits for an answer meanwhile
                        core.scheduler.check_invariants()
                    continue
            self._read_inbox()
            launched = core.launch()
            self._send(core.take_news())
            step = core.oldest_step
            if step is None:
                if core.waits_for_others:
                    self._wait.for_message(STALL_SECONDS)
                continue
            if launched and core.has_room:
                continue
            self._wait.until_done(step, self._read_inbox)
            if not self._wait.is_orphaned:
                self._send(core.collect())
                self._moves.look()

    def _ask_to_leave(self, _signal: int, _frame: FrameType | None) -> None:
        """Ask to be drained, at the next look around: a signal may come in the middle of a message."""
        self._wants_to_leave = True

    def _beat(self) -> None:
        """Say that the engine lives, if it has said nothing for a while, and pass a signal on."""
        if self._wants_to_leave:
            self._wants_to_leave = False
            self._say(messages.Leaving())
        self._moves.look()
        self._add_compiled()
        if time.monotonic() - self._last_word >= HEARTBEAT_SECONDS:
            self._say_alive()
            self._send(self._core.take_load())  # without steps room may have come back, as a copy has ended

    def _say_alive(self) -> None:
        self._last_word = time.monotonic()
        self._say(messages.Heartbeat(self._core.pulse(), self._num_taken))

    def _read_inbox(self) -> None:
        """Take every message that is there; say how many requests came, before one of them runs."""
        num_before = self._num_taken
        while (data := self._next_message()) is not None:
            self._take(messages.decode_to_engine(data))
        if self._num_taken != num_before:
            self._say_alive()

    def _take(self, message: messages.ToEngine) -> None:
        match message:
            case messages.AddRequest():
                self._add(message)
            case messages.AbortRequests():
                self._abort(message.request_ids)
            case messages.Fetched():
                self._core.on_fetched(message.num_tokens)
            case messages.AskMove():
                self._move(message.task)
            case messages.OpenKV():
                self._open_kv(message)
            case messages.LoadAdapter():
                self._load_adapter(message)
            case messages.Greet():
                self._begin_again()
            case messages.Shutdown():
                self._stopped = True

    def _move(self, task: MoveTask[KVSource]) -> None:
        if task.request is not None:
            self._core.grammars.prepare(task.request.sampling.grammar)
        self._abort(self._moves.take(task))
        if task.verb in (MoveVerb.TAKE, MoveVerb.RELEASE):
            self._send(self._core.take_load())  # no step may tell that there is room now

    def _begin_again(self) -> None:
        """Drop what a keeper that is gone had asked for, and tell the next one who is here."""
        self._abort([*self._core.scheduler.begin_again(), *self._moves.leavers, *self._compiling.names])
        self._moves = self._open_moves()
        self._num_taken = 0
        self._say(messages.Hello(__version__))
        self._say(self._ready)
        self._send(self._core.take_load())

    def _next_message(self) -> bytes | None:
        try:
            return self._socket.recv(flags=zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _abort(self, request_ids: list[str]) -> None:
        self._moves.forget(request_ids)
        self._compiling.forget(request_ids)
        outputs = self._core.abort(request_ids) if request_ids else []
        if outputs:
            self._send(self._core.message(outputs))

    def _add(self, message: messages.AddRequest) -> None:
        self._num_taken += 1
        try:
            if not self._compiling.takes(message):
                self._queue(message)
        except Exception as error:
            self._turn_away(message, error)

    def _add_compiled(self) -> None:
        """Queue the requests whose grammars have been compiled since."""
        for message, problem in self._compiling.take_done():
            if problem is not None:
                self._turn_away(message, problem)
                continue
            try:
                self._queue(message)
            except Exception as error:
                self._turn_away(message, error)

    def _queue(self, message: messages.AddRequest) -> None:
        self._core.add(message.request)
        if message.stops:
            self._moves.stop_after_first(message.request.request_id)

    def _turn_away(self, message: messages.AddRequest, error: Exception) -> None:
        """Tell why a request is not served: it is refused, or it fails. The engine goes on."""
        request = message.request
        if isinstance(error, RequestRejected):
            self._say(messages.Rejected.by(request.request_id, error))
            self._send(self._core.take_load())
            return
        logger.error("request %s could not be taken", request.request_id, exc_info=error)
        self._core.abort([request.request_id])  # a part of it may have been queued
        end = RequestOutput(
            request.request_id,
            [],
            FinishReason.ERROR,
            num_previous_tokens=len(request.resumed_token_ids),
            error=f"the engine could not take this request: {type(error).__name__}: {error}",
        )
        self._send(self._core.message([end]))

    def _open_kv(self, message: messages.OpenKV) -> None:
        try:
            self._core.open_kv(TcpTransport(message.key, host=self._address))
        except OSError as error:
            logger.warning("streams cannot be moved to this engine or from it: %s", error)
        self._moves = self._open_moves()

    def _load_adapter(self, message: messages.LoadAdapter) -> None:
        """Load a LoRA adapter while nothing else is done; requests behind the message find it loaded."""
        loading = self._core.executor.load_adapter(message.adapter, message.others)
        while not wait((loading,), HEARTBEAT_SECONDS).done:
            self._say(messages.Heartbeat(EnginePulse(time.monotonic()), self._num_taken))
        if (error := loading.exception()) is not None and not isinstance(error, OnbeatError):
            logger.error("the LoRA adapter %r cannot be loaded", message.adapter.name, exc_info=error)
        self._say(messages.AdapterAnswer(message.adapter.number, None if error is None else str(error)))

    def _say(self, message: messages.FromEngine) -> None:
        self._socket.send(encode(message))

    def _send(self, outputs: StepOutputs | None) -> None:
        if outputs is not None:
            if self._moves.waits_for_first_tokens:
                for output in outputs.outputs:
                    is_finished = output.finish_reason is not None
                    if output.new_token_ids or is_finished:
                        self._moves.on_first_token(output.request_id, is_finished=is_finished)
            self._last_word = time.monotonic()
            for message in messages.in_portions(outputs):
                self._say(message)
