"""vLLM's workers end with the engine, and it with them; what vLLM says of a fault."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from onbeat.core.errors import EngineDead
from onbeat.engine.memory import is_short_memory

logger = logging.getLogger("onbeat.engine")
_LONGEST = 300
"""Characters: behind an architecture that it does not know, vLLM lists all that it does."""


def reason(error: Exception) -> str:
    """Return what vLLM says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line.removeprefix("Value error, ") for line in lines if line.startswith("Value error, ")]
    text = (told or lines or [""])[0].partition(" [type=")[0]
    # A key or a name that is missing says nothing without its kind.
    text = text if " " in text else f"{type(error).__name__} {text}".strip()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def with_cure(error: Exception) -> str:
    """Return what vLLM says, and what helps where memory is short."""
    cure = "; lower --max-num-seqs, --max-num-batched-tokens or --gpu-memory-utilization"
    return reason(error) + (cure if is_short_memory(error) else "")


@contextmanager
def failures_end_the_engine(surface: Any) -> Iterator[None]:
    """Let what vLLM raises in a step end the engine: its workers are in the middle of it, and stay there.

    Parameters
    ----------
    surface : of vLLM, as `surface.VllmExecutor`, which knows whether a worker has died.

    Raises
    ------
    EngineDead : with vLLM's own reason.
    """
    try:
        yield
    except EngineDead:
        raise
    except Exception as error:
        if surface.has_failed:  # vLLM raises that the wait for its answer was given up
            raise worker_died() from error
        logger.exception("vLLM failed in a step")
        raise EngineDead(
            f"vLLM failed in a step: {with_cure(error)}; the engine must be started again"
        ) from error


def worker_died() -> EngineDead:
    """Return what ends an engine that has lost a worker."""
    return EngineDead("a worker of vLLM has died, perhaps as memory ran out; start the engine again")


class Made(NamedTuple):
    """What is to come of a step."""

    begun: Any
    made: Any
    waiting: threading.Lock

    def result(self) -> Any:
        """Wait for it; raises what vLLM does."""
        with self.waiting:
            output = self.made.result()
            self.begun.result()  # where vLLM says why a step failed that left nothing to sample
            return output


class Workers:
    """Processes of vLLM's that this one has: they end when it says so, and at the latest with it."""

    def __init__(self) -> None:
        self._children: set[BaseProcess] = set()
        self._name = ""

    @contextmanager
    def starting(self, *, has_some: bool) -> Iterator[None]:
        """Let this process have some: what starts in the block, its executor included, is seen to.

        A signal to the whole group of processes does not reach them: streams under way are served to the end.
        """
        if not has_some:  # it computes itself
            yield
            return
        multiprocessing.current_process().daemon = False  # one may have no processes of its own
        before = set(multiprocessing.active_children())
        resource_tracker.ensure_running()  # whose start would let signals through
        allowed = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # inherited
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, allowed)
            self._children = set(multiprocessing.active_children()) - before

    def bind(self, call: Callable[[Callable[[Any], str]], Sequence[str]]) -> None:
        """Let them be killed when this process ends, also where they hang.

        Parameters
        ----------
        call : calls a function in each of them, with vLLM's worker.
        """
        self._name = call(_end_with_engine)[0]

    def end(self, shut_down: Callable[[], None]) -> None:
        """End them, kindly first, and remove the file by which they found each other."""
        late = threading.Timer(_GRACE_SECONDS, self._kill)
        late.daemon = True
        late.start()
        shut_down()
        late.cancel()
        if name := self._name or os.environ.get(_NAME):
            Path(tempfile.gettempdir(), name).unlink(missing_ok=True)

    def _kill(self) -> None:
        for each in self._children:
            each.kill()


_NAME = "VLLM_DIST_IDENT"
"""Where vLLM's workers on CPUs keep the name of what they share."""
_GRACE_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


def _end_with_engine(_worker: Any) -> str:
    """Let a worker be killed when the engine's process ends; runs in the worker.

    Its shared memory keeps no name, which vLLM leaves behind.

    Returns
    -------
    name : of what the workers share; empty where there is none.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if name := os.environ.get(_NAME, ""):
        for path in Path("/dev/shm").glob(f"{name}-*"):
            path.unlink(missing_ok=True)
    return name
