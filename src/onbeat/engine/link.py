"""How an engine's process is reached and what builds the engine there, for those who have none themselves."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import zmq

from onbeat.core.protocols import EngineInfo

if TYPE_CHECKING:
    from onbeat.engine.core import EngineCore
    from onbeat.engine.engine_config import EngineConfig

BuildEngine: TypeAlias = "Callable[[Callable[[str], None]], tuple[EngineCore, EngineInfo]]"
"""Called in the engine process with a function that reports progress."""


def build_logged(
    config: EngineConfig, on_progress: Callable[[str], None], *, log_level: str
) -> tuple[EngineCore, EngineInfo]:
    """Build an engine whose process logs as the server does.

    It is named here, and imports what computes when it is called: neither who starts the process nor the
    process itself has to import the other's half.
    """
    from onbeat.engine.start import build_engine

    set_up_logging(log_level)
    return build_engine(config, on_progress)


def set_up_logging(level: str) -> None:
    """Log to stderr from a level on."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Keys of an encrypted connection (CurveZMQ, in Z85), where it leaves the machine."""

    public: bytes
    secret: bytes
    server: bytes
    """Public key of whoever listens."""

    def put_on(self, socket: zmq.Socket[bytes]) -> None:
        """Encrypt what a socket sends, before it connects."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_serverkey = self.server


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLink:
    """How an engine process reaches whom it serves. It connects, and listens nowhere itself."""

    endpoint: str
    """ZeroMQ endpoint, bound by whoever sends requests."""
    identity: bytes = b""
    """Names the process to a listener that serves many; nobody can guess it."""
    keys: CurveKeys | None = None
    """None leaves the connection as it is: `ipc` needs none."""
    cores: tuple[int, ...] = ()
    """The CPU cores that it may run on; empty leaves that to the system."""
    cuda_device: str | None = None
    """The CUDA device that it may use, as in `CUDA_VISIBLE_DEVICES`; None leaves it as it is."""
    leaves_on_sigterm: bool = False
    """Whether it asks to be drained on SIGTERM. Otherwise it ignores the signal."""
    guardian: int | None = None
    """The process that it ends with; None is the one that started it."""

    def open_guardian(self) -> int | None:
        """Return a descriptor that can be read once the process has ended that this one ends with."""
        if self.guardian is not None:
            return os.pidfd_open(self.guardian)
        # Not getppid(): the parent may have died while the model was loaded.
        parent = multiprocessing.parent_process()
        return None if parent is None else parent.sentinel
