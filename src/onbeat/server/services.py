"""What the routes work with, made once when the application is; and whether the engine goes on.

The server also looks for garbage by itself: a full round stops the event loop for longer the more is open.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from onbeat.core.fleet import FleetView
from onbeat.core.hang import HangLimits, OwnPauses, find_hang
from onbeat.core.protocols import EngineClient, EngineInfo
from onbeat.core.request import Adapter
from onbeat.core.tokenizer import Tokenizer
from onbeat.server.errors import ApiError
from onbeat.server.generation import Generator, Lifecycle
from onbeat.server.logprobs import LogprobWriter
from onbeat.server.pieces import SlowReaders
from onbeat.server.prompts import PromptEncoder
from onbeat.server.server_config import MAX_QUOTED, ServerConfig
from onbeat.server.shared import Desk
from onbeat.server.structured import GrammarChecks
from onbeat.text.chat_template import ChatTemplate
from onbeat.text.reply.parser import ReplyStyle

logger = logging.getLogger("onbeat.server")

LOOK_SECONDS = 0.5
"""How often the engine is looked at."""
TIDY_SECONDS = 5.0
"""How often garbage is looked for while nothing is open."""
LONGEST_UNTIDY_SECONDS = 600.0
"""How long that may wait for such a moment."""
_NEVER = 2**30


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Leave full rounds of garbage collection to `tidy` while the block runs."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


async def tidy(lifecycle: Lifecycle) -> None:
    """Collect garbage while no generation is open, or after a long time without such a moment; for ever."""
    last = time.monotonic()
    while True:
        await asyncio.sleep(TIDY_SECONDS)
        is_due = lifecycle.num_open == 0 or time.monotonic() - last > LONGEST_UNTIDY_SECONDS
        if is_due and gc.get_count()[2]:  # there have been smaller rounds, and what outlived them
            gc.collect()
            last = time.monotonic()


class EngineHealth:
    """Looks at an engine's pulse, while it lives; a hang may pass.

    Parameters
    ----------
    engine : whose pulse it is.
    limits : from when on it hangs.

    Attributes
    ----------
    hang : what speaks for a hang; None while nothing does.
    """

    def __init__(self, engine: EngineClient, limits: HangLimits) -> None:
        self.hang: str | None = None
        self._engine = engine
        self._limits = limits

    async def run(self) -> None:
        """Look, for ever."""
        pauses = OwnPauses(2 * LOOK_SECONDS)
        pauses.look(time.monotonic())
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            is_in_time = pauses.look(now := time.monotonic())
            if not self._engine.is_alive:
                self.hang = None
            elif is_in_time:
                self._judge(find_hang(pauses.without(self._engine.pulse), self._limits, now))

    def _judge(self, hang: str | None) -> None:
        if hang is not None and self.hang is None:
            logger.error("the engine hangs: %s; /ready answers 503 until it goes on", hang)
        elif hang is None and self.hang is not None:
            logger.warning("the engine goes on")
        self.hang = hang


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The parts that the routes share."""

    engine: EngineClient
    fleet: FleetView | None
    """The replicas behind it; None where nothing is known of them."""
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    reply_style: ReplyStyle
    """How the model's answers to chats are written."""
    config: ServerConfig
    lifecycle: Lifecycle
    encoder: PromptEncoder
    grammars: GrammarChecks
    shared: Desk
    generator: Generator
    watch: EngineHealth
    slow_readers: SlowReaders
    logprobs: tuple[LogprobWriter, LogprobWriter]
    """Write log-probabilities with tokens by their text, and by their ids."""
    created: int
    """Unix time at which the server started, seconds."""

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names under which the model answers, the preferred first."""
        return self.config.served_model_names or (self.info.model_name,)

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The LoRA adapters under whose names the model answers with them."""
        return {} if self.fleet is None else self.fleet.adapters

    def check_model(self, name: str | None) -> str:
        """Return the name under which to answer.

        Raises
        ------
        ApiError : another model was asked for (404).
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names and name not in self.adapters:
            raise ApiError(
                404,
                f"the model {name[:MAX_QUOTED]!r} does not exist; this server has "
                f"{', '.join(map(repr, (*self.model_names, *self.adapters)))}",
                code="model_not_found",
                param="model",
            )
        return name
