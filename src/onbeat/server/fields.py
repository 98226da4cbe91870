"""Which fields of a request's body are honoured, which are harmless, and which are refused.

A field of OpenAI's or vLLM's API that cannot change the output is accepted and dropped. One that would change
it, and that onbeat lacks, is refused by name unless it has the value that asks for nothing. Any other field
is the caller's mistake, and says so: dropped silently, a misspelt `temperature` would change every answer.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Any

from onbeat.core.errors import InvalidRequest
from onbeat.server.errors import unsupported

HARMLESS = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("request_id", "session_id", "include_reasoning"),
    )
)
"""Accepted with any value: they change nothing about the text."""

_LONGEST_NAME = 100
"""Characters of a name that are looked at and repeated; no field of any API has one as long."""

_OFF: tuple[Any, ...] = (None, False)
_EMPTY: tuple[Any, ...] = (None, [], {}, "")

NO_OP_VALUES: Mapping[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": _EMPTY,
    "function_call": (None, "none", "auto"),
    "functions": _EMPTY,
    "modalities": (None, ["text"]),
    "moderation": _EMPTY,
    "prediction": _EMPTY,
    "reasoning_effort": _EMPTY,
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none", "auto"),
    "tools": _EMPTY,
    "verbosity": _EMPTY,
    "web_search_options": (None,),
    "best_of": (None, 1),
    "suffix": _EMPTY,
    # vLLM's
    "bad_words": _EMPTY,
    "chat_template": _EMPTY,
    "documents": _EMPTY,
    "echo": _OFF,
    "guided_choice": _EMPTY,
    "guided_decoding_backend": _EMPTY,
    "guided_grammar": _EMPTY,
    "guided_json": _EMPTY,
    "guided_regex": _EMPTY,
    "guided_whitespace_pattern": _EMPTY,
    "kv_transfer_params": _EMPTY,
    "length_penalty": (None, 1),
    "logits_processors": _EMPTY,
    "logprob_token_ids": _EMPTY,
    "media_io_kwargs": _EMPTY,
    "mm_processor_kwargs": _EMPTY,
    "prompt_embeds": _EMPTY,
    "prompt_logprobs": (None,),
    "repetition_detection": _EMPTY,
    "return_tokens_as_token_ids": _OFF,
    "spaces_between_special_tokens": (None, True),
    "stream_interval": (None, 1),
    "structural_tag": _EMPTY,
    "structured_outputs": _EMPTY,
    "thinking_token_budget": (None,),
    "use_beam_search": _OFF,
    "vllm_xargs": _EMPTY,
}
"""Output-changing fields that onbeat lacks, with the values that ask for nothing."""


def check_fields(
    body: Mapping[str, Any], honoured: Iterable[str], *, extra_no_ops: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the honoured fields of a body.

    Parameters
    ----------
    body : the parsed JSON object.
    honoured : fields that the endpoint understands.
    extra_no_ops : further (field, the one value it may have), which depend on the request.

    Raises
    ------
    InvalidRequest : a field is unknown, or is known and asks for something that onbeat lacks.
    """
    honoured = set(honoured)
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if name in honoured:
            kept[name] = value
        elif name in NO_OP_VALUES:
            _check_no_op(name, value, (*NO_OP_VALUES[name], *_one_of(extra_no_ops, name)))
        elif name not in HARMLESS:
            raise _unknown(name, honoured)
    return kept


def _one_of(values: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    return (values[name],) if name in values else ()


def _check_no_op(name: str, value: object, no_ops: tuple[Any, ...]) -> None:
    # by type as well: 1 == True in Python
    if not any(value == no_op and isinstance(value, bool) == isinstance(no_op, bool) for no_op in no_ops):
        raise unsupported(f"{name} is not supported by this server; leave it out", name)


def _unknown(name: str, honoured: set[str]) -> InvalidRequest:
    near = near_match(name, sorted(honoured | HARMLESS | NO_OP_VALUES.keys()))
    cure = f"did you mean {near!r}?" if near else "leave it out"
    name = name[:_LONGEST_NAME]
    return InvalidRequest(f"unknown field {name!r}; {cure}", param=name, code="unknown_parameter")


def near_match(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant. Of a long name only the start is compared."""
    return next(iter(difflib.get_close_matches(name[:_LONGEST_NAME], list(known), n=1)), None)


def with_one_unknown(value: Any, known: Collection[str]) -> Any:
    """Return an object with but one of its unknown fields, if it has more fields than are known.

    For models that forbid unknown fields: pydantic makes an error of each, and a body may have 100,000.
    """
    if not isinstance(value, dict) or len(value) <= len(known):
        return value
    unknown = next(name for name in value if name not in known)
    return {name: value[name] for name in (*known, unknown) if name in value}


class _Quote(reprlib.Repr):
    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)  # which sorts them


quoted = _Quote().repr
"""Returns a value, shortened, as errors repeat it, in a time that does not grow with it."""
