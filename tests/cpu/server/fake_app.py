"""The server's application on a fake engine; clients' libraries, which take long to import, are elsewhere."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, cast

from fastapi import FastAPI

from onbeat.server.app import create_app
from onbeat.server.server_config import ServerConfig
from onbeat.server.telemetry import Telemetry
from onbeat.text.chat_template import ChatTemplate
from tests.fakes_engine import ByteTokenizer, FakeEngine

if TYPE_CHECKING:
    from onbeat.cluster.client import FleetClient

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'user' and m.content == 'refuse' %}{{ raise_exception('no such talk') }}{% endif %}"
    "{% if m.role == 'king' %}{{ raise_exception('kings have no say') }}{% endif %}"
    "{% if m.content == 'show' %}{{ shown | tojson }}{% endif %}"
    "[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}\n"
    "{% endfor %}"
    "{% if enable_thinking is defined %}"
    "{% if enable_thinking %}<thinking>{{ reasoning_effort }}{% else %}<no thinking>{% endif %}"
    "{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% if loud %}!{% endif %}{% endif %}"
)


@cache
def compile_template(text: str) -> ChatTemplate:
    return ChatTemplate(text, bos_token="<bos>", eos_token="<eos>")


def make_app(
    engine: FakeEngine,
    config: ServerConfig,
    *,
    tokenizer: ByteTokenizer | None = None,
    template: str | None = TEMPLATE,
    has_fleet: bool = False,
) -> FastAPI:
    fleet = cast("FleetClient", engine) if has_fleet else None
    telemetry = Telemetry(
        config,
        engine.info.model_name,
        proposer=engine.info.speculation,
        fleet_counts=None if fleet is None else fleet.counts,
    )
    engine.add_observer(telemetry.tracker)
    compiled = None if template is None else compile_template(template)
    return create_app(engine, tokenizer or ByteTokenizer(), compiled, config, telemetry, fleet=fleet)
