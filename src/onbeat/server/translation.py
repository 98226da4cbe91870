"""What turns requests of other APIs into chats: one set of fields, one set of checks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.requests import Request

from onbeat.core.errors import InvalidRequest, RequestRejected, quoted
from onbeat.server.chat import ChatCompletionRequest
from onbeat.server.errors import unsupported
from onbeat.server.fair_threads import Turns
from onbeat.server.fields import check_fields, validated
from onbeat.server.generation_request import GenerationRequest
from onbeat.server.middleware import context_of
from onbeat.server.objectives import metadata_objectives

PlacedMessages = list[tuple[str, dict[str, Any]]]
"""The messages of a chat, each with the place that it has in the request of another API."""

Names = Mapping[str, str]
"""Paths of a chat's fields, without positions, and what another API calls them. The first one counts that a
path begins with; one that ends in a dot is always only the beginning."""
_UNSHOWN = ("prompt_logprobs", "return_token_ids")
"""What chats answer and no other API has a place for."""
_NO_TEXT = ("image", "document", "search_result", "tool_reference")
_OF_METADATA: Names = {"slo.job.": "metadata.slo_job_", "slo.": "metadata.slo_"}


@asynccontextmanager
async def as_chat(
    body: GenerationRequest,
    fields: Mapping[str, Any],
    messages: PlacedMessages,
    metadata: Mapping[str, Any] | None,
    names: Names,
    request: Request,
) -> AsyncIterator[ChatCompletionRequest]:
    """Give the block the chat that a request of another API stands for.

    Errors of the block, and the fields that it ignores, are called what that API calls them.

    Parameters
    ----------
    body : what both have in common, checked.
    fields : the others but the messages, by the names of a chat; those that are None are left out.
    messages : of the chat.
    metadata : may state objectives, where the body has none.
    names : of the API.
    request : whose context gets the names of the fields that are ignored.

    Raises
    ------
    InvalidRequest : a field is wrong, or asks for what this server lacks.
    """
    turns, ignored = Turns(), context_of(request.scope).ignored_fields
    given = {name: value for name, value in fields.items() if value is not None}
    given["messages"] = [message for _, message in messages]
    if body.slo is None and (stated := metadata_objectives(metadata)) is not None:
        given["slo"], names = stated, {**names, **_OF_METADATA}
    both = body.model_fields_set & GenerationRequest.model_fields.keys()
    shared = {name: value for name in both if (value := getattr(body, name)) is not None}
    ignored += [name for name in _UNSHOWN if shared.pop(name, False) is not False]
    called = partial(_called, names, [where for where, _ in messages])
    num_ignored = len(ignored)
    try:
        kept, _ = check_fields(given, ChatCompletionRequest.model_fields)
        await turns.rest()
        chat = validated(ChatCompletionRequest, kept, ignored)
        await turns.rest()
        yield chat.model_copy(update=shared)
    except RequestRejected as error:
        error.field, error.param = (each and called(each) for each in (error.field, error.param))
        raise
    finally:
        ignored[num_ignored:] = map(called, ignored[num_ignored:])


def _called(names: Names, places: Sequence[str], path: str) -> str:
    """Return what another API calls the field that has a path in a chat.

    Parameters
    ----------
    names : of the API.
    places : of each message of the chat, in its request.
    """
    head, bracket, rest = path.partition("[")
    position, _, rest = rest.partition("]")
    if head == "messages" and position.isdecimal():
        return places[int(position)] + rest
    plain = f"{head}[]{rest}" if bracket else path
    for known, public in names.items():
        if known == plain or plain.startswith((f"{known}.", f"{known}[") if known[-1] != "." else known):
            return (public + plain.removeprefix(known)).replace("[]", f"[{position}]", 1)
    return path


def readable(block: Any, left_out: list[str]) -> Any:
    """Return an older message, or a block of one, with words in place of what is no text.

    Parameters
    ----------
    left_out : gets the names of what that is.
    """
    if not isinstance(block, dict):
        return block
    kind, content = block.get("type"), block.get("content")
    if kind in _NO_TEXT:
        left_out += {f"messages[].content[].{kind}"}.difference(left_out)
        return {"type": "text", "text": f"[{kind} left out: only text can be read here]"}
    if isinstance(content, list):
        return {**block, "content": [readable(each, left_out) for each in content]}
    return block


def function_tools(
    tools: Sequence[Mapping[str, Any]] | None, schema_field: str
) -> list[dict[str, Any]] | None:
    """Return tools that are described without a `function` around them as a chat's.

    Parameters
    ----------
    tools : the caller's.
    schema_field : which holds the schema of the arguments.

    Raises
    ------
    InvalidRequest : one is no function: what other servers run themselves.
    """
    if tools is None:
        return None
    result = []
    for index, tool in enumerate(tools):
        kind, schema = tool.get("type") or "function", tool.get(schema_field)
        if kind not in ("function", "custom") or (schema is None and kind == "custom"):
            raise unsupported(
                f"tools[{index}].type is {quoted(tool.get('type'))}; this server has functions with "
                f"{schema_field} only, which the caller runs",
                f"tools[{index}].type",
            )
        names = ("name", "description", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        result.append({"type": "function", "function": {**function, "parameters": schema}})
    return result


def tool_choice_of(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """Return the choice of tools of a response as a chat's.

    Raises
    ------
    InvalidRequest : it chooses what this server lacks.
    """
    if choice is None or isinstance(choice, str):
        return choice
    match choice.get("type"):
        case "function":
            return _function(choice)
        case "allowed_tools":
            tools = choice.get("tools")
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                raise InvalidRequest(
                    "tool_choice.tools is not an array of objects", param="tool_choice.tools"
                )
            allowed = {"mode": choice.get("mode"), "tools": list(map(_function, tools))}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case kind:
            raise unsupported(
                f"tool_choice.type is {quoted(kind)}; this server takes function and allowed_tools",
                "tool_choice.type",
            )


def text_field(item: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field of an item or block.

    Raises
    ------
    InvalidRequest : it is missing, or no text.
    """
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} is {quoted(value)}; it should be text", param=f"{where}.{name}")
    return value


def _function(named: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": named.get("name")}}
