"""Templates in a process with limits: what they take, how they end, that chats go on."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from onbeat.core.errors import ConfigError, InvalidRequest
from onbeat.text.chat_template import TemplateProcess

GREEDY = "{% if greedy %}{{ SOURCE }}{% else %}fine{% endif %}"


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.fixture
def template(request: pytest.FixtureRequest) -> Iterator[TemplateProcess]:
    made = TemplateProcess(request.param, max_seconds=0.5)
    yield made
    made.close()


@pytest.mark.parametrize("template", ["{{ a }} \ue000 é {{ b | tojson }}"], indirect=True)
def test_renders_as_in_this_process(template: TemplateProcess) -> None:
    for number in range(3):
        assert template.render({"a": number, "b": {"c": "<é>"}}) == f'{number} \ue000 é {{"c": "<é>"}}'
    with pytest.raises(TypeError, match="JSON"):
        template.render({"a": object()})


@pytest.mark.parametrize(
    "template",
    [
        GREEDY.replace("SOURCE", source)
        for source in (
            "n | string | center(n)",
            "'' ~ ('x'.ljust(n) | length)",
            "'x'.zfill(n)",
            "'%*d' % (n, 1)",
            "'{:{}}'.format(1, n)",
            "[[1]] | tojson(indent=n)",
            "('a' * 10**6).replace('a', 'b' * 10**5)",
            "('a' * 10**5).join(['b'] * 10**6)",
            "('\\t' * 9).expandtabs(n)",
            "n.to_bytes(n)",
            "[1] | slice(n) | list",
            "lipsum(n=10**8)",
            "'a' * n",
            "([1] * n) | length",
        )
    ],
    indirect=True,
)
def test_memory_and_time_are_bounded(template: TemplateProcess) -> None:
    with pytest.raises(InvalidRequest, match=r"memory|0\.5 s|fit|large"):
        template.render({"greedy": True, "n": 10**10})
    assert template.render({"greedy": False}) == "fine"


@pytest.mark.parametrize(
    "template",
    [
        GREEDY.replace("SOURCE", "range(99999) | sum(start=2**3000000)"),
        GREEDY.replace("SOURCE", "9 ** (9 ** 9)"),
        GREEDY.replace(
            "{{ SOURCE }}", "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
        ),
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{% if greedy %}{{ f(40) }}{% else %}fine{% endif %}",
    ],
    indirect=True,
)
def test_time_is_bounded_and_the_next_chat_is_rendered(template: TemplateProcess) -> None:
    start = time.process_time()
    with pytest.raises(InvalidRequest, match=r"0\.5 s "):
        template.render({"greedy": True})
    assert time.process_time() - start < 1, "this process waits and does nothing"
    assert template.render({"greedy": False}) == "fine"


@pytest.mark.parametrize("template", ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"], indirect=True)
def test_recursion_is_an_error(template: TemplateProcess) -> None:
    with pytest.raises(RecursionError):
        template.render({})


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% for %}", "chat template is not valid"),
        ("{{ 1 | nonsense }}", "named 'nonsense'"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "is not valid: it is nested too deep"),
    ],
)
def test_what_cannot_be_compiled_is_a_configuration_error(source: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TemplateProcess(source)


@pytest.mark.parametrize("template", ["{{ a }}"], indirect=True)
def test_a_process_that_is_gone_is_replaced(template: TemplateProcess) -> None:
    assert template.render({"a": 1}) == "1"
    process = template._process._process
    assert process is not None
    process.kill()
    with pytest.raises(InvalidRequest, match="exit code -9"):
        template.render({"a": 1})
    assert template.render({"a": 2}) == "2"


def test_a_forgotten_template_leaves_no_process() -> None:
    before = children()
    made = TemplateProcess("{{ a }}")
    assert len(children() - before) == 1
    del made
    gc.collect()
    assert children() == before
