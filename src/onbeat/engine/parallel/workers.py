"""The processes of the ranks after the first: started, talked to, and ended."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from onbeat.core.errors import EngineDead
from onbeat.engine.parallel.messages import Failed, FromRank, RankJob, ToRank

BLAME_SECONDS = 2.0
"""How long to look for the rank whose end made an exchange fail: its process may still be ending."""
STOP_SECONDS = 5.0
"""How long a process may take to end before it is killed."""


class RankProcess:
    """One rank's process, and the connection to it.

    A program of its own rather than a process of `multiprocessing`: there the engine's process is daemonic,
    which may have no children, and a new process would import the caller's main module.

    Parameters
    ----------
    job : what it loads.
    """

    def __init__(self, job: RankJob) -> None:
        self.rank = job.shard.rank
        self.failed: Failed | None = None
        self.connection, theirs = Pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "onbeat.engine.parallel.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C at a terminal is for the first rank's process, which ends this one
            )
        finally:
            # With no other copy of its end, the process' end is the end of the connection, and the reverse.
            theirs.close()
        self.connection.send(job)

    def read(self) -> FromRank | None:
        """Wait for its next message; None where it has ended."""
        try:
            message: FromRank = self.connection.recv()
        except (EOFError, OSError):
            return None
        if isinstance(message, Failed):
            self.failed = message
        return message

    def describe_end(self) -> str:
        """Return how it ended, or what it said before."""
        name = f"tensor-parallel rank {self.rank} (process {self.process.pid})"
        if self.failed is not None:
            return f"{name} failed: {self.failed.message}"
        try:
            code = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{name} does not answer"
        if code >= 0:
            return f"{name} ended with exit code {code}"
        return f"{name} was ended by {signal.Signals(-code).name}"


class Workers:
    """All ranks but the first.

    Parameters
    ----------
    jobs : one for each.

    Notes
    -----
    Ranks cannot go on without one another: once one has failed, all are ended and every call raises.
    """

    def __init__(self, jobs: Sequence[RankJob]) -> None:
        self._processes: list[RankProcess] = []
        self._error: str | None = None
        try:
            for job in jobs:
                self._processes.append(RankProcess(job))
        except BaseException:
            self.kill()
            raise

    def wait_for(self, kind: type[FromRank]) -> None:
        """Wait until each has sent a message of this kind.

        Raises
        ------
        EngineDead : one has failed or ended instead.
        """
        for process in self._processes:
            if not isinstance(process.read(), kind):
                raise self.give_up(EngineDead(f"rank {process.rank} did not load its part"))

    def send(self, message: ToRank) -> None:
        """Send to all.

        Raises
        ------
        EngineDead : one has failed or ended.
        """
        if self._error is not None:
            raise EngineDead(self._error)
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for process in self._processes:
            try:
                process.connection.send_bytes(data)
            except OSError as error:
                raise self.give_up(error) from error

    def check_alive(self) -> None:
        """Look whether all are there; between steps only, when none of them has anything to say.

        Raises
        ------
        EngineDead : one has failed or ended.
        """
        if self._error is not None:
            raise EngineDead(self._error)
        if wait([process.connection for process in self._processes], 0):
            raise self.give_up(EngineDead("another rank has ended"))

    def give_up(self, error: Exception) -> EngineDead:
        """End all after a failure, and return what is to be raised.

        Parameters
        ----------
        error : what the first rank ran into; it counts where no other has failed.
        """
        culprit = self._find_culprit()
        cause = f"tensor-parallel rank 0 failed: {error}" if culprit is None else culprit.describe_end()
        self.kill()
        self._error = f"{cause}; the ranks cannot go on without it, start the engine again"
        return EngineDead(self._error)

    def close(self) -> None:
        """Let them end by themselves, and kill those that do not."""
        for process in self._processes:
            process.connection.close()
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._processes:
            try:
                process.process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.process.kill()
                process.process.wait()

    def kill(self) -> None:
        """End them at once."""
        for process in self._processes:
            process.process.kill()
        self.close()

    def _find_culprit(self) -> RankProcess | None:
        """Return the process whose end is not explained by that of another; None where there is none."""
        unheard = {process.connection: process for process in self._processes}
        deadline = time.monotonic() + BLAME_SECONDS
        while unheard and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(unheard), left):
                assert isinstance(connection, Connection)
                process = unheard[connection]
                is_gone = process.read() is None
                if is_gone:
                    del unheard[connection]
                if process.failed is None and is_gone:
                    return process
                if process.failed is not None and not process.failed.is_consequence:
                    return process
        return None
