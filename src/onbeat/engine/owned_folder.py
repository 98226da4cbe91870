"""Temporary directories that the next start removes where their process was killed.

A process that is killed removes nothing. So each directory has a file that its process holds locked, and the
system gives the lock back whenever and however that process ends. Unlike a process id in the file, a lock is
not fooled by ids that are used again, or that mean another process in another container.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

import zmq

from onbeat.core.errors import ConfigError

PREFIX = "onbeat-"
_LOCK = "lock"

logger = logging.getLogger("onbeat.engine")


class OwnedFolder:
    """A new temporary directory, which only this user can read and which goes with `close`.

    Making one removes those of this user whose processes have ended without removing them.

    Attributes
    ----------
    path : the directory.
    """

    def __init__(self) -> None:
        remove_abandoned(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Locked before it has its name: another start that finds the file finds it locked.
        unnamed = self.path / f"{_LOCK}.new"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / _LOCK)

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
