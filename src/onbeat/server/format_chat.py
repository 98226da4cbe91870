"""The answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from onbeat.core.protocols import Tokenizer
from onbeat.server.answer import FinishedChoice
from onbeat.server.answer_head import AnswerHead, AnswerOptions, Extras
from onbeat.server.generation import ChoiceDelta
from onbeat.server.logprobs import chat_logprobs
from onbeat.server.sse import ChunkTemplate, event


class ChatFormat:
    """Writes chat completions and their chunks."""

    def __init__(self, head: AnswerHead, options: AnswerOptions, tokenizer: Tokenizer, role: str) -> None:
        self._head = head
        self._options = options
        self._tokenizer = tokenizer
        self._role = role
        self._chunk_fields = head.fields("chat.completion.chunk")
        self._template = ChunkTemplate(self._chunk_fields, has_usage=options.include_usage)
        self._started: set[int] = set()

    def events(self, delta: ChoiceDelta, extras: Extras) -> bytes:
        index = delta.choice.index
        if index in self._started:
            return self._template.chunk(self._choice(delta), extras)
        self._started.add(index)
        start = self._start(delta, extras.usage)
        if not delta.text and delta.finish_reason is None:
            return start
        return start + self._template.chunk(self._choice(delta), extras)

    def usage_event(self, extras: Extras) -> bytes:
        return event({**self._chunk_fields, "choices": [], **extras.fields()})

    def response(self, choices: Sequence[FinishedChoice], extras: Extras) -> dict[str, Any]:
        answer = {
            **self._head.fields("chat.completion"),
            "choices": [self._whole(choice) for choice in choices],
        }
        if self._options.token_ids:
            answer["prompt_token_ids"] = list(choices[0].choice.request.prompt_token_ids)
        return answer | extras.fields()

    def _start(self, delta: ChoiceDelta, usage: dict[str, Any] | None) -> bytes:
        """Return the chunk that names the role of a choice."""
        choice = {
            "index": delta.choice.index,
            "delta": {"role": self._role, "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if usage is not None:
            usage = {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        ids = delta.choice.request.prompt_token_ids if self._options.token_ids else None
        return self._template.chunk(orjson.dumps(choice), Extras(usage=usage, prompt_token_ids=ids))

    def _choice(self, delta: ChoiceDelta) -> bytes:
        content = b'{"content":' + orjson.dumps(delta.text) + b"}" if delta.text else b"{}"
        parts = [b'{"index":%d,"delta":' % delta.choice.index, content, b',"logprobs":']
        if self._options.logprobs and delta.tokens:
            parts.append(orjson.dumps(chat_logprobs(delta.tokens, self._tokenizer)))
        else:
            parts.append(b"null")
        if self._options.token_ids:
            parts += (b',"token_ids":', orjson.dumps(delta.token_ids))
        if delta.finish_reason is None:
            parts.append(b',"finish_reason":null}')
        else:
            reason, stop = orjson.dumps(delta.finish_reason), orjson.dumps(delta.choice.stop_reason)
            parts += (b',"finish_reason":', reason, b',"stop_reason":', stop, b"}")
        return b"".join(parts)

    def _whole(self, finished: FinishedChoice) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": finished.choice.index,
            # no null `refusal`: clients send the message back, and some make a field of their own out of it
            "message": {"role": self._role, "content": finished.text},
            "logprobs": chat_logprobs(finished.tokens, self._tokenizer) if self._options.logprobs else None,
            "finish_reason": finished.finish_reason,
            "stop_reason": finished.choice.stop_reason,
        }
        if self._options.token_ids:
            choice["token_ids"] = finished.choice.token_ids
        return choice
