"""What a router is told of a request."""

from __future__ import annotations

from typing import Any

import pytest

from onbeat.core.fleet import PrefillCosts
from onbeat.core.request import Request, SamplingParams
from onbeat.core.slo import SLO, ShedMode
from onbeat.scheduler.cluster.work import UNIT_COSTS, describe


def make_request(**fields) -> Request:
    given: dict[str, Any] = {
        "request_id": "r",
        "prompt_token_ids": range(100),
        "sampling": SamplingParams(max_tokens=8, stop_token_ids=(0,)),
        "arrival": 1.0,
        "slo": SLO(ttft=0.5, tbt=0.05, e2e=9.0),
        "weight": 2.0,
        "shed": ShedMode.REJECT,
    }
    return Request(**(given | fields))


class TestWork:
    def test_a_prompt_costs_its_tokens_and_a_decode_what_it_adds_to_a_step(self):
        costs = PrefillCosts(token=0.001, pair=1e-6, step=0.1, decode=0.002)
        told = describe(make_request(), costs, block_hashes=(b"a" * 16,))
        assert (told.request_id, told.block_hashes) == ("r", (b"a" * 16,))
        assert told.prefill_work == pytest.approx(100 * (0.001 + 50e-6))
        assert told.decode_work == pytest.approx(8 * 0.002)

    def test_where_nobody_predicts_a_token_is_as_much_as_another(self):
        told = describe(make_request(), UNIT_COSTS)
        assert (told.prefill_work, told.decode_work) == (100.0, 8.0)

    def test_nothing_is_estimated_for_routers_that_do_not_look_at_it(self):
        told = describe(make_request())
        assert (told.request_id, told.prefill_work, told.decode_work) == ("r", 0.0, 0.0)
        assert (told.num_prompt_tokens, told.max_tokens) == (100, 8)
        assert told.rather_refused
