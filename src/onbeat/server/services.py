"""What the routes work with, made once when the application is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onbeat.core.fleet import FleetView
from onbeat.core.protocols import EngineClient, EngineInfo
from onbeat.core.request import Adapter
from onbeat.core.tokenizer import Tokenizer
from onbeat.server.engine_watch import EngineHealth
from onbeat.server.errors import ApiError
from onbeat.server.generation import Generator, Lifecycle
from onbeat.server.logprobs import LogprobWriter
from onbeat.server.prompts import PromptEncoder
from onbeat.server.server_config import MAX_QUOTED, ServerConfig
from onbeat.server.shared import Desk
from onbeat.server.structured import GrammarChecks
from onbeat.server.unread import SlowReaders
from onbeat.text.chat_template import ChatTemplate
from onbeat.text.reply.parser import ReplyStyle


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
