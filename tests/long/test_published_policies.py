"""What the papers found of batching policies holds for the same policies here.

Orders and ratios are compared, never absolute times: the step times are the uncalibrated roofline's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from onbeat.core.options import change, make
from onbeat.core.slo import SLO
from onbeat.core.step import BatchShape
from onbeat.metrics.attainment import good_requests
from onbeat.metrics.distribution import percentile
from onbeat.metrics.summary import collect_samples
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve
from onbeat.workload.arrivals import gamma_arrivals
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass
from onbeat.workload.trace import read_trace
from tests.long.published import (
    RATE_TOLERANCE,
    YI,
    Server,
    chat_capacity,
    chat_load,
    keeps_latency,
    keeps_objective,
    orca_load,
    rate_at_latency,
    run,
    shared_data,
)

ORCA = Server("orca", max_num_seqs=16, budget=8192)
VLLM = Server("prefill-first", max_num_seqs=128, budget=8192)
SARATHI = Server("sarathi", max_num_seqs=128, budget=512)
SARATHI_RELAXED = Server("sarathi", max_num_seqs=128, budget=2048)


class TestSarathi:
    """Agrawal et al., OSDI 2024: Mistral-7B on an A100, P99 TBT and median scheduling delay <= 2 s."""

    STRICT = 0.1

    def test_strict_objective_at_least_doubles_the_rate_of_vllm_and_orca(self):
        vllm, orca = chat_capacity(VLLM, self.STRICT), chat_capacity(ORCA, self.STRICT)
        assert keeps_objective(SARATHI, 2 * max(vllm, orca), self.STRICT)
        assert not keeps_objective(SARATHI, 8 * vllm, self.STRICT)

    def test_stalls_and_not_the_batch_limit_vllm_under_a_strict_objective(self):
        rate = chat_capacity(VLLM, self.STRICT)
        for max_num_seqs in (32, 64):
            server = replace(VLLM, max_num_seqs=max_num_seqs)
            assert keeps_objective(server, rate / 1.1, self.STRICT)
            assert not keeps_objective(server, 1.1 * rate, self.STRICT)

    @pytest.mark.slow
    def test_advantage_falls_as_the_objective_relaxes(self):
        ratios = []
        for tbt in (self.STRICT, 0.2, 0.5):
            best = max(chat_capacity(server, tbt) for server in (SARATHI, SARATHI_RELAXED))
            ratios.append(best / chat_capacity(VLLM, tbt))
        assert ratios[1] <= 1.1 * ratios[0]
        assert ratios[2] <= 1.1 * ratios[1]
        assert ratios[2] < 0.7 * ratios[0]

    def test_halves_of_the_policy(self):
        """Table 4: whole prompts beside decodes stall them; chunks that take turns cost first tokens.

        Mean of five seeds: a run has but 128 requests.
        """
        ttft, tbt = {}, {}
        for policy, budget in (("hybrid-only", 8192), ("chunk-only", 1024), ("sarathi", 1024)):
            settings = change(YI, policy=policy, max_num_batched_tokens=budget, max_num_seqs=128)
            samples = [
                collect_samples(run(chat_load(128, rate=1.0, seed=seed), settings).records)
                for seed in range(5)
            ]
            ttft[policy] = np.mean([percentile(each["ttft"], 50) for each in samples])
            tbt[policy] = np.mean([percentile(each["itl"], 99) for each in samples])
        assert ttft["hybrid-only"] < ttft["sarathi"] < ttft["chunk-only"]
        assert tbt["sarathi"] <= 0.4 * tbt["hybrid-only"]
        assert 0.9 * tbt["sarathi"] <= tbt["chunk-only"] <= 1.6 * tbt["sarathi"]


class TestStall:
    """Section 3 of the same paper: a prompt of 8,192 tokens arrives while 32 requests decode."""

    BUDGET = 512

    def worst_gap(self, policy: str, budget: int) -> float:
        load = OfferedLoad(
            name="stall",
            arrivals=np.array([0.0] * 32 + [3.0]),
            num_prompt_tokens=np.array([256] * 32 + [8192]),
            num_output_tokens=np.array([400] * 32 + [16]),
        )
        records = run(load, self.settings(policy, budget)).records
        assert all(record.delivery_times[0] < 3.0 for record in records[:32])
        assert min(record.end for record in records[:32]) > records[32].delivery_times[0]
        return max(float(np.diff(record.delivery_times).max()) for record in records[:32])

    def settings(self, policy: str, budget: int) -> Deployment:
        return change(YI, max_model_len=16384, max_num_seqs=64, policy=policy, max_num_batched_tokens=budget)

    def seconds(self, shape: BatchShape) -> float:
        return resolve(self.settings("sarathi", self.BUDGET)).step_time.step_time(shape)

    def test_prefill_first_stops_the_decodes_for_the_whole_prompt(self):
        prompt = BatchShape()
        prompt.add(0, 8192, samples=True)
        assert self.worst_gap("prefill-first", 16384) >= self.seconds(prompt)

    def test_whole_prompt_beside_decodes_delays_them_as_long(self):
        prompt = BatchShape()
        prompt.add(0, 8192, samples=True)
        assert self.worst_gap("orca", 16384) >= self.seconds(prompt)

    def test_chunks_delay_decodes_by_no_more_than_a_full_step(self):
        full = BatchShape()
        for _ in range(32):
            full.add(256 + 400, 1, samples=True)
        full.add(8192 - (self.BUDGET - 32), self.BUDGET - 32, samples=True)
        gap = self.worst_gap("sarathi", self.BUDGET)
        assert gap <= 1.05 * self.seconds(full)
        assert gap <= self.worst_gap("prefill-first", 16384) / 8


class TestOrca:
    """Yu et al., OSDI 2022: a model of GPT-3's size, normalised latency within 5 times the idle one."""

    GPT3 = make(
        Deployment,
        model="facebook/opt-175b",
        device="a100-40-sxm",
        tensor_parallel=16,
        max_model_len=2048,
    )

    def settings(self, policy: str, max_num_seqs: int) -> Deployment:
        return change(self.GPT3, policy=policy, max_num_seqs=max_num_seqs)

    def test_serves_five_times_the_rate_of_request_level_batching(self):
        load = orca_load("uniform", 0, num_requests=500)
        static = rate_at_latency(load, self.settings("static", 8))  # FasterTransformer's best batch
        assert keeps_latency(load, self.settings("orca", 128), 5 * static)

    def test_one_length_for_all_takes_most_of_the_advantage_away(self):
        load = orca_load("equal", 0, num_requests=500)
        static = rate_at_latency(load, self.settings("static", 32))
        orca = self.settings("orca", 32)
        assert keeps_latency(load, orca, static)
        assert not keeps_latency(load, orca, 2 * RATE_TOLERANCE * static)


