"""Looks after a keeper: has no socket, no thread and no loop of events, so that there is little to end it.

The keeper is a fork of this process. What it starts outlives it, as a child of this one, and ends with it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
from contextlib import ExitStack

from onbeat.cluster.client import Nursed, OwnedFolder
from onbeat.cluster.roster import Roster
from onbeat.output import unblocked_output

logger = logging.getLogger("onbeat.cluster")

MOST_FAILED_STARTS = 3
"""Keepers killed before they serve, one after another: the next would be as well."""
_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def nurse(output: ExitStack) -> Nursed:
    """Return in a new process, the keeper; the caller's own stays here.

    A keeper that is killed is followed by another. One that ends by itself has ended all others, and this
    process ends with its exit code, by SystemExit.

    Parameters
    ----------
    output : what is printed; a thread of this process writes it, and is one of each keeper.
    """
    folder = OwnedFolder()
    output.close()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guardian, num_served, num_failed = os.getpid(), 0, 0
    while True:
        nursed = Nursed(num_served, folder, Roster(folder.path, guardian))
        if not (pid := os.fork()):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guardian:
                os._exit(1)
            os.setpgid(0, 0)  # of Ctrl-C it hears once, by its parent
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # the terminal is to show what it writes
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            output.enter_context(unblocked_output())
            return nursed
        code = _wait_for_end(pid)
        num_failed = 0 if nursed.mark.exists() else num_failed + 1
        num_served += not num_failed
        if code >= 0 or num_failed == MOST_FAILED_STARTS:
            if code < 0:
                logger.error("keepers are killed before they serve (exit code %d)", code)
            folder.close()
            raise SystemExit(code if code >= 0 else 1)


def _wait_for_end(keeper: int) -> int:
    """Hand signals on to the keeper until it has ended; return its exit code."""
    while True:
        number = signal.sigwait(_WATCHED)
        if number != signal.SIGCHLD:
            os.kill(keeper, number)
            continue
        pid = -1
        while pid:  # others that have ended are children of this process, too
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == keeper:
                return os.waitstatus_to_exitcode(status)
