"""Which family a chat template is for, and the names that flags know."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onbeat.core.errors import ConfigError
from onbeat.text.chat_template import ChatTemplate
from onbeat.text.reply.families import (
    FAMILIES,
    REASONING,
    family_named,
    family_of,
    reasoning_named,
    reasoning_of,
)
from onbeat.text.reply.parser import opens_in_reasoning
from tests.chat_templates import GEMMA4, TEMPLATES
from tests.pure.text.reply.cases import MIX
from tests.pure.text.reply.reading import read

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
    "gemma4": GEMMA4,
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


@pytest.mark.parametrize("thinks", [False, True])
def test_gemma_4_reads_back_what_its_template_writes(thinks: bool) -> None:
    template = ChatTemplate(GEMMA4, bos_token="<bos>", eos_token="<eos>")
    call = {"function": {"name": "mix", "arguments": json.loads(MIX)}}
    asked: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    said = [{"role": "assistant", "reasoning_content": "Hm.", "content": "So:", "tool_calls": [call, call]}]
    tools = [{"function": {"name": "mix", "parameters": {"type": "object"}}}]
    start = template.render(asked, tools=tools, enable_thinking=thinks)
    marks = reasoning_of(GEMMA4, lambda _: False)
    assert ('<|tool>declaration:mix{type:<|"|>object<|"|>}<tool|>' in start, "<|think|>" in start) == (
        True,
        thinks,
    )
    assert not opens_in_reasoning(start, marks, None)
    whole = template.render(asked + said, tools=tools, enable_thinking=thinks, add_generation_prompt=False)
    answer = whole.removeprefix(start.removesuffix("<|channel>thought\n<channel|>"))
    found = read("gemma4", answer)
    assert (found.reasoning, found.content) == ("Hm.", "So:")
    assert found.arguments == [("mix", json.loads(MIX))] * 2
    result = {"role": "tool", "name": "mix", "content": "ok"}
    behind = template.render([*asked, *said, result], tools=tools, enable_thinking=thinks)
    assert opens_in_reasoning(behind, marks, None) is thinks
    assert read("gemma4", "Hm.<channel|>So.", opens_in_reasoning=thinks).reasoning == "Hm." * thinks


def test_unknown_names_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="'kimi'"):
        family_named("kimi")
    with pytest.raises(ConfigError, match=r"'x'.* auto, none, .* think, mistral"):
        reasoning_named("x")
    assert reasoning_named("openai_gptoss") is reasoning_of(SIGNS["harmony"], lambda _: False)
    assert reasoning_named("gemma4") is reasoning_of(GEMMA4, lambda _: False)
    assert reasoning_named("deepseek_r1") is reasoning_named("qwen3") is REASONING["think"]
