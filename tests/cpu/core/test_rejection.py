"""What the engine process raised is what its client raises."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from onbeat.cluster.gate import Gate
from onbeat.cluster.streams import OpenRequest, refusal
from onbeat.core.errors import InvalidRequest, Overloaded, PromptTooLong, RequestRejected, SLOUnattainable
from onbeat.engine.messages import Rejected, decode_from_engine, encode
from onbeat.scheduler.cluster.events import Refuse
from tests.pure.scheduler.driver import make_request

ERRORS = [
    InvalidRequest("an empty prompt", param="prompt", code="invalid_value"),
    InvalidRequest("no code"),
    PromptTooLong("4,000 tokens"),
    PromptTooLong("prompt and output", param="max_tokens"),
    Overloaded("queue full", code="server_overloaded"),
    Overloaded("queue too long", code="server_overloaded", retry_after=2.5),
    SLOUnattainable("too late", predicted_ttft=1.25, retry_after=0.5),
    SLOUnattainable("too late", predicted_ttft=1.25, code="deadline_exceeded"),
    SLOUnattainable("too late", predicted_ttft=1.25, retry_after=None),
    RequestRejected("for reasons of its own", param="user", code="odd"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__}-{error.code}")
def test_type_message_and_fields_survive(error):
    message = decode_from_engine(encode(Rejected.by("r1", error)))
    assert message.request_id == "r1"
    unpacked = message.error()
    assert type(unpacked) is type(error)
    assert str(unpacked) == str(error)
    assert vars(unpacked) == vars(error)


def test_a_subclass_goes_as_what_the_client_knows():
    class Stranger(Overloaded):
        pass

    assert type(Rejected.by("r1", Stranger("full")).error()) is Overloaded


@pytest.mark.parametrize(("told", "heard"), [(0.5, 0.1), (None, None)])
def test_a_fleet_says_when_to_come_again_unless_waiting_does_not_help(told, heard):
    rejection = SLOUnattainable("late", predicted_ttft=1.25, retry_after=told)
    open_request = OpenRequest(make_request("r1", 4, 4), Gate(Mock()), rejection=rejection)
    error = refusal(Refuse("r1", "overloaded", 0.1), open_request)
    assert isinstance(error, SLOUnattainable)
    assert error.retry_after == heard
