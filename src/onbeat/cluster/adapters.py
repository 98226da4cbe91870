"""The LoRA adapters of a fleet: all that are loaded are on every ready replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from onbeat.cluster.life import Life
from onbeat.cluster.streams import OpenRequest
from onbeat.core.errors import InvalidRequest
from onbeat.core.fleet import ReplicaId
from onbeat.core.request import Adapter
from onbeat.engine.messages import AdapterAnswer, LoadAdapter

logger = logging.getLogger("onbeat.cluster")


class FleetAdapters:
    """Has replicas load adapters, and knows which there are.

    An engine has room for so many adapters, and a step may be of all that it has. So no adapter leaves an
    engine, and none takes its place, while a request still has it.

    Parameters
    ----------
    send : sends a replica a message.
    lives : the present life of each replica.
    requests : those that are open.
    changed : is set whenever a replica got ready or was lost, and here when one has answered.

    Attributes
    ----------
    by_name : those that requests may ask for.
    """

    def __init__(
        self,
        send: Callable[[ReplicaId, LoadAdapter], None],
        lives: Mapping[ReplicaId, Life],
        requests: Mapping[str, OpenRequest],
        changed: asyncio.Event,
    ) -> None:
        self.by_name: dict[str, Adapter] = {}
        self._send, self._lives, self._requests, self._changed = send, lives, requests, changed
        self._last_number = 0
        self._one_by_one = asyncio.Lock()

    def introduce(self, life: Life) -> None:
        """Have a replica that got ready load all there are, before its first request."""
        needed = self._needed()
        for adapter in needed:
            self._send(life.replica, LoadAdapter(adapter, [each.number for each in needed]))

    def hear(self, life: Life, answer: AdapterAnswer) -> None:
        """Take what a replica says of an adapter."""
        life.adapters[answer.number] = answer.error
        if answer.error is not None:
            logger.warning("%s: %s", life.replica, answer.error)
        self._changed.set()

    async def load(self, name: str, path: str, *, most: int, in_place: bool = False) -> None:
        """Load an adapter on every ready replica; see `FleetView.load_adapter`.

        Parameters
        ----------
        most : adapters that an engine has room for.
        """
        async with self._one_by_one:
            if name in self.by_name and not in_place:
                raise InvalidRequest(
                    f"the LoRA adapter {name!r} is loaded already; unload it first, or send load_inplace",
                    param="lora_name",
                    code="invalid_value",
                )
            needed = self._needed(without=name)
            if len(needed) >= most:
                told = ", ".join(sorted({each.name for each in needed}))
                raise InvalidRequest(
                    f"there is room for {most} LoRA adapters, and {told} are loaded or still have running "
                    "requests; unload one first, or start the server with a larger --max-loras",
                    param="lora_name",
                    code="too_many_adapters",
                )
            self._last_number += 1
            adapter = Adapter(name, path, self._last_number)
            asked = [life for life in self._lives.values() if life.info is not None]
            for life in asked:
                self._send(life.replica, LoadAdapter(adapter, [each.number for each in needed]))
            if errors := await self._answers(adapter.number, asked):
                raise InvalidRequest(errors[0], param="lora_path", code="adapter_not_loaded")
            self._take(adapter, asked)

    async def _answers(self, number: int, asked: list[Life]) -> list[str]:
        """Wait until replicas have answered, or are lost; return what went wrong."""
        while any(self._lives.get(life.replica) is life and number not in life.adapters for life in asked):
            self._changed.clear()
            await self._changed.wait()
        return [error for life in asked if (error := life.adapters.get(number)) is not None]

    def _take(self, adapter: Adapter, asked: list[Life]) -> None:
        """Let requests ask for an adapter; replicas that got ready while it was loaded get it, too."""
        self.by_name[adapter.name] = adapter
        for life in self._lives.values():
            if life.info is not None and life not in asked:
                self.introduce(life)

    def _needed(self, *, without: str | None = None) -> list[Adapter]:
        """Return the adapters that requests have or may ask for.

        Parameters
        ----------
        without : name of one that no further request asks for.
        """
        named = [each for each in self.by_name.values() if each.name != without]
        running = [each.request.adapter for each in self._requests.values()]
        return list(dict.fromkeys((*named, *filter(None, running))))
