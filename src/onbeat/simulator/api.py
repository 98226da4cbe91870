"""`onbeat.simulate`: a simulation in a few lines of Python."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from onbeat.core.errors import ConfigError
from onbeat.core.options import make, meant
from onbeat.core.slo import SLO
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve_for
from onbeat.simulator.result import SimulationResult
from onbeat.simulator.simulate import simulate as simulate_load
from onbeat.workload.load import Load
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass


def simulate(
    *,
    model: str,
    device: str,
    trace: str | os.PathLike[str] | None = None,
    load: Load | OfferedLoad | None = None,
    slo: SLO | None = None,
    **settings: Any,
) -> SimulationResult:
    """Run requests through a model on virtual devices, by the scheduler that serves live.

    Parameters
    ----------
    model : a known name such as `meta-llama/Llama-3.1-8B`, a `config.json` or its directory.
    device : an id such as `h100-sxm`.
    trace : a file of any kind that `onbeat simulate --trace` reads; it is replayed in its own time.
    load : requests from elsewhere, such as `onbeat.Load`; either this or `trace`.
    slo : objectives of the requests, for their records and for an automatic token budget; `load` may bring
        classes of its own instead.
    **settings : of `onbeat.simulator.deployment.Deployment` and its limits: `policy`, `replicas`,
        `router`, `tensor_parallel`, `max_num_seqs`, `max_num_batched_tokens`, `max_concurrency` and others.

    Returns
    -------
    The records of the requests in the order of the load, times in virtual seconds, and what each replica did.

    Raises
    ------
    ConfigError : an unknown name or setting, a bad trace, a model that does not fit, or a request that does
        not.

    Examples
    --------
    >>> import onbeat
    >>> load = onbeat.Load(input_len=512, output_len=64, request_rate=4.0, num_prompts=50)
    >>> result = onbeat.simulate(model="meta-llama/Llama-3.1-8B", device="h100-sxm", load=load, replicas=2)
    >>> len(result.records), {record.num_output_tokens for record in result.records}
    (50, {64})
    >>> all(record.first_token - record.arrival < 0.2 for record in result.records)
    True
    """
    if (trace is None) == (load is None):
        raise ConfigError("give requests once: trace=FILE or load=onbeat.Load(...)")
    deployment = make(Deployment, **meant(Deployment, model=model, device=device, **settings))

    asked = Load(trace=Path(trace or ""), arrivals="replay") if load is None else load
    classes = None if slo is None else (SLOClass(name="default", slo=slo),)
    resolved, offered = resolve_for(deployment, asked, classes)
    return simulate_load(offered, resolved.config, resolved.step_time)
