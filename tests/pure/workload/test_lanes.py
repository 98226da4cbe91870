"""Lanes: chats and queries at their times, documents one behind another from the start."""

from __future__ import annotations

import numpy as np
import pytest

from onbeat.core.errors import ConfigError
from onbeat.workload.job_kinds import LANE_CLASSES, NUM_CLIENTS, lane_load
from onbeat.workload.load import Load


def test_lanes_are_drawn_alike_and_have_their_classes() -> None:
    one, other = (
        Load(dataset_name="lanes", request_rate=10.0, num_prompts=70, seed=3).offered() for _ in range(2)
    )
    assert (one.num_prompt_tokens == other.num_prompt_tokens).all()
    assert one.class_ids is not None
    assert one.jobs is not None
    kinds = np.array([LANE_CLASSES[row].name for row in one.class_ids.tolist()])
    assert (one.num_output_tokens[kinds == "chat"] > 0).all()
    assert (one.num_output_tokens[kinds != "chat"] == 0).all()
    assert (int((kinds == "offline").sum()), int((kinds != "offline").sum())) == (140, 70)
    assert len(one.jobs.heads) == NUM_CLIENTS + 70, "a client's next document waits for the one before"
    assert one.rate == pytest.approx(10), "clients of the corpus do not come at a rate"
    assert one.take(np.arange(len(one))[kinds != "offline"]).rate == pytest.approx(10)


def test_lanes_without_a_corpus() -> None:
    load = lane_load(np.arange(5.0), np.random.default_rng(0), num_documents=0, query_share=1.0)
    assert load.num_output_tokens.tolist() == [0] * 5


def test_lanes_need_arrivals() -> None:
    with pytest.raises(ConfigError, match="give --request-rate"):
        Load(dataset_name="lanes", max_concurrency=4, num_prompts=5).offered()
