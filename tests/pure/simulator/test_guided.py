"""A share of a simulated load is under a grammar: its rows take longer, and plans know it."""

from __future__ import annotations

import pytest

from onbeat.core.errors import ConfigError
from onbeat.perfmodel.predictor import Predictor
from onbeat.simulator.simulate import simulate
from tests.pure.simulator.loads import make_config, random_load


def test_guided_rows_take_time() -> None:
    load = random_load(60, rate=40, seed=5)
    model = Predictor(lambda shape: 0.01 + 1e-5 * shape.num_new_tokens)
    results = [simulate(load, make_config(guided_share=share), model) for share in (0.0, 0.5, 1.0)]
    ends = [max(record.end or 0.0 for record in result.records) for result in results]
    assert ends[0] < ends[1] < ends[2]
    outputs = [sum(record.num_output_tokens for record in result.records) for result in results]
    assert len(set(outputs)) == 1


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_is_from_none_to_all(share: float) -> None:
    with pytest.raises(ConfigError, match="guided_share is"):
        make_config(guided_share=share)
