"""A split model gives the greedy tokens of the whole one: all families, chunks, prefix hits, preemption.

The ranks are threads here; `test_processes.py` has processes.
"""

from __future__ import annotations

import pytest
import torch

from tests.cpu.engine.forwards import MakeForward, on_torch
from tests.cpu.engine.tiny_models import FAMILIES, random_prompt, tiny_model
from tests.cpu.golden.engine_run import Outcome, Setting, run_engine
from tests.cpu.parallel.split import MakeSplit

PROMPT_LENGTHS = (40, 130, 1, 64, 17)
MAX_TOKENS = 6
CHUNKS = Setting(budget=48, arrivals=2, repeats=2)
SHORT_OF_MEMORY = Setting(budget=64, num_blocks=18, depth=2, max_num_seqs=16)
SHORT_OF_MEMORY_LENGTHS = (30, 31, 28, 61, 60, 29, 14, 15, 16, 44)
"""Together with 12 tokens of output they outgrow 18 blocks."""


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "olmo2"])  # see test_shards
def test_tokens_equal_those_of_the_whole_model(make_split: MakeSplit, name: str) -> None:
    prompts = [random_prompt(length) for length in PROMPT_LENGTHS]

    def run(make_forward: MakeForward) -> Outcome:
        return run_engine(make_forward, prompts, MAX_TOKENS, CHUNKS, max_model_len=160)

    expected = run(on_torch(tiny_model(name, torch.float32).model))
    assert expected.num_mixed_steps > 0
    assert expected.num_prefix_hits > 100
    for size in (2, 4):
        assert run(make_split(name, size)) == expected


def test_preemption_changes_nothing(make_split: MakeSplit) -> None:
    prompts = [random_prompt(length) for length in SHORT_OF_MEMORY_LENGTHS]

    def run(make_forward: MakeForward) -> Outcome:
        return run_engine(make_forward, prompts, 12, SHORT_OF_MEMORY, max_model_len=256)

    expected = run(on_torch(tiny_model("qwen2", torch.float32).model))
    assert expected.num_preemptions > 0
    assert run(make_split("qwen2", 4)) == expected
