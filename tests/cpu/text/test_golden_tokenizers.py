# ruff: noqa: RUF001 (characters that look like others are the point)
"""Tokenizers and chat templates built from GGUF metadata against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from onbeat.core.errors import ModelLoadError
from onbeat.hub.resolve import resolve_model
from onbeat.text.chat_template import load_chat_template
from onbeat.text.stream import TextStream
from onbeat.text.tokenizer import VocabularyTokenizer, load_tokenizer
from tests.cpu.gguf_reading import read_once
from tests.examples import examples

pytestmark = [
    pytest.mark.golden,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # transformers' own imports
]

TEXTS = [
    "",
    " ",
    "  leading and trailing  ",
    "Hello, world!",
    "def f(x):\n    return x ** 2  # squared\n\n\n",
    "1 12 123 1234 3.14159 1,000,000",
    "spaces   1 before  23 digits\n\n 4",
    "naïve café — “quotes” … №5",
    "日本語のテキスト。中文字符，한국어",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם مرحبا",
    "emoji 🙂👨‍👩‍👧‍👦🏳️‍🌈 and \u200bzero width",
    "tabs\tand\r\nwindows lines\n\n \n  mixed",
    "can't won't I'll they've it's",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<start_of_turn>user\nhi<end_of_turn><eos>",
    "a" * 300,
    "x" + " " * 50 + "y",
    "\x00\x01\x7f control",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ﬁ ligature e\u0301",
    "https://example.org/a?b=c&d=%20#e_f-g",
    "SELECT * FROM t WHERE a >= 10 AND b != 'x';",
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "  spaces \n and lines "},
    ],
]


class Pair:
    """Ours and theirs, of one model."""

    def __init__(self, name: str) -> None:
        import transformers

        try:
            path = resolve_model(name, offline=True).path
        except ModelLoadError as error:
            pytest.skip(str(error))
        self.ours: VocabularyTokenizer = load_tokenizer(path)
        with read_once():
            self.theirs: Any = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module")
def smollm2() -> Pair:
    pair = Pair("smollm2-135m-instruct")
    # transformers does not know the file's pre-tokenizer `smollm` and takes GPT-2's, which keeps a space with
    # the digit after it. This is the one that the model's tokenizer.json has.
    pair.theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return pair


@pytest.fixture(scope="module")
def gemma3() -> Pair:
    return Pair("gemma3-270m")


def check(pair: Pair, text: str) -> None:
    ids = pair.ours.encode(text)
    assert ids == pair.theirs.encode(text), repr(text)
    for skip in (True, False):
        expected = pair.theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert pair.ours.decode(ids, skip_special_tokens=skip) == expected
    stream = TextStream(pair.ours)
    pieces = [stream.push([token_id], final=False).text for token_id in ids]
    pieces.append(stream.push([], final=True).text)
    assert "".join(pieces) == pair.ours.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2(smollm2: Pair, text: str):
    check(smollm2, text)


@examples(200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60))
def test_smollm2_any_text(smollm2: Pair, text: str):
    check(smollm2, text)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_smollm2_chat(smollm2: Pair, chat: list[dict[str, Any]], add_generation_prompt: bool):
    template = load_chat_template(smollm2.ours, None)
    assert template is not None
    expected = smollm2.theirs.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert template.render(chat, add_generation_prompt=add_generation_prompt) == expected


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_gemma3(gemma3: Pair, text: str):
    check(gemma3, text)


@pytest.mark.slow
@examples(200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60))
def test_gemma3_on_any_text(gemma3: Pair, text: str):
    check(gemma3, text)


@pytest.mark.slow
def test_gemma3_has_no_chat_template(gemma3: Pair):
    assert load_chat_template(gemma3.ours, None) is None
