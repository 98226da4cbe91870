"""Chats: the text that the model's template makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from starlette.requests import Request

from onbeat.core.errors import InvalidRequest
from onbeat.server.answer import cancelled_on_disconnect
from onbeat.server.errors import ApiError
from onbeat.server.middleware import context_of
from onbeat.server.prompts import PromptEncoder
from onbeat.server.reply_fields import MessageReader, TemplateFields, text_of, unread_variables
from onbeat.server.server_config import MAX_VARIABLES_BYTES
from onbeat.server.services import Services
from onbeat.text.chat_template import ChatTemplate
from onbeat.text.reply.families import FAMILIES, ReplyFamily
from onbeat.text.reply.parser import ReplyStyle

_INSTRUCTIONS = """\
You may call functions to answer. These are the functions, as JSON:
{tools}

To call a function, answer with nothing but its name and its arguments as JSON, like this:
{example}"""


def without_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], family: ReplyFamily
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
    messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]], family: ReplyFamily
) -> list[dict[str, Any]]:
    listed = "\n".join(orjson.dumps(tool["function"]).decode() for tool in tools)
    example = _written({"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}, family)
    text = _INSTRUCTIONS.format(tools=listed, example=example)
    if messages and messages[0]["role"] in ("system", "developer"):
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _written(function: dict[str, Any], family: ReplyFamily) -> str:
    """Return a call as the family writes one object of it."""
    opening, closing = ("", "") if family.bare else family.marks[0]
    name = orjson.dumps(function["name"]).decode()
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return f'{opening}{{"name": {name}, "{family.arguments_key}": {text}}}{closing}'


_START_MARK = "\ue000onbeat-start\ue000"
_END_MARK = "\ue000onbeat-continue\ue000"
"""No white space at either end: a template that trims a message leaves what is between them alone."""

_QUOTED_END = 40
"""Characters of a message and of a prompt that an error shows."""

_MESSAGE_SIZE = 1000
"""A message takes as long to render as so many bytes, beside its own."""

_RESERVED_VARIABLES = frozenset(
    (
        *("self", "messages", "add_generation_prompt", "bos_token", "eos_token"),
        *("tools", "documents", "raise_exception", "strftime_now"),
    )
)


def _check_rendering(body: TemplateFields) -> None:
    """Check the fields that say how a chat becomes a prompt.

    Raises
    ------
    InvalidRequest : they contradict each other, set what the server sets, or are too large.
    """
    if body.continue_final_message and body.add_generation_prompt is not False:
        raise InvalidRequest(
            "continue_final_message needs add_generation_prompt to be false: the answer cannot both start "
            "anew and go on",
            param="continue_final_message",
        )
    variables = body.chat_template_kwargs or {}
    if reserved := _RESERVED_VARIABLES & variables.keys():
        raise InvalidRequest(
            f"chat_template_kwargs may not set {min(reserved)!r}, which the server sets",
            param="chat_template_kwargs",
        )
    num_bytes = len(orjson.dumps(variables))
    if num_bytes > MAX_VARIABLES_BYTES:
        raise InvalidRequest(
            f"chat_template_kwargs takes {num_bytes} bytes of JSON; at most {MAX_VARIABLES_BYTES} are taken. "
            "Send less",
            param="chat_template_kwargs",
        )


async def render_chat(body: TemplateFields, request: Request, services: Services) -> str:
    """Return a chat as the text that the model completes.

    Parameters
    ----------
    body : the chat, and how it is to be rendered.
    request : whose chat it is: callers share threads.
    services : of the server.

    Raises
    ------
    ApiError : the model has no chat template, or the arguments of calls hold too much.
    InvalidRequest : fields contradict each other, a message has no content or carries what this server lacks
        (images, sound), or the template refuses the chat or rewrites what it is to continue.
    PromptTooLong : the messages are longer than any text that fits the context.
    ClientGone : the caller has left.
    """
    _check_rendering(body)
    context, encoder, style = context_of(request.scope), services.encoder, services.reply_style
    if (template := services.chat_template) is None:
        raise ApiError(
            400,
            "this model has no chat template (it is a base model); use /v1/completions, or serve with "
            "--chat-template",
            code="no_chat_template",
        )
    context.ignored_fields += unread_variables(body.chat_template_kwargs, template.source)
    size = context.num_body_bytes + _MESSAGE_SIZE * len(body.messages or ())
    async with cancelled_on_disconnect(request.receive):
        return await encoder.render(context.caller, size, lambda: rendered(body, encoder, template, style))


def rendered(body: TemplateFields, encoder: PromptEncoder, template: ChatTemplate, style: ReplyStyle) -> str:
    """Return the same; may take long.

    Parameters
    ----------
    encoder : knows what can fit.
    template : the model's.
    style : how the model calls tools, which tells it where its template does not.
    """
    reader = MessageReader()
    messages = [
        reader.read(message, f"messages[{index}]") for index, message in enumerate(body.messages or ())
    ]
    variables = {
        **(body.chat_template_kwargs or {}),
        "add_generation_prompt": body.add_generation_prompt is not False,
    }
    tools = [] if body.tool_use is None else body.tool_use.shown
    if not template.knows_tools:
        messages = without_tools(messages, tools, style.family or FAMILIES["json"])
    elif tools:
        variables["tools"] = tools
    encoder.check_chat(messages, variables)
    if not body.continue_final_message:
        return template.render(messages, **variables)
    final = messages[-1]
    content = final["content"]
    # only where there is something to trim: templates may look at how a message starts
    marked = _START_MARK * content[:1].isspace() + content
    messages[-1] = {**final, "content": marked + _END_MARK}
    return _continued(template.render(messages, **variables), marked, content)


def continued_text(body: TemplateFields) -> str | None:
    """Return the final message that an answer goes on with; None where it does not."""
    if not (body.continue_final_message and body.messages):
        return None
    return text_of(body.messages[-1], "messages[-1]")


def _continued(rendered: str, marked: str, content: str) -> str:
    """Drop what a template puts after the final message (its end token, a line feed), and the marks.

    Parameters
    ----------
    rendered : the chat with the end mark.
    marked : the final message as the template got it, without the end mark.
    content : the same without any mark, with which the prompt is to end.

    Raises
    ------
    InvalidRequest : the template does not show the message as it is.
    """
    shown, mark, _ = rendered.rpartition(_END_MARK)
    if not mark:
        raise InvalidRequest(
            "the chat template does not show the final message to its end, so it cannot be continued",
            param="continue_final_message",
        )
    if not shown.endswith(marked):
        end, written = content[-_QUOTED_END:], shown.replace(_START_MARK, "")[-_QUOTED_END:]
        what = "its beginning" if written == end else f"{end!r} to {written!r}"
        raise InvalidRequest(
            f"the chat template changes the final message ({what}), so it cannot be continued as it is. Send "
            "it as the template writes it, or a whole prompt to /v1/completions",
            param="continue_final_message",
        )
    return shown.removesuffix(marked) + content
