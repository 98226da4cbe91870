"""A split model verifies drafts: the tokens are those of the whole model without any.

The ranks are threads here; `tests/cpu/speculation/test_speculation_start.py` has processes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onbeat.core.request import SamplingParams
from onbeat.engine.forward import ForwardPass
from onbeat.engine.speculation.proposer import Proposer
from onbeat.scheduler.scheduler_config import SchedulerConfig
from tests.cpu.engine.engines import TorchEngine
from tests.cpu.engine.forwards import on_torch
from tests.cpu.engine.tiny_models import tiny_model
from tests.cpu.parallel.split import MakeSplit
from tests.cpu.speculation.drafting import (
    GREEDY,
    MakeProposer,
    Setting,
    by_draft_model,
    make_near,
    prompts,
    serve,
)
from tests.cpu.speculation.runs import ngram

LENGTHS = (40, 130, 1, 64, 17)
SHORT_OF_MEMORY = (30, 31, 28, 61, 60, 29, 44)
"""Prompt lengths that outgrow 16 blocks."""
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, presence_penalty=0.3, seed=3, max_tokens=24)
SETTINGS = [Setting(num_drafts=3, depth=2, repeats=2), Setting(num_blocks=16, max_num_seqs=16, depth=2)]


def by_lookup(forward: ForwardPass, limits: SchedulerConfig) -> Proposer:
    return ngram(3)


def by_near_model() -> MakeProposer:
    """Return what makes a draft model that the target agrees with often, but not always; it is not split."""
    return by_draft_model(make_near(TorchEngine(), "llama3", 0.1))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("method", ["ngram", "draft-model"])
def test_drafts_change_no_token_of_a_split_model(
    make_split: MakeSplit, method: str, setting: Setting
) -> None:
    is_short = setting.num_blocks < 100
    greedy = prompts(SHORT_OF_MEMORY if is_short else LENGTHS)
    requests = [
        (prompt, GREEDY if index % 2 else replace(SAMPLED, seed=index))
        for index, (prompt, _) in enumerate(greedy)
    ]
    plain = serve(on_torch(tiny_model("llama3", torch.float32).model), None, requests, setting)
    proposer = by_lookup if method == "ngram" else by_near_model()
    drafted = serve(make_split("llama3", 2), proposer, requests, setting)
    assert drafted.tokens == plain.tokens
    assert 0 < drafted.num_accepted < drafted.num_drafted
    assert (drafted.num_preemptions > 0) == is_short
    assert (drafted.num_prefix_hits > 150) == (setting.repeats > 1)
