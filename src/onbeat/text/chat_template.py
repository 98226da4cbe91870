"""Chat messages to a prompt, by the model's own Jinja template in a sandbox.

Jinja's sandbox keeps a template from reaching Python's internals and from changing its arguments, but loops
may ask for all time, and one method of a text for ten gigabytes: only the system can stop these. So a server
renders in a process of its own, which may take only so much time and memory: `python -m
onbeat.text.chat_template SECONDS NICENESS`. What fails for want of memory is an error; what takes too long
ends the process, which is started again for the next chat.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from onbeat.core.errors import ConfigError, InvalidRequest, OnbeatError
from onbeat.core.tokenizer import Tokenizer
from onbeat.files import read_text
from onbeat.text.limited_process import Answer, Ended, LimitedProcess, serve, timer

_ERRORS_OF_TEMPLATES = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
"""What Python raises where a template does something that does not suit its values."""


class ChatSandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment with what Hugging Face's chat templates expect."""

    # Constants of these are computed with a rendering, not when the template is compiled.
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)


class SandboxedTemplate:
    """A compiled template.

    Parameters
    ----------
    source : Jinja template.

    Raises
    ------
    ConfigError : the template is not valid Jinja, or takes too much to be compiled.
    """

    def __init__(self, source: str) -> None:
        try:
            self._template = ChatSandbox().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is not valid: {error}") from error
        except RecursionError as error:
            raise ConfigError("the chat template is not valid: it is nested too deep") from error
        except (MemoryError, OverflowError) as error:
            raise ConfigError("the chat template is not valid: compiling it takes too much memory") from error

    def render(self, variables: dict[str, Any]) -> str:
        """Return the text.

        Parameters
        ----------
        variables : what the template may look at.

        Raises
        ------
        InvalidRequest : the template refuses these messages, or fails on them.
        RecursionError : messages or variables are nested deeper than the template can follow.
        """
        try:
            return self._template.render(variables)
        except RecursionError:
            raise
        except (jinja2.TemplateError, MemoryError, *_ERRORS_OF_TEMPLATES) as error:
            problem = "it takes too much memory" if isinstance(error, MemoryError) else error
            raise InvalidRequest(
                f"the chat template cannot render these messages: {problem}", param="messages"
            ) from error


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; for a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: Any = False, indent: int | None = None, **options: Any) -> str:  # noqa: FBT002
    # Jinja's own filter escapes HTML, which a prompt must not. The arguments are transformers'.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> Callable[..., Any]:
    raise jinja2.TemplateError(message)


Messages = list[dict[str, Any]]


class ChatTemplate:
    """Renders chats as Hugging Face's `apply_chat_template` does.

    The `developer` role is shown to the template as `system` unless the template itself speaks of it, and
    reasoning also as `thinking` if it reads that.

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
        renderer: Callable[[str], SandboxedTemplate | TemplateProcess] = SandboxedTemplate,
    ) -> None:
        # the last two as transformers passes them: templates ask whether they are none
        self._variables = {"bos_token": bos_token, "eos_token": eos_token, "tools": None, "documents": None}
        self._knows_developer = "developer" in source
        self._reads_thinking = ".thinking" in source  # as gpt-oss calls reasoning
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
            messages = [
                {**each, "role": "system"} if each.get("role") == "developer" else each for each in messages
            ]
        if self._reads_thinking:
            messages = [_with_thinking(message) for message in messages]
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


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning by gpt-oss's name; its template refuses both beside a call."""
    thought = message.get("reasoning_content")
    if thought is None or (message.get("tool_calls") and message.get("content")):
        return message
    return {**message, "thinking": thought}


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
