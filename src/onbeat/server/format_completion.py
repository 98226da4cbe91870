"""The answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from onbeat.core.protocols import Tokenizer
from onbeat.server.answer import FinishedChoice
from onbeat.server.answer_head import AnswerHead, AnswerOptions, Extras
from onbeat.server.generation import ChoiceDelta, ShownToken
from onbeat.server.logprobs import completion_logprobs
from onbeat.server.sse import ChunkTemplate, event


class CompletionFormat:
    """Writes text completions and their chunks.

    Parameters
    ----------
    head : what all chunks share.
    options : what the caller wants beside the text.
    tokenizer : the model's.
    echoes : for each prompt the text that goes before its answers, empty unless `echo`.
    """

    def __init__(
        self, head: AnswerHead, options: AnswerOptions, tokenizer: Tokenizer, echoes: Sequence[str]
    ) -> None:
        self._fields = head.fields("text_completion")
        self._options = options
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._template = ChunkTemplate(self._fields, has_usage=options.include_usage)
        self._started: set[int] = set()

    def events(self, delta: ChoiceDelta, extras: Extras) -> bytes:
        choice, text = delta.choice, delta.text
        is_first = choice.index not in self._started
        if is_first:
            self._started.add(choice.index)
            text = self._echoes[choice.prompt_index] + text
        parts = [b'{"index":%d,"text":' % choice.index, orjson.dumps(text), b',"logprobs":']
        parts.append(orjson.dumps(self._logprobs(delta.tokens)))
        if self._options.token_ids:
            parts += (b',"token_ids":', orjson.dumps(delta.token_ids))
            if is_first:
                parts += (b',"prompt_token_ids":', orjson.dumps(choice.request.prompt_token_ids))
        if delta.finish_reason is None:
            parts.append(b',"finish_reason":null}')
        else:
            reason, stop = orjson.dumps(delta.finish_reason), orjson.dumps(choice.stop_reason)
            parts += (b',"finish_reason":', reason, b',"stop_reason":', stop, b"}")
        return self._template.chunk(b"".join(parts), extras)

    def usage_event(self, extras: Extras) -> bytes:
        return event({**self._fields, "choices": [], **extras.fields()})

    def response(self, choices: Sequence[FinishedChoice], extras: Extras) -> dict[str, Any]:
        return {**self._fields, "choices": [self._whole(choice) for choice in choices], **extras.fields()}

    def _whole(self, finished: FinishedChoice) -> dict[str, Any]:
        choice = finished.choice
        result: dict[str, Any] = {
            "index": choice.index,
            "text": self._echoes[choice.prompt_index] + finished.text,
            "logprobs": self._logprobs(finished.tokens),
            "finish_reason": finished.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._options.token_ids:
            result["token_ids"] = choice.token_ids
            result["prompt_token_ids"] = list(choice.request.prompt_token_ids)
        return result

    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any] | None:
        return completion_logprobs(tokens, self._tokenizer) if self._options.logprobs else None
