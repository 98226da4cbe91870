"""A split model answers under schemas as the whole one does: the first rank samples, and asks the grammar."""

from __future__ import annotations

import torch

from tests.cpu.engine.forwards import on_torch
from tests.cpu.engine.tiny_models import tiny_model
from tests.cpu.golden.test_structured import LIMITS_HERE, PORT, check_all, requests_of
from tests.cpu.parallel.split import MakeSplit
from tests.cpu.speculation.runs import assert_same, run


def test_answers_equal_those_of_the_whole_model(make_split: MakeSplit) -> None:
    requests = requests_of(range(2, 104, 10))
    whole = run(on_torch(tiny_model("llama3", torch.float32).model), requests, guides=PORT, **LIMITS_HERE)
    check_all(whole)
    assert_same(run(make_split("llama3", 2), requests, guides=PORT, **LIMITS_HERE), whole)
