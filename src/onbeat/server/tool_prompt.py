"""Tools for models whose chat template says nothing of them: a system message says what may be called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from onbeat.text.reply.families import Family

_INSTRUCTIONS = """\
You may call functions to answer. These are the functions, as JSON:
{tools}

To call a function, answer with nothing but its name and its arguments as JSON, like this:
{example}"""


def without_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], family: Family
) -> list[dict[str, Any]]:
    """Return a chat for a template that knows text alone.

    The tools are added to the system message, calls become text in the form that they are read in, and
    results become messages of the user, those of neighbouring calls one message.

    Parameters
    ----------
    messages : as templates get them.
    tools : as templates get them.
    family : in whose form calls are.
    """
    result: list[dict[str, Any]] = []
    in_results = False
    for message in messages:
        was_in_results, in_results = in_results, message["role"] == "tool"
        if in_results:
            name = message.get("name")
            text = f"Result of {name}: {message['content']}" if name else f"Result: {message['content']}"
            if was_in_results:
                result[-1] = {**result[-1], "content": f"{result[-1]['content']}\n{text}"}
            else:
                result.append({"role": "user", "content": text})
        elif "tool_calls" in message:
            calls = [_written(call["function"], family) for call in message["tool_calls"]]
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            result.append({**kept, "content": "\n".join(filter(None, (message["content"], *calls)))})
        else:
            result.append(message)
    return _with_instructions(result, tools, family) if tools else result


def _with_instructions(
    messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]], family: Family
) -> list[dict[str, Any]]:
    listed = "\n".join(orjson.dumps(tool["function"]).decode() for tool in tools)
    example = _written({"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}, family)
    text = _INSTRUCTIONS.format(tools=listed, example=example)
    if messages and messages[0]["role"] in ("system", "developer"):
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _written(function: dict[str, Any], family: Family) -> str:
    """Return a call as the family writes one object of it."""
    opening, closing = ("", "") if family.bare else family.marks[0]
    name = orjson.dumps(function["name"]).decode()
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return f'{opening}{{"name": {name}, "{family.arguments_key}": {text}}}{closing}'
