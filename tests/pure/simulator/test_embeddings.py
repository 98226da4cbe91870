"""Requests without output tokens: queries are in time, and documents take what is left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onbeat
from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO
from onbeat.metrics.attainment import good_requests
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass

WHERE: dict[str, Any] = {"model": "meta-llama/Llama-3.1-8B", "device": "a100-80-sxm"}
CLASSES = (
    SLOClass(name="chat", slo=SLO(ttft=0.5, tbt=0.05), share=0.3),
    SLOClass(name="query", slo=SLO(ttft=0.1), share=0.3),
    SLOClass(name="document", slo=SLO(), share=0.4),
)
CHAT, QUERY, DOCUMENT = range(3)
SECONDS = 20.0


def lanes(*, documents: int) -> OfferedLoad:
    """Return chats at 4 a second, queries at 10, and documents all at once at the start."""
    rng = np.random.default_rng(1)
    kinds = [(CHAT, 4, 512, 128), (QUERY, 10, 30, 0)]
    rows = [
        (float(time), kind, prompt, output)
        for kind, rate, prompt, output in kinds
        for time in rng.uniform(0, SECONDS, int(rate * SECONDS))
    ]
    rows += [(0.0, DOCUMENT, 500, 0)] * documents
    times, classes, prompts, outputs = map(np.array, zip(*sorted(rows), strict=True))
    return OfferedLoad(
        name="lanes",
        arrivals=times,
        class_ids=classes,
        classes=CLASSES,
        num_prompt_tokens=prompts,
        num_output_tokens=outputs,
    )


def kept(result: Any, name: str) -> float:
    own = [record for record in result.records if record.request_class == name]
    return float(good_requests(own).mean())


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_documents_take_what_chats_and_queries_leave(noise: float) -> None:
    how: dict[str, Any] = WHERE | {"policy": "slo", "max_queue_seconds": None, "step_noise": noise}
    without = onbeat.simulate(**how, load=lanes(documents=0))
    result = onbeat.simulate(**how, load=lanes(documents=300))
    for name in ("chat", "query"):
        assert kept(result, name) >= kept(without, name) - 0.005
        assert kept(result, name) >= 0.99
    ends = [record.end for record in result.records if record.request_class == "document"]
    assert max(ends) < SECONDS  # 300 x 500 tokens are 11 s of the device alone


@pytest.mark.parametrize("policy", ["slo", "sarathi", "static", "prefill-first"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_records_have_a_delivery_and_no_tokens(policy: str, replicas: int) -> None:
    result = onbeat.simulate(
        **WHERE, load=lanes(documents=5), policy=policy, replicas=replicas, max_queue_seconds=None
    )
    assert result.is_complete
    for record in result.records:
        assert record.is_embedding == (record.request_class != "chat")
        if record.is_embedding:
            assert (list(record.delivery_sizes), record.num_output_tokens) == ([0], 0)
            assert record.finish_reason == "stop"
            assert record.delivery_times[0] == record.end > record.arrival
        else:
            assert record.num_output_tokens == 128


@pytest.mark.parametrize("policy", ["slo", "sarathi"])
def test_a_prompt_may_end_with_a_step_of_one_token(policy: str) -> None:
    load = OfferedLoad(
        name="one",
        arrivals=np.zeros(1),
        num_prompt_tokens=np.array([257]),
        num_output_tokens=np.array([0]),
    )
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "policy": policy}
    (record,) = onbeat.simulate(**WHERE, **sizes, load=load).records
    assert (record.finish_reason, len(record.delivery_times)) == ("stop", 1)


def test_a_negative_output_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"output .* 0\b"):
        OfferedLoad(name="x", num_prompt_tokens=np.array([1]), num_output_tokens=np.array([-1]))
