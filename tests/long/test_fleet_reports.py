"""Reports of simulated replicas at instants where a run of steps ends without a further one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onbeat.core.options import make
from onbeat.core.slo import SLO
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve
from onbeat.simulator.simulate import simulate
from onbeat.workload.arrivals import gamma_arrivals
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass
from onbeat.workload.trace import read_trace

TRACE = Path(__file__).parents[2] / "examples" / "azure2023_conv.csv.gz"


def test_an_overloaded_fleet_reports_to_the_end() -> None:
    trace = read_trace(TRACE)
    load = OfferedLoad(
        name="overload",
        num_prompt_tokens=trace.num_prompt_tokens[0:320],
        num_output_tokens=trace.num_output_tokens[0:320],
        arrivals=gamma_arrivals(320, rate=1.0, rng=np.random.default_rng(0)),
    )
    load = load.with_classes([SLOClass(name="all", slo=SLO(ttft=0.6, tbt=0.06))], seed=0).at_rate(8.0)
    replica = make(Deployment, model="meta-llama/Llama-3.2-3B", device="l4", replicas=2)
    simulation = resolve(replica)
    result = simulate(load, simulation.config, simulation.step_time)
    assert len(result.records) == 320
