"""Which family a chat template is for, and the names that flags know."""

from __future__ import annotations

import pytest

from onbeat.core.errors import ConfigError
from onbeat.text.reply.families import (
    FAMILIES,
    REASONING,
    family_named,
    family_of,
    reasoning_named,
    reasoning_of,
)
from tests.chat_templates import TEMPLATES

SIGNS = {
    "hermes": 'return a json object within <tool_call></tool_call>: {"name": <name>, "arguments": <args>}',
    "qwen3-xml": "reply ONLY in the following format: <tool_call>\n<function=example>\n<parameter=a>",
    "llama3-json": 'Environment: ipython ... in the format {"name": name, "parameters": dictionary}',
    "pythonic": "put it in the format of [func_name1(params_name1=params_value1), func_name2(params)]",
    "mistral": '{{- "[TOOL_CALLS] [" }}{{ tool_call.function|tojson }}',
    "mistral-args": '{{- "[TOOL_CALLS]" + name + "[ARGS]" + arguments }}',
    "phi": "{{ '<|tool_call|>' + calls + '<|/tool_call|>' }}",
    "granite": "{{ '<|start_of_role|>assistant<|tool_call|>' + calls }}",
    "harmony": "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}",
    "json": "{{ message.content }}",
}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_template_shows_its_family(name: str) -> None:
    assert family_of(SIGNS[name]) is FAMILIES[name]


@pytest.mark.parametrize(("name", "is_reasoning"), [("qwen3", True), ("llama3", False), ("smollm2", False)])
def test_a_template_or_a_vocabulary_shows_reasoning(name: str, is_reasoning: bool) -> None:
    assert (reasoning_of(TEMPLATES[name], lambda _: False) is not None) is is_reasoning
    assert reasoning_of(TEMPLATES[name], {"<think>", "</think>"}.__contains__) is REASONING["think"]
    assert reasoning_of("{% if think %}[THINK]{% endif %}[/THINK]", lambda _: False) is REASONING["mistral"]


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        *(("hermes", "hermes"), ("qwen3_coder", "qwen3-xml"), ("qwen3_xml", "qwen3-xml")),
        *(("llama3_json", "llama3-json"), ("llama4_pythonic", "pythonic"), ("pythonic", "pythonic")),
        *(("mistral", "mistral"), ("granite", "granite"), ("phi4_mini_json", "phi"), ("qwen3", "hermes")),
    ],
)
def test_names_of_other_servers(alias: str, name: str) -> None:
    assert family_named(alias) is FAMILIES[name]


def test_unknown_names_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="'kimi'"):
        family_named("kimi")
    with pytest.raises(ConfigError, match=r"'x'.* auto, none, .* think, mistral"):
        reasoning_named("x")
    assert reasoning_named("openai_gptoss") is reasoning_of(SIGNS["harmony"], lambda _: False)
    assert reasoning_named("deepseek_r1") is reasoning_named("qwen3") is REASONING["think"]
