"""From text to the token ids that the engine gets, without blocking other requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, Field, WithJsonSchema

from onbeat.core.errors import InvalidRequest, PromptTooLong, first_of
from onbeat.core.tokenizer import Tokenizer
from onbeat.server.fair_threads import FairThreads
from onbeat.server.fields import WHOLE, Flag

_INLINE_CHARACTERS = 2048
"""Longer texts are encoded in a thread; below, in some 2 ms, the hand-over is not worth it."""

_SUSPECT_CHARACTERS = 2**18
"""Texts from here on are first held against the longest text that the context could ever hold."""

_PIECE_SIZE = 2**16
"""Of many prompts so much is encoded at a time, between which others have their turn."""

TOKEN_ID_SCHEMA = {"type": "integer", "format": "token-id", "minimum": 0}
"""Of the API's description, which adds the largest."""
TokenId = Annotated[int, WithJsonSchema(TOKEN_ID_SCHEMA)]

PromptInput = str | list[int]
"""Text, or token ids."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeOptions:
    """How texts become prompts."""

    add_special_tokens: bool
    truncate_to: int | None = None
    """Keep only the last tokens, this many."""
    keeps_first: bool = False
    """Keep the first ones instead."""
    param: str = "prompt"
    """The field that errors name."""


class EncodingFields(BaseModel):
    """The fields of a body that say how its texts become tokens."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1), WHOLE] | None = None
    """Keep only this many of a text's tokens; -1 keeps what fits."""
    truncation_side: Literal["left", "right"] | None = None
    """Whether its last tokens are kept (left, the default) or its first."""
    add_special_tokens: Flag | None = None

    def encode_options(
        self, max_model_len: int, *, param: str, special: bool, max_tokens: int | None = None
    ) -> EncodeOptions:
        """Return how texts become tokens.

        Parameters
        ----------
        max_model_len : most tokens of prompt and output.
        param : the field that errors name.
        special : whether special tokens are added where the body says nothing.
        max_tokens : output tokens for which truncation to what fits keeps room; None is one.

        Raises
        ------
        InvalidRequest : truncation leaves nothing.
        """
        asked = self.truncate_prompt_tokens
        if asked == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens is 0, which leaves no prompt; give a number, or -1 for what fits",
                param="truncate_prompt_tokens",
            )
        return EncodeOptions(
            add_special_tokens=special if self.add_special_tokens is None else self.add_special_tokens,
            truncate_to=max(max_model_len - (max_tokens or 1), 1) if asked == -1 else asked,
            keeps_first=self.truncation_side == "right",
            param=param,
        )


