"""What a router is told of a request."""

from __future__ import annotations

from typing import Any

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.request import Request, SamplingParams
from onbeat.core.slo import SLO, ShedMode
from onbeat.core.step import BatchShape
from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.residual import ResidualModel
from onbeat.scheduler.cluster.work import WorkEstimate, describe


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


def predictor(seconds) -> Predictor:
    return Predictor(seconds, ResidualModel.log_normal(0.0))


class TestWork:
    def test_a_prompt_costs_its_step_and_decodes_their_share_of_one(self):
        work = WorkEstimate(
            predictor(lambda shape: 0.001 * shape.num_new_tokens + 1e-6 * shape.decode_context_tokens),
            mean_output_tokens=10.0,
        )
        told = describe(make_request(block_hashes=(b"a" * 16,)), work)
        assert (told.request_id, told.block_hashes) == ("r", (b"a" * 16,))
        assert told.prefill_work == pytest.approx(0.1)
        assert told.decode_work == pytest.approx(10 * (0.001 + 1e-6 * 106))  # half of the output is behind

    def test_nothing_is_predicted_for_routers_that_do_not_ask(self):
        told = describe(make_request(block_hashes=None), None)
        assert (told.request_id, told.prefill_work, told.decode_work) == ("r", 0.0, 0.0)
        assert (told.num_prompt_tokens, told.max_tokens) == (100, 8)

    def test_a_prediction_that_is_no_time_is_refused(self):
        class Silent:
            def step_time(self, shape: BatchShape, q: float | None = None) -> float:
                return 0.0

        with pytest.raises(ConfigError, match=r"predicts 0.0 s"):
            describe(make_request(), WorkEstimate(Silent(), mean_output_tokens=1.0))
