"""A chat template in a process of its own, which may take only so much time and memory.

The sandbox counts loops and calls, but one method of a text can ask for ten gigabytes, and a chain of
products for minutes: only the system can stop these. What fails for want of memory is an error; what takes
too long ends the process, which is started again for the next chat.

`python -m onbeat.text.template_process SECONDS NICENESS` is the process.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from onbeat.core.errors import ConfigError, InvalidRequest, OnbeatError
from onbeat.text.limited_process import Answer, Ended, LimitedProcess, serve, timer
from onbeat.text.template_sandbox import SandboxedTemplate

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
        self._process = LimitedProcess("onbeat.text.template_process", opening, max_seconds=max_seconds)
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
