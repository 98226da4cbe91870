"""What the chunks of one answer have in common, and what the caller wants in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What all chunks of an answer have in common."""

    completion_id: str
    created: int
    """Unix time, seconds."""
    model: str
    fingerprint: str

    def fields(self, kind: str) -> dict[str, Any]:
        """Return the fields of an object of one kind."""
        return {
            "id": self.completion_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What goes beside the choices of a chunk or of a whole answer."""

    usage: dict[str, Any] | None = None
    """Tokens so far; null is not sent where the caller did not ask for it."""
    slo: dict[str, Any] | None = None
    """How the promise was kept; on the last chunk alone, and only if there was one."""
    prompt_token_ids: Sequence[int] | None = None
    """Of a chat, in a whole answer and in a choice's first chunk, if the caller asked for it."""

    def fields(self) -> dict[str, Any]:
        """Return the fields that are there."""
        ids = None if self.prompt_token_ids is None else list(self.prompt_token_ids)
        given = {"usage": self.usage, "slo": self.slo, "prompt_token_ids": ids}
        return {name: value for name, value in given.items() if value is not None}


NO_EXTRAS = Extras()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What the caller wants to see beside the text."""

    include_usage: bool
    logprobs: bool
    token_ids: bool
