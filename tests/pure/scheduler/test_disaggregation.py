"""Prompts and decodes on replicas of their own: who runs what, and what a router is told."""

from __future__ import annotations

from typing import Any

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.request import Request, SamplingParams
from onbeat.core.slo import SLO, ShedMode
from onbeat.core.step import BatchShape
from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.residual import ResidualModel
from onbeat.scheduler.cluster.disaggregation import PoolRouter, decode_part, prompt_part
from onbeat.scheduler.cluster.routing import RoutingRequest
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


class TestPools:
    def test_each_pool_has_its_own_count(self):
        router = PoolRouter(2, 2)
        requests = [RoutingRequest(str(number)) for number in range(4)]
        assert [router.route_prompt(request) for request in requests] == [0, 1, 0, 1]
        assert [router.route_decodes(request) for request in requests[:2]] == [2, 3]
        assert [router.is_decode(replica) for replica in range(4)] == [False, False, True, True]

    def test_an_end_counts_where_it_happened(self):
        router = PoolRouter(2, 2)
        first, second, third = (RoutingRequest(str(number)) for number in range(3))
        for request in (first, second):
            router.route_prompt(request)
            router.route_decodes(request)
        router.on_finish(1, second)
        router.on_finish(2, first)
        assert router.route_prompt(third) == 1
        assert router.route_decodes(third) == 2


class TestParts:
    def test_a_prompt_delivers_one_token_and_keeps_its_kv(self):
        request = make_request()
        part = prompt_part(request, num_output_tokens=8)
        assert (part.sampling.max_tokens, part.keeps_kv) == (1, True)
        assert (part.arrival, part.slo, part.shed) == (request.arrival, request.slo, request.shed)

    def test_a_single_token_ends_where_its_prompt_ran(self):
        assert not prompt_part(make_request(), num_output_tokens=1).keeps_kv

    def test_decodes_begin_behind_the_first_token(self):
        part = decode_part(make_request(), now=3.0)
        assert (part.arrival, len(part.prompt_token_ids), part.num_external_tokens) == (3.0, 101, 100)
        assert part.sampling == SamplingParams(max_tokens=7, stop_token_ids=(0,))
        assert (part.slo, part.shed) == (SLO(tbt=0.05), ShedMode.OFF)
        assert (part.keeps_kv, part.weight) == (False, 2.0)

    def test_decodes_of_a_request_without_objectives_have_none(self):
        assert decode_part(make_request(slo=None), now=3.0).slo is None


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