def test_paged_memory_serves_more_than_a_reservation_of_the_declared_length():
    """Kwon et al., SOSP 2023: OPT-13B on an A100-40G, answers of up to 2,048 tokens may be asked for."""
    load = chat_load(250, max_tokens=2048)
    base = make(
        Deployment,
        model="facebook/opt-13b",
        device="a100-40-sxm",
        max_model_len=2048,
        max_num_batched_tokens=2048,
        declared_max_tokens=2048,
    )
    reserved = rate_at_latency(load, change(base, policy="orca"))
    assert keeps_latency(load, change(base, policy="hybrid-only"), 1.5 * reserved)


@pytest.mark.slow
def test_bursts_of_a_recorded_trace_cost_attainment():
    """A coding service (Splitwise, Patel et al., ISCA 2024) against a Poisson process of the same rate."""
    trace = read_trace(shared_data() / "traces" / "azure2023_code.csv.gz")
    assert trace.times is not None
    trace = trace.take(np.argsort(trace.times, kind="stable"))
    assert trace.times is not None
    recorded = OfferedLoad(
        name="recorded",
        arrivals=trace.times - trace.times[0],
        num_prompt_tokens=np.maximum(1, trace.num_prompt_tokens),
        num_output_tokens=np.maximum(1, trace.num_output_tokens),
        class_ids=np.zeros(len(trace), np.int16),
        classes=(SLOClass(name="standard", slo=SLO(ttft=2.0, tbt=0.1)),),
    )
    rate = recorded.rate
    assert rate is not None
    arrivals = gamma_arrivals(len(trace), rate=rate, rng=np.random.default_rng(0))
    settings = Deployment(model="meta-llama/Llama-3.1-8B", device="h100-sxm")
    bursts, poisson = (
        float(good_requests(run(load, settings).records).mean())
        for load in (recorded, recorded.with_arrivals(arrivals))
    )
    assert bursts < poisson
