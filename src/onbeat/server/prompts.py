"""From what a caller sent to the token ids that the engine gets, without blocking other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from onbeat.core.errors import InvalidRequest, PromptTooLong
from onbeat.core.protocols import Tokenizer
from onbeat.server.errors import ApiError
from onbeat.server.protocol_completion import PromptInput
from onbeat.server.sampling_fields import check_token_ids
from onbeat.text.chat_template import ChatTemplate

_INLINE_CHARACTERS = 2048
"""Longer texts are encoded in a thread; below, in some 2 ms, the hand-over is not worth it."""

_SUSPECT_CHARACTERS = 2**18
"""Texts from here on are first held against the longest text that the context could ever hold."""

_CONTINUE_MARK = "\ue000onbeat-continue\ue000 "

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeOptions:
    """How texts become prompts."""

    add_special_tokens: bool
    truncate_to: int | None = None
    """Keep only the last tokens, this many."""
    param: str = "prompt"
    """The field that errors name."""


class PromptEncoder:
    """Tokenizes prompts and checks what they may be.

    Parameters
    ----------
    tokenizer : the model's.
    vocab_size : token ids of prompts must be below.
    max_model_len : most tokens of a request.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._longest_token: int | None = None
        # Two threads, so that many long prompts cannot take all cores from the engine.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="onbeat-encode")
        self._render_thread = ThreadPoolExecutor(1, thread_name_prefix="onbeat-render")

    def close(self) -> None:
        """Let go of the threads."""
        for threads in (self._threads, self._render_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, prompt: PromptInput, options: EncodeOptions) -> list[int]:
        """Return the token ids of a prompt; raise as `encode_all` does."""
        (token_ids,) = await self.encode_all([prompt], options)
        return token_ids

    async def encode_all(self, prompts: Sequence[PromptInput], options: EncodeOptions) -> list[list[int]]:
        """Return the token ids of the prompts of one request.

        Raises
        ------
        InvalidRequest : a prompt is empty or holds token ids outside of the vocabulary.
        PromptTooLong : a text is longer than any text that fits the context.
        """
        size = sum(map(len, prompts))
        return await self.off_loop(size, lambda: [self._token_ids(prompt, options) for prompt in prompts])

    def _token_ids(self, prompt: PromptInput, options: EncodeOptions) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self._encode(prompt, options)
        else:
            check_token_ids(prompt, self._vocab_size, options.param)
            token_ids = prompt
        if options.truncate_to is not None:
            token_ids = token_ids[-options.truncate_to :]
        if not token_ids:
            raise InvalidRequest(
                f"{options.param} is empty and the model has no start token; send some text",
                param=options.param,
            )
        return token_ids

    async def encode_text(self, text: str, options: EncodeOptions) -> list[int]:
        """Return the token ids of a text, which may be empty.

        Raises
        ------
        PromptTooLong : the text is longer than any text that fits the context.
        """
        return await self.off_loop(len(text), lambda: self._encode(text, options))

    async def render(
        self, template: ChatTemplate, messages: list[dict[str, Any]], variables: dict[str, Any]
    ) -> str:
        """Return a chat as the template writes it; `variables` are the keyword arguments of `render`."""
        try:
            # Another process renders: while this one waits for it, nobody else shall.
            return await asyncio.get_running_loop().run_in_executor(
                self._render_thread, lambda: template.render(messages, **variables)
            )
        except RecursionError as error:
            raise InvalidRequest(
                "chat_template_kwargs is nested too deep for the chat template", param="chat_template_kwargs"
            ) from error

    async def off_loop(self, size: int, work: Callable[[], _T]) -> _T:
        """Do work in a thread if it takes longer than the hand-over.

        Parameters
        ----------
        size : characters that take as long to encode, or tokens to decode.
        work : what to do; its errors are raised here.
        """
        if size <= _INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _encode(self, text: str, options: EncodeOptions) -> list[int]:
        if len(text) > _SUSPECT_CHARACTERS:
            self._check_length(text, options.param)
        return self._tokenizer.encode(text, add_special_tokens=options.add_special_tokens)

    def _check_length(self, text: str, param: str) -> None:
        """Refuse a text that cannot fit before minutes are spent on tokenizing it, be it to truncate it."""
        if self._longest_token is None:
            ids = range(self._tokenizer.vocab_size)
            self._longest_token = max(len(self._tokenizer.token_bytes(token_id)) for token_id in ids)
        least = len(text.encode()) // max(self._longest_token, 1)
        if least >= self._max_model_len:
            raise PromptTooLong(
                f"the prompt has at least {least} tokens; this model takes at most {self._max_model_len} "
                "with the answer. Shorten it",
                param=param,
            )


async def chat_prompt(
    encoder: PromptEncoder,
    template: ChatTemplate | None,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
    variables: dict[str, Any] | None = None,
) -> str:
    """Return a chat as the text that the model completes.

    Raises
    ------
    ApiError : the model has no chat template.
    InvalidRequest : the template refuses these messages.
    """
    if template is None:
        raise ApiError(
            400,
            "this model has no chat template (it is a base model); use /v1/completions, or serve with "
            "--chat-template",
            code="no_chat_template",
        )
    named = {**(variables or {}), "add_generation_prompt": add_generation_prompt}
    if not continue_final_message:
        return await encoder.render(template, messages, named)
    final = {**messages[-1], "content": messages[-1]["content"] + _CONTINUE_MARK}
    return _cut_at_mark(await encoder.render(template, [*messages[:-1], final], named))


def _cut_at_mark(rendered: str) -> str:
    """Drop what a template puts after the final message: its end token, a line feed."""
    mark = _CONTINUE_MARK.rstrip()
    start = rendered.rfind(mark)
    if start < 0:
        raise InvalidRequest(
            "the chat template does not show the final message, so it cannot be continued",
            param="continue_final_message",
        )
    text = rendered[:start]
    # A template that strips messages took the mark's trailing space; it would have stripped the text's too.
    return text if rendered.startswith(_CONTINUE_MARK, start) else text.rstrip()


def fit_max_tokens(
    num_prompt_tokens: int, *, asked: int | None, default: int, max_model_len: int, param: str
) -> int:
    """Return how many output tokens a request may have.

    Parameters
    ----------
    num_prompt_tokens : tokens of the prompt.
    asked : the caller's limit, which must fit beside the prompt.
    default : the limit without one, cut to what fits.
    max_model_len : most tokens of prompt and output.
    param : the prompt's field, for errors.

    Raises
    ------
    PromptTooLong : the prompt leaves no room, or less than was asked for.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {num_prompt_tokens} tokens; this model takes at most {max_model_len} with the "
            "answer. Shorten it",
            param=param,
        )
    if asked is not None and asked > room:
        raise PromptTooLong(
            f"the prompt has {num_prompt_tokens} tokens and {asked} more are asked for; this model takes at "
            f"most {max_model_len} together. Shorten the prompt or ask for at most {room}",
            param=param,
        )
    return min(default, room) if asked is None else asked


def truncation(asked: int | None, *, max_model_len: int, max_tokens: int | None) -> int | None:
    """Return how many prompt tokens to keep; `asked` is the field `truncate_prompt_tokens`."""
    if asked == -1:
        return max(max_model_len - (max_tokens or 1), 1)
    return asked
