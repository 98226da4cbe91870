"""Chat messages to a prompt, by the model's own Jinja template in a sandbox.

The sandbox counts loops and calls, but one method of a text can ask for ten gigabytes, and a chain of
products for minutes: only the system can stop these. So a server renders in a process of its own, which may
take only so much time and memory: `python -m onbeat.text.chat_template SECONDS NICENESS`. What fails for want
of memory is an error; what takes too long ends the process, which is started again for the next chat.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from onbeat.core.errors import ConfigError, InvalidRequest, OnbeatError
from onbeat.core.protocols import Tokenizer
from onbeat.files import read_text
from onbeat.text.limited_process import Answer, Ended, LimitedProcess, serve, timer
from onbeat.text.template_sandbox import SandboxedTemplate

Messages = list[dict[str, Any]]


class Renderer(Protocol):
    """A compiled template."""

    def render(self, variables: dict[str, Any]) -> str:
        """Return the text; see `SandboxedTemplate.render`."""
        ...


class ChatTemplate:
    """Renders chats as Hugging Face's `apply_chat_template` does.

    The `developer` role is shown to the template as `system` unless the template itself speaks of it.

    Parameters
    ----------
    source : Jinja template.
    bos_token, eos_token : special tokens as text, which templates may write out.
    renderer : what compiles and renders it: in this process, or in one with limits (`TemplateProcess`).

    Attributes
    ----------
    source : the same.

    Raises
    ------
    ConfigError : the template is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str,
        eos_token: str,
        renderer: Callable[[str], Renderer] = SandboxedTemplate,
    ) -> None:
        # the last two as transformers passes them: templates ask whether they are none
        self._variables = {"bos_token": bos_token, "eos_token": eos_token, "tools": None, "documents": None}
        self._knows_developer = "developer" in source
        self.source = source
        self._renderer = renderer(source)

    @property
    def knows_tools(self) -> bool:
        """Whether it shows the model the tools that it may call."""
        return "tools" in self.source

    def render(self, messages: Messages, *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Return the prompt of a chat.

        Parameters
        ----------
        messages : each with at least `role` and `content`.
        add_generation_prompt : whether the prompt ends where the assistant's answer begins.
        variables : more that the template may look at (`chat_template_kwargs`).

        Raises
        ------
        InvalidRequest : the template refuses these messages, fails on them, or computes too much.
        RecursionError : messages or variables are nested deeper than the template can follow.
        """
        if not self._knows_developer:
            messages = [_as_system(message) for message in messages]
        return self._renderer.render(
            {
                **self._variables,
                **variables,
                "messages": messages,
                "add_generation_prompt": add_generation_prompt,
            }
        )


def load_chat_template(tokenizer: Tokenizer, override: Path | str | None) -> ChatTemplate | None:
    """Return a template, given or in a file, or else the model's own, or None for a model without one.

    It is rendered in a process of its own, with limits of time and memory.

    Raises
    ------
    ConfigError : the file cannot be read, or the template is not valid.
    """
    source = tokenizer.chat_template
    if override is not None:
        source = override if isinstance(override, str) else read_text(override, "the chat template")
    if source is None:
        return None
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_ids
    return ChatTemplate(
        source,
        bos_token="" if bos is None else tokenizer.token_text(bos),
        eos_token=tokenizer.token_text(eos[0]) if eos else "",
        renderer=TemplateProcess,
    )


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "system"} if message.get("role") == "developer" else message


MAX_SECONDS = 5.0
"""Most processor time of one rendering: a chat of 10 MB takes under one second."""
MAX_BYTES = 2**30
"""Most memory of a rendering."""


class TemplateProcess:
    """A template that is rendered in its own process; see `SandboxedTemplate`. Threads may share it.

    Parameters
    ----------
    source : Jinja template.
    max_seconds : most processor time of one rendering.

    Raises
    ------
    ConfigError : the template is not valid, or takes too much to be compiled.
    """

    def __init__(self, source: str, max_seconds: float = MAX_SECONDS) -> None:
        opening = source.encode("utf-8", "surrogatepass")
        self._process = LimitedProcess("onbeat.text.chat_template", opening, max_seconds=max_seconds)
        try:
            reply = self._process.start()
        except Ended as error:
            raise ConfigError(f"the chat template is not valid: compiling it {error}") from error
        if "problem" in reply:
            self.close()
            raise ConfigError(reply["problem"])

    def render(self, variables: dict[str, Any]) -> str:
        """Return the text; see `SandboxedTemplate.render`."""
        try:
            reply = self._process.ask(json.dumps(variables).encode())
        except Ended as error:
            raise InvalidRequest(
                f"the chat template cannot render these messages: it {error}", param="messages"
            ) from error
        if reply.get("is_nested_too_deep"):
            raise RecursionError("the template, or what it is given, is nested too deep")
        if "problem" in reply:
            raise InvalidRequest(reply["problem"], param="messages")
        return str(reply["text"])

    def close(self) -> None:
        """End the process. Being forgotten does the same."""
        self._process.close()


def _open(opening: bytes) -> tuple[dict[str, Any], Answer | None]:
    """Compile the template."""
    try:
        with timer(float(sys.argv[1])):
            template = SandboxedTemplate(opening.decode("utf-8", "surrogatepass"))
    except OnbeatError as error:
        return {"problem": str(error)}, None
    return {}, lambda request: _rendered(template, request)


def _rendered(template: SandboxedTemplate, request: bytes) -> dict[str, Any]:
    try:
        return {"text": template.render(json.loads(request))}
    except InvalidRequest as error:
        return {"problem": str(error)}
    except RecursionError:
        return {"is_nested_too_deep": True}
    except MemoryError:
        return {"problem": "the chat template cannot render these messages: it takes too much memory"}


if __name__ == "__main__":
    serve(_open, max_bytes=MAX_BYTES)
