"""Chats whose last message is to be continued: the prompt ends in the caller's bytes, or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from onbeat.core.errors import InvalidRequest
from onbeat.server.chat import ChatCompletionRequest
from onbeat.server.chat_prompt import rendered as rendered_chat
from onbeat.server.prompts import PromptEncoder
from onbeat.text.chat_template import ChatTemplate
from onbeat.text.reply.parser import ReplyStyle
from tests.chat_templates import GEMMA, LLAMA3, QWEN, QWEN3, SMOLLM2
from tests.cpu.server.running import serving
from tests.fakes_engine import VOCAB_SIZE, ByteTokenizer, FakeEngine
from tests.many_cases import each_case

GO_ON = {"add_generation_prompt": False, "continue_final_message": True}
HEADS = {
    "llama3": (LLAMA3, "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "gemma": (GEMMA, "<start_of_turn>model\n"),
    "smollm2": (SMOLLM2, "<|im_start|>assistant\n"),
    "qwen": (QWEN, "<|im_start|>assistant\n"),
    "qwen3": (QWEN3, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
}
"""Templates, and what they write before an answer that is given; the first two trim every message."""


def continued(source: str, content: str) -> str:
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": content}]
    body = ChatCompletionRequest.model_validate({"messages": chat, **GO_ON}, context={})
    encoder = PromptEncoder(ByteTokenizer(), vocab_size=VOCAB_SIZE, max_model_len=1000)
    try:
        template = ChatTemplate(source, bos_token="<bos>", eos_token="<eos>")
        return rendered_chat(body, encoder, template, ReplyStyle(None, None))
    finally:
        encoder.close()


@each_case("family", HEADS)
@each_case(
    "content",
    ["Sum", "Sum: ", "Sum:\n\n", " Sum", "\n\nSum: \t", "", " ", "\n\n", "a  b", "é\u3000", "<|eot_id|>"],
)
async def test_the_prompt_ends_in_the_callers_bytes(family: str, content: str) -> None:
    source, head = HEADS[family]
    text = continued(source, content)
    assert text.endswith(head + content)
    assert text.count(head) == 1
    assert "\ue000" not in text


async def test_thoughts_of_a_continued_message_stay_where_they_were() -> None:
    content = "<think>\nfour?\n</think>\n\nIt is "
    assert (continued(QWEN3, content)).endswith("<|im_start|>assistant\n" + content)


@pytest.mark.parametrize("tail", ["<end>\n", "\n", ""])
async def test_what_a_template_puts_behind_the_message_is_dropped(tail: str) -> None:
    source = "{% for m in messages %}<{{ m.content | trim }}" + tail + "{% endfor %}"
    assert continued(source, " b ") == "<2 + 2?" + tail + "< b "


THOUGHT = "<think>hm</think>"
LONG = THOUGHT + "words, and more of them than an error would show"
CUT = "does not show the final message to its end"


@each_case(
    ("shown", "content", "problem"),
    [
        ("{{ messages[0].content }}", "five", CUT),
        ("{{ messages[1].content[:3] }}", "five", CUT),
        ("{{ messages[1].content | upper }}", "five", CUT),
        ("{{ messages[1].content.split('</think>')[-1] }}", LONG, "(its beginning)"),
        ("A: {{ messages[1].content.split('>')[-1] }}", THOUGHT + "x", f"({THOUGHT + 'x'!r} to 'A: x')"),
        ("A: {{ messages[1].content | replace('five', '5') }}", " five", "(' five' to 'A:  5')"),
        ("A: {{ messages[1].content | tojson }}", 'a "b"', """('a "b"' to 'A: "a \\\\"b\\\\"')"""),
    ],
)
async def test_a_template_that_writes_another_message_is_an_error(
    shown: str, content: str, problem: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        continued(shown, content)
    assert problem in str(caught.value)
    assert caught.value.param == "continue_final_message"


async def test_both_endpoints_keep_the_end_of_the_message() -> None:
    async with serving(FakeEngine()) as served:
        chat: list[dict[str, Any]] = [{"role": "assistant", "content": "Sum: "}]
        answer = await served.post("/tokenize", {"messages": chat, **GO_ON})
        assert bytes(answer.json["tokens"]) == b"[assistant]Sum: "
        await served.post("/v1/chat/completions", {"messages": chat, **GO_ON})
        assert bytes(served.engine.requests[0].prompt_token_ids) == b"[assistant]Sum: "
