"""Chat templates in the manner of well-known model families, against transformers' renderer."""

from __future__ import annotations

from typing import Any

import pytest

from onbeat.core.errors import InvalidRequest
from onbeat.server.chat import ChatCompletionRequest
from onbeat.server.chat_prompt import rendered as rendered_chat
from onbeat.server.prompts import PromptEncoder
from onbeat.text.chat_template import ChatTemplate
from onbeat.text.reply.parser import ReplyStyle
from tests.chat_templates import GEMMA, TEMPLATES
from tests.fakes_engine import VOCAB_SIZE, ByteTokenizer
from tests.many_cases import each_case

pytestmark = [
    pytest.mark.golden,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # transformers' own imports
]

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Why is the sky blue?"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": '  <b>é & "日本"</b> \n'}],
    [
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
        {"role": "assistant", "content": "<think>hm</think>\n\n49"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "<think>ok</think>\n\nmore"},
        {"role": "user", "content": ""},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é> & 'x'", "parameters": {}}}]


@each_case("source", TEMPLATES.values())
@each_case("chat", CHATS)
@each_case("variables", [{}, {"date_string": "1 May"}, {"enable_thinking": False}, {"tools": TOOLS}])
@each_case("add_generation_prompt", [True, False])
def test_equals_transformers(
    source: str, chat: list[dict[str, Any]], variables: dict[str, Any], add_generation_prompt: bool
):
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens: dict[str, Any] = {"bos_token": "<bos>", "eos_token": "<eos>"}
    rendered: Any = render_jinja_template(
        [chat], chat_template=source, add_generation_prompt=add_generation_prompt, **variables, **tokens
    )
    ours = ChatTemplate(source, **tokens).render(
        chat, add_generation_prompt=add_generation_prompt, **variables
    )
    assert ours == rendered[0][0]


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("content", ["The sum is", "two\nlines", "<think>\nhm\n</think>\n\n4"])
def test_a_continued_chat_equals_transformers(source: str, content: str):
    """Where nothing is to be trimmed; transformers loses what its templates trim."""
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens: dict[str, Any] = {"bos_token": "<bos>", "eos_token": "<eos>"}
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": content}]
    rendered: Any = render_jinja_template([chat], chat_template=source, continue_final_message=True, **tokens)
    body = ChatCompletionRequest.model_validate(
        {"messages": chat, "continue_final_message": True, "add_generation_prompt": False}, context={}
    )
    encoder = PromptEncoder(ByteTokenizer(), vocab_size=VOCAB_SIZE, max_model_len=1000)
    text = rendered_chat(body, encoder, ChatTemplate(source, **tokens), ReplyStyle(None, None))
    encoder.close()
    assert text == rendered[0][0]


def test_the_templates_own_words_reach_the_caller():
    template = ChatTemplate(GEMMA, bos_token="<bos>", eos_token="<eos>")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render([{"role": "assistant", "content": "x"}])
