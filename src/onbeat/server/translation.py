"""What turns requests of other APIs into chats: one set of fields, one set of checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from onbeat.core.errors import InvalidRequest, quoted
from onbeat.server.chat import ChatCompletionRequest
from onbeat.server.errors import unsupported
from onbeat.server.fair_threads import Turns
from onbeat.server.fields import check_fields, validated
from onbeat.server.generation_request import GenerationRequest
from onbeat.server.middleware import context_of
from onbeat.server.objectives import SLOFields, metadata_objectives


async def chat_of(
    body: GenerationRequest, fields: Mapping[str, Any], metadata: Mapping[str, Any] | None, request: Request
) -> ChatCompletionRequest:
    """Return the chat that a request of another API stands for.

    Parameters
    ----------
    body : what both have in common, checked.
    fields : the others, by the names of a chat; those that are None are left out.
    metadata : may state objectives, where the body has none.
    request : whose context gets the names of the fields that are ignored.

    Raises
    ------
    InvalidRequest : a field is wrong, or asks for what this server lacks.
    """
    turns, ignored = Turns(), context_of(request.scope).ignored_fields
    given = {name: value for name, value in fields.items() if value is not None}
    kept, _ = check_fields(given, ChatCompletionRequest.model_fields)
    await turns.rest()
    chat = validated(ChatCompletionRequest, kept, ignored)
    shared = {
        name: getattr(body, name) for name in body.model_fields_set & GenerationRequest.model_fields.keys()
    }
    if body.slo is None and (stated := metadata_objectives(metadata)) is not None:
        shared["slo"] = validated(SLOFields, stated, ignored)
    await turns.rest()
    return chat.model_copy(update=shared)


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
        if tool.get("type", "function") not in ("function", "custom") or tool.get(schema_field) is None:
            raise unsupported(
                f"tools[{index}].type is {quoted(tool.get('type'))}; this server has functions with "
                f"{schema_field} only, which the caller runs",
                f"tools[{index}].type",
            )
        names = ("name", "description", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        result.append({"type": "function", "function": {**function, "parameters": tool[schema_field]}})
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
