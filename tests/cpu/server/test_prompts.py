"""Where tokenizing happens, and what does not reach it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import InvalidRequest, PromptTooLong
from onbeat.server.engine_requests import fit_max_tokens
from onbeat.server.prompts import EncodeOptions, PromptEncoder
from onbeat.text.chat_template import ChatTemplate
from tests.fakes_engine import BOS, VOCAB_SIZE, ByteTokenizer

PLAIN = EncodeOptions(add_special_tokens=False)
CALLER = "somebody"


class WatchedTokenizer(ByteTokenizer):
    """Remembers the threads it ran in."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.longest = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.current_thread().name)
        self.longest = max(self.longest, len(text))
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture
def tokenizer() -> WatchedTokenizer:
    return WatchedTokenizer()


@pytest.fixture
def encoder(tokenizer: WatchedTokenizer) -> Iterator[PromptEncoder]:
    encoder = PromptEncoder(tokenizer, vocab_size=VOCAB_SIZE, max_model_len=1000)
    yield encoder
    encoder.close()


async def test_long_texts_are_tokenized_off_the_event_loop(
    encoder: PromptEncoder, tokenizer: WatchedTokenizer
) -> None:
    await encoder.encode_all(["short"], PLAIN, CALLER)
    await encoder.encode_all(["long" * 10_000], PLAIN, CALLER)
    assert tokenizer.threads[0] == threading.current_thread().name
    assert tokenizer.threads[1].startswith("onbeat-encode")


async def test_texts_that_cannot_fit_are_not_tokenized(
    encoder: PromptEncoder, tokenizer: WatchedTokenizer
) -> None:
    with pytest.raises(PromptTooLong):
        await encoder.encode_all(["x" * 300_000], PLAIN, CALLER)
    assert tokenizer.threads == []
    cut = EncodeOptions(add_special_tokens=False, truncate_to=7)
    for text in ("x" * 300_000, "x" * 200_000):
        assert list(map(len, await encoder.encode_all([text + "y"], cut, CALLER))) == [7]
    assert tokenizer.longest < 210_000, "what is cut off is not tokenized"


async def test_a_text_whose_tokens_the_model_lacks_is_refused(tokenizer: WatchedTokenizer) -> None:
    """Tokens that were added to the tokenizer alone: in the engine they would fail all requests of a step."""
    encoder = PromptEncoder(tokenizer, vocab_size=BOS, max_model_len=1000)
    with pytest.raises(
        InvalidRequest,
        match=r" id 257, .*\b257 tokens",
    ):
        await encoder.encode_all(["text"], EncodeOptions(add_special_tokens=True), CALLER)
    assert await encoder.encode_all(["ab"], PLAIN, CALLER) == [[97, 98]]
    encoder.close()


async def test_many_short_prompts_are_tokenized_off_the_event_loop(
    encoder: PromptEncoder, tokenizer: WatchedTokenizer
) -> None:
    assert await encoder.encode_all(["ab"] * 2000, PLAIN, CALLER) == [[97, 98]] * 2000
    assert {name[:13] for name in tokenizer.threads} == {"onbeat-encode"}


class WatchedTemplate(ChatTemplate):
    """Remembers the threads it ran in."""

    def __init__(self) -> None:
        super().__init__("{% for m in messages %}{{ m.content }}{% endfor %}", bos_token="", eos_token="")
        self.threads: list[str] = []

    def render(self, messages: Any, *, add_generation_prompt: bool = True, **variables: Any) -> str:
        self.threads.append(threading.current_thread().name)
        return super().render(messages, add_generation_prompt=add_generation_prompt, **variables)


async def test_chats_are_rendered_off_the_event_loop(encoder: PromptEncoder) -> None:
    """Another process does so, and a thread of its own waits for it."""
    template = WatchedTemplate()
    await encoder.render(CALLER, 2, lambda: template.render([{"role": "user", "content": "hi"}]))
    assert [name.startswith("onbeat-render") for name in template.threads] == [True]


@given(
    num_prompt=st.integers(0, 200),
    asked=st.none() | st.integers(1, 200),
    default=st.integers(1, 200),
    limit=st.integers(1, 200),
)
def test_prompt_and_answer_always_fit(num_prompt: int, asked: int | None, default: int, limit: int) -> None:
    if num_prompt + (asked or 1) > limit:
        with pytest.raises(PromptTooLong) as caught:
            fit_max_tokens(num_prompt, asked=asked, default=default, max_model_len=limit, param="messages")
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
        return
    got = fit_max_tokens(num_prompt, asked=asked, default=default, max_model_len=limit, param="messages")
    assert 1 <= got <= limit - num_prompt
    assert got == asked or (asked is None and got <= default)