class PromptEncoder:
    """Tokenizes prompts and checks what they may be.

    Parameters
    ----------
    tokenizer : the model's.
    vocab_size : the model's; token ids of prompts must be below.
    max_model_len : most tokens of a request.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        # Two threads, so that many long prompts cannot take all cores from the engine.
        self._threads = FairThreads("onbeat-encode", num_threads=2, num_short=1)
        # One process renders: while a thread waits for it, nobody else shall.
        self._render_thread = FairThreads("onbeat-render", num_threads=1)

    def close(self) -> None:
        """Let go of the threads."""
        for threads in (self._threads, self._render_thread):
            threads.close()

    async def encode_all(
        self, prompts: Sequence[PromptInput], options: EncodeOptions, caller: str
    ) -> list[list[int]]:
        """Return the token ids of the prompts of one request.

        Parameters
        ----------
        prompts : texts, or token ids.
        options : how texts become tokens.
        caller : who shares the threads with others (`HttpContext.caller`).

        Raises
        ------
        InvalidRequest : a prompt is empty or holds token ids outside of the vocabulary.
        PromptTooLong : a text is longer than any text that fits the context.
        """
        encoded: list[list[int]] = []
        for piece in _pieces(prompts):

            def encode(piece: Sequence[PromptInput] = piece) -> list[list[int]]:
                return [self._token_ids(prompt, options) for prompt in piece]

            encoded += await self.off_loop(caller, sum(map(len, piece)), encode)
        return encoded

    def _token_ids(self, prompt: PromptInput, options: EncodeOptions) -> list[int]:
        token_ids = self._encode(prompt, options) if isinstance(prompt, str) else _truncated(prompt, options)
        # of a text too: its tokenizer may know tokens that were added behind the model's embedding
        check_token_ids(token_ids, self._vocab_size, options.param)
        if not token_ids:
            raise InvalidRequest(
                f"{options.param} is empty and the model has no start token; send some text",
                param=options.param,
            )
        return token_ids

    async def encode_text(self, text: str, options: EncodeOptions, caller: str) -> list[int]:
        """Return the token ids of a text, which may be empty.

        Raises
        ------
        PromptTooLong : the text is longer than any text that fits the context.
        """
        return await self.off_loop(caller, len(text), lambda: self._encode(text, options))

    async def render(self, caller: str, size: int, work: Callable[[], str]) -> str:
        """Make a prompt of a chat, in the one thread that does so.

        Parameters
        ----------
        caller : who shares the thread with others (`HttpContext.caller`).
        size : bytes that take as long.
        work : renders it; its errors are raised here.

        Raises
        ------
        InvalidRequest : the template cannot follow what it is given.
        """
        try:
            return await self._render_thread.run(caller, size, work)
        except RecursionError as error:
            raise InvalidRequest(
                "chat_template_kwargs is nested too deep for the chat template", param="chat_template_kwargs"
            ) from error

    def check_chat(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> None:
        """Refuse what no template could make fit; may take long itself.

        Parameters
        ----------
        messages, variables : as a template gets them.

        Raises
        ------
        PromptTooLong : they are longer than any text that fits the context.
        """
        values = [*chain.from_iterable(message.values() for message in messages), variables.get("tools", "")]
        # calls and tools are objects, which templates write as JSON
        texts = [value if isinstance(value, str) else orjson.dumps(value).decode() for value in values]
        if sum(map(len, texts)) > _SUSPECT_CHARACTERS:
            self._check_length(texts, "messages")

    async def off_loop(self, caller: str, size: int, work: Callable[[], _T]) -> _T:
        """Do work in a thread if it takes longer than the hand-over.

        Parameters
        ----------
        caller : who shares the threads with others (`HttpContext.caller`).
        size : characters that take as long to encode, or tokens to decode.
        work : what to do; its errors are raised here.
        """
        if size <= _INLINE_CHARACTERS:
            return work()
        return await self._threads.run(caller, size, work)

    def _encode(self, text: str, options: EncodeOptions) -> list[int]:
        if len(text) > _SUSPECT_CHARACTERS:
            if (num := options.truncate_to) is None or num > self._max_model_len:
                self._check_length([text], options.param)
            else:  # what is surely left out takes no time; where a text is cut its tokens may be others
                most = 2 * num * self._longest_token
                text = text[:most] if options.keeps_first else text[-most:]
        token_ids = self._tokenizer.encode(text, add_special_tokens=options.add_special_tokens)
        return _truncated(token_ids, options)

    def _check_length(self, texts: Sequence[str], param: str) -> None:
        """Refuse text that cannot fit before minutes are spent on tokenizing it."""
        least = sum(len(text.encode()) for text in texts) // self._longest_token
        if least > self._max_model_len:
            raise PromptTooLong(
                f"the text has at least {least} tokens; this model takes at most {self._max_model_len}. "
                "Shorten it",
                param=param,
            )

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token."""
        token_bytes = self._tokenizer.token_bytes
        return max(1, *(len(token_bytes(token_id)) for token_id in range(self._tokenizer.vocab_size)))


def _pieces(prompts: Sequence[PromptInput]) -> Iterator[Sequence[PromptInput]]:
    """Split prompts where they come to more than a piece; a long one is a piece of its own."""
    start = size = 0
    for index, prompt in enumerate(prompts):
        if size and size + len(prompt) > _PIECE_SIZE:
            yield prompts[start:index]
            start, size = index, 0
        size += len(prompt)
    yield prompts[start:]


def _truncated(token_ids: list[int], options: EncodeOptions) -> list[int]:
    if (num := options.truncate_to) is None:
        return token_ids
    return token_ids[:num] if options.keeps_first else token_ids[-num:]


def check_token_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    """Check that token ids are in the vocabulary."""
    if min(token_ids, default=0) < 0 or max(token_ids, default=0) >= vocab_size:
        others = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
        raise InvalidRequest(
            f"{param} holds the token id{'s' * (len(others) > 1)} {first_of(others)}, out of vocabulary: "
            f"ids of this model's {vocab_size} tokens begin at 0",
            param=param,
        )
