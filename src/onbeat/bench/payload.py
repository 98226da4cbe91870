"""Request bodies of OpenAI's endpoints, and what their stream chunks carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import orjson

Api = Literal["completions", "chat", "embeddings"]

DEFAULT_PATHS: dict[Api, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "embeddings": "/v1/embeddings",
}


class Message(NamedTuple):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    text: str


class Conversation(NamedTuple):
    """A prompt of several messages."""

    messages: tuple[Message, ...]
    schema: Mapping[str, Any] | None = None
    """JSON schema that the answer must match; None: any text."""


Prompt = str | Conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadBuilder:
    """Makes the body of a request: one that streams its answer, or one for an embedding."""

    api: Api
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields added to every body; they win over the built ones."""

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes in events."""
        return self.api != "embeddings"

    def build(self, prompt: Prompt, max_tokens: int, own: Mapping[str, Any] | None = None) -> bytes:
        """Return the JSON body that asks for at most `max_tokens` tokens and a usage count.

        Parameters
        ----------
        own : fields of this one request.
        """
        body: dict[str, Any] = {"model": self.model}
        if self.is_streamed:
            body |= {"max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
        talk = Conversation((Message("user", prompt),)) if isinstance(prompt, str) else prompt
        if self.api == "embeddings":
            body["input"] = prompt
        elif self.api == "chat":
            body["messages"] = [{"role": each.role, "content": each.text} for each in talk.messages]
        else:
            body["prompt"] = " ".join(each.text for each in talk.messages)
        if talk.schema is not None:
            schema = {"name": "answer", "schema": talk.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return orjson.dumps(body | dict(own or {}) | dict(self.extra))


def choice_text(choice: Mapping[str, Any]) -> str:
    """Return what one choice of a chunk delivers, '' if nothing: text, reasoning, and calls of tools.

    Raises
    ------
    TypeError : it is of another type than servers send.
    """
    delta = choice.get("delta")
    if delta is None:
        return _text_of(choice.get("text"))
    text = _text_of(delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))
    calls = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
    return text + "".join(_text_of(call.get(part)) for call in calls for part in ("name", "arguments"))


def _text_of(content: Any) -> str:
    """Return the text of a string, or of a list of parts, as servers of models that reason may send it."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "".join(map(_text_of, content))
    if isinstance(content, dict):
        return _text_of(content.get("text") or content.get("thinking"))
    raise TypeError(f"text of type {type(content).__name__}")
