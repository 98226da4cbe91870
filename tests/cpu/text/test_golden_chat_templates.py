"""Chat templates in the manner of well-known model families, against transformers' renderer."""

from __future__ import annotations

from typing import Any

import pytest

from onbeat.core.errors import InvalidRequest
from onbeat.text.chat_template import ChatTemplate

pytestmark = [
    pytest.mark.golden,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # transformers' own imports
]

LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is defined and tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- '\\n\\n' }}
    {%- endfor %}
{%- endif %}
{{- 'Today: ' + (date_string if date_string is defined else 'unknown') + '\\n\\n' + system + '<|eot_id|>' }}
{%- for message in rest %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""  # noqa: E501 (as such templates are written)

QWEN = """\
{%- set ns = namespace(last_question=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.last_question < 0 and message.role == "user" %}{% set ns.last_question = index %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last_question %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string %}{% generation %}{{ message['content'] | trim }}{% endgeneration %}{% endif %}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""  # noqa: E501

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


@pytest.mark.parametrize("source", [LLAMA3, QWEN, GEMMA], ids=["llama3", "qwen", "gemma"])
@pytest.mark.parametrize("chat", CHATS, ids=["short", "system", "turns"])
@pytest.mark.parametrize(
    "variables", [{}, {"date_string": "1 May"}, {"enable_thinking": False}, {"tools": TOOLS}], ids=str
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
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


def test_the_templates_own_words_reach_the_caller():
    template = ChatTemplate(GEMMA, bos_token="<bos>", eos_token="<eos>")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render([{"role": "assistant", "content": "x"}])
