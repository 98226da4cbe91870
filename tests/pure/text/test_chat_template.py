"""Templates in the sandbox: what they may do, what they may not, what goes wrong clearly."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from onbeat.core.errors import ConfigError, InvalidRequest
from onbeat.text.chat_template import ChatTemplate, load_chat_template
from onbeat.text.limited_process import _send
from tests.fakes_engine import ByteTokenizer

SIMPLE = (
    "{{ bos_token }}{% for message in messages %}"
    "<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def test_renders_messages_and_the_start_of_the_answer():
    assert template(SIMPLE).render(CHAT) == "<s><system>Be brief.</s><user>Hi</s><assistant>"
    assert (
        template(SIMPLE).render(CHAT, add_generation_prompt=False) == "<s><system>Be brief.</s><user>Hi</s>"
    )


def test_variables_reach_the_template():
    assert template("{{ tone }}").render(CHAT, tone="calm") == "calm"


def test_tools_and_documents_are_none_as_transformers_passes_them():
    source = "{% if tools is not none or documents is not none %}wrong{% else %}right{% endif %}"
    assert template(source).render(CHAT) == "right"
    assert template("{{ tools is defined and documents is defined }}").render(CHAT) == "True"


def test_reasoning_goes_by_the_name_that_the_template_reads():
    reads = template("{% for message in messages %}[{{ message.thinking }}]{% endfor %}")
    said = {"role": "assistant", "reasoning_content": "Hm."}
    assert (
        reads.render([{**said, "content": "A"}, {**said, "content": "", "tool_calls": [{}]}]) == "[Hm.][Hm.]"
    )
    assert reads.render([{**said, "content": "A", "tool_calls": [{}]}]) == "[]", "gpt-oss refuses both"


def test_developer_is_system_unless_the_template_knows_it():
    chat = [{"role": "developer", "content": "x"}]
    assert template(SIMPLE).render(chat, add_generation_prompt=False) == "<s><system>x</s>"
    knows = "{% if messages[0]['role'] == 'developer' %}D{% endif %}"
    assert template(knows).render(chat) == "D"


def test_helpers_of_hugging_face_templates():
    source = "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert template(source).render(CHAT) == "1"
    assert template("{{ {'a': '<é>'} | tojson }}").render(CHAT) == '{"a": "<é>"}'
    assert template("{{ 'é' | tojson(ensure_ascii=False) }}{{ 'é' | tojson(True) }}").render(CHAT) == (
        '"é""\\u00e9"'
    )
    assert len(template("{{ strftime_now('%Y') }}").render(CHAT)) == 4
    assert template("a{% generation %}b{% endgeneration %}c").render(CHAT) == "abc"


def test_the_templates_own_refusal_is_shown():
    with pytest.raises(InvalidRequest, match="no system please"):
        template("{{ raise_exception('no system please') }}").render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages[7]['role'] }}",
        "{{ undefined_function() }}",
    ],
)
def test_a_template_cannot_reach_out(source):
    with pytest.raises(InvalidRequest, match="cannot render"):
        template(source).render(CHAT)


def test_loops_know_their_place():
    source = "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}"
    assert template(source).render(CHAT) == "1/2,2/2"
    source = "{% for r in messages | map(attribute='role') %}{{ r }}{{ loop.last }} {% endfor %}"
    assert template(source).render(CHAT) == "systemFalse userTrue "
    source = "{% for m in absent %}x{% else %}none{% endfor %}"
    assert template(source).render(CHAT) == "none"
    source = "{% for k, v in messages[0] | items recursive %}{{ k }}={{ v }};{% endfor %}"
    assert template(source).render(CHAT) == "role=system;content=Be brief.;"


def test_a_broken_template_is_a_configuration_error():
    with pytest.raises(ConfigError, match=r"chat template .*valid"):
        template("{% for %}")


def test_a_file_replaces_the_models_template(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ bos_token }}{{ eos_token }}")
    found = load_chat_template(ByteTokenizer(), file)
    assert found is not None
    assert found.render(CHAT) == "<bos><eos>"
    given = load_chat_template(ByteTokenizer(), "{{ bos_token }}//")
    assert given is not None
    assert given.render(CHAT) == "<bos>//"
    assert load_chat_template(ByteTokenizer(), None) is None
    with pytest.raises(ConfigError, match="cannot read"):
        load_chat_template(ByteTokenizer(), tmp_path / "none.jinja")


def test_a_template_that_is_nested_too_deep_is_a_configuration_error():
    with pytest.raises(ConfigError, match="nested"):
        template("{{ " + "(" * 5000 + ")" * 5000 + " }}")


def test_a_lack_of_memory_is_an_error_in_words():
    with pytest.raises(InvalidRequest, match="memory"):
        template("{{ 'a'.center(n) }}").render(CHAT, n=2**62)


def test_its_process_ends_without_a_word_where_nobody_reads_any_more():
    command = [sys.executable, "-P", "-m", "onbeat.text.chat_template", "5.0", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        _send(process.stdin, SIMPLE.encode())
        assert process.stderr.read() == b""
    assert process.returncode == -signal.SIGPIPE
