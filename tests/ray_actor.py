"""A stand-in for a cluster of Ray: one actor, in this process, and a module `ray` for those that ask it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, cast

import pytest

from onbeat.cluster import lease

MODULE = """
import os
from multiprocessing.connection import Client

class ActorDiedError(Exception): "It will not come back."

class Actor:
    def __call__(self, *_, **__): return self
    def options(self, **options):
        assert options["get_if_exists"] and options["lifetime"] == "detached"
        return self
    def __getattr__(self, name): return Method(name)

class Method:
    def __init__(self, name): self.name = name
    def remote(self, *arguments):
        calls[0] += 1
        client[0].send((calls[0], self.name, arguments))
        return calls[0]

class Maker(Actor):
    def __getattr__(self, name): return lambda: Actor()

client, calls = [], [0]
remote = Maker()
def is_initialized(): return bool(client)
def init(address, **options):
    assert address == "auto" and options["namespace"] == "onbeat"
    client.append(Client(os.environ["RAY_ADDRESS"]))
def get(call, timeout):
    while client[0].poll(timeout):
        number, answer = client[0].recv()
        if number == call: return answer
    raise TimeoutError("the actor has not answered")
"""


class _Local:
    """What `ray.remote` returns, for an actor that is in this process."""

    def __init__(self, kind: Any) -> None:
        self.remote = kind

    def options(self, **_: Any) -> Any:
        return self


class RayActor:
    """Answers as the actor would.

    Attributes
    ----------
    answers : is cleared to have all calls wait.
    """

    def __init__(self, listener: Listener) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self._listener, self._lock = listener, threading.Lock()
        self.start_again()
        threading.Thread(target=self._accept, daemon=True).start()

    def start_again(self) -> None:
        """Lose the record, as an actor does whose process or node has died."""
        self._actor = lease._actor(type("ray", (), {"remote": _Local}), "keeper")

    def age(self, seconds: float) -> None:
        """Have it be older."""
        self._actor.began -= seconds

    @property
    def record(self) -> tuple[str, str] | None:
        return cast(tuple[str, str] | None, self._actor.record)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self._listener.accept(),), daemon=True).start()

    def _serve(self, client: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, method, arguments = client.recv()
                self.answers.wait()
                with self._lock:
                    answer = getattr(self._actor, method)(*arguments)
                client.send((number, answer))


@contextmanager
def ray_actor(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[RayActor]:
    """Have processes that are started within the block find it as Ray."""
    (folder / "ray.py").write_text(MODULE)
    address = str(folder / "head")
    patch.syspath_prepend(folder)
    patch.setenv("RAY_ADDRESS", address)
    with Listener(address) as listener:
        yield RayActor(listener)
