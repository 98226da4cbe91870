"""The requests of a seed, as many as last: draws of lengths with Poisson arrivals, or windows of traces."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.workload.arrivals import gamma_arrivals
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.trace import Trace, read_trace

LEAST_REQUESTS = 4000
LEAST_SECONDS = 600.0
"""Of arrivals that are measured."""
WARM_SECONDS = 120.0
WARM_SHARE = 0.15
"""What is thrown away first: two minutes are twelve times the longest TTFT objective of most cells and
several times what a request stays in the batch; loads that last longer (few, long requests, which a prefix
cache has to fill up with) give 15 % of what is measured."""

TRACES = {
    "azure-code": "azure2023_code.csv.gz",
    "azure-conv": "azure2023_conv.csv.gz",
    "mooncake": "mooncake_fast25_conversation_trace.csv.gz",
}
"""With their own arrival times."""
DRAWN = {
    "poisson": "azure2023_conv.csv.gz",
    "wave": "azure2023_conv.csv.gz",
    "sharegpt": "sharegpt_8k_lengths_llama2tok.csv.gz",
    "arxiv": "arxiv_4k_lengths_llama2tok.csv.gz",
}
"""Lengths drawn from a file, with replacement."""
MADE = {
    "chat": ((1.0, 200, 200),),
    "short-answers": ((1.0, 350, 60),),
    "documents": ((1.0, 8000, 200),),
    "bimodal": ((0.95, 300, 200), (0.05, 12_000, 200)),
    "long-outputs": ((1.0, 500, 1500),),
    "mixed-answers": ((0.7, 1200, 60), (0.3, 1200, 900)),
}
"""Mixtures of (share, mean prompt, mean output), log-normal around these."""
MADE_SIGMA = 0.5
"""Of the logarithm of a length; a fifth of the lengths are above 1.3 times their mean."""
WORKLOADS = (*TRACES, *DRAWN, *MADE, "agents")
WAVE_REQUESTS, WAVE_HEIGHT = 480.0, 0.6
"""Of a wave from crest to crest, and how far its rate is above and below the mean."""
AGENTS, AGENT_CALLS = 40, 8
"""Sessions at a time, which call in turns, and the calls of each: a call holds all earlier ones."""
AGENT_BLOCKS, CALL_BLOCKS, BLOCK_SIZE = 4, 1, 512
"""KV blocks of the prompt that all share, what each call adds, and tokens of a block."""
_GOLDEN = 0.6180339887498949
"""Its multiples spread over the unit interval however many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadKey:
    """Names the requests of one seed."""

    workload: str
    seed: int
    num_requests: int
    max_model_len: int


def warm_seconds(rate: float) -> float:
    """Return the time at the start of a load that lasts which is thrown away."""
    return max(WARM_SECONDS, WARM_SHARE * max(LEAST_SECONDS, LEAST_REQUESTS / rate))


def lasting(workload: str, *, rate: float, seed: int, max_model_len: int) -> OfferedLoad:
    """Return a load that lasts: warm-up and what is measured, at a rate (requests per second)."""
    warm = warm_seconds(rate)
    num_requests = ceil((warm + max(LEAST_SECONDS, LEAST_REQUESTS / rate)) * rate)
    while True:
        key = LoadKey(workload=workload, seed=seed, num_requests=num_requests, max_model_len=max_model_len)
        load = make_load(key).at_rate(rate)
        assert load.arrivals is not None
        if (
            np.count_nonzero(load.arrivals >= warm) >= LEAST_REQUESTS
            and load.arrivals[-1] >= warm + LEAST_SECONDS
        ):
            return load
        num_requests = ceil(num_requests * 1.03)  # arrivals are not even: more came during the warm-up


@lru_cache(maxsize=4)
def make_load(key: LoadKey) -> OfferedLoad:
    """Return the requests of a seed, without objectives; those that do not fit the context are never chosen.

    On a trace the seed is where its window starts, and the window's own times stay, to be squeezed to a
    rate. A window that comes to the trace's end goes on at its start, as other requests: no prefix is shared
    with the first time. Mooncake's clock ticks every 3 s, so that some ten requests share each time; they
    are spread over the tick. Elsewhere the seed draws lengths and Poisson arrivals; a longer load of a seed
    begins with the shorter one.
    """
    if key.workload in TRACES:
        return _window(key)
    if key.workload == "agents":
        return _agents(key)
    rng = np.random.default_rng([key.seed, 1])
    count = key.num_requests
    arrivals = gamma_arrivals(count, rate=1.0, rng=np.random.default_rng([key.seed, 3]))
    if key.workload == "wave":
        times = np.linspace(0.0, arrivals[-1] + WAVE_REQUESTS, 64 * (count + 1))
        turn = 2 * np.pi / WAVE_REQUESTS
        arrivals = np.interp(arrivals, times + WAVE_HEIGHT / turn * (1 - np.cos(turn * times)), times)
    if key.workload in MADE:
        prompts, outputs = _draw_mixture(MADE[key.workload], key)
        outputs = np.minimum(outputs, key.max_model_len - 1)
        prompts = np.minimum(prompts, key.max_model_len - outputs)
    else:
        lengths, _ = _fitting(key.workload, key.max_model_len)
        rows = rng.integers(len(lengths), size=count)
        prompts, outputs = lengths.num_prompt_tokens[rows], lengths.num_output_tokens[rows]
    return OfferedLoad(
        name=key.workload,
        arrivals=arrivals,
        num_prompt_tokens=np.maximum(1, prompts),
        num_output_tokens=np.maximum(1, outputs),
    )


def _agents(key: LoadKey) -> OfferedLoad:
    """Return sessions whose calls share a growing prefix."""
    rows = np.arange(key.num_requests)
    groups, inside = np.divmod(rows, AGENTS * AGENT_CALLS)
    calls, sessions = inside // AGENTS, inside % AGENTS + groups * AGENTS
    rng = np.random.default_rng([key.seed, 6])
    first = AGENT_BLOCKS + sessions * CALL_BLOCKS * AGENT_CALLS
    block_ids = tuple(
        (*range(AGENT_BLOCKS), *range(own, own + CALL_BLOCKS * (call + 1)))
        for own, call in zip(first.tolist(), calls.tolist(), strict=True)
    )
    return OfferedLoad(
        name=key.workload,
        arrivals=gamma_arrivals(key.num_requests, rate=1.0, rng=rng),
        num_prompt_tokens=np.array([len(ids) * BLOCK_SIZE for ids in block_ids]),
        num_output_tokens=rng.integers(20, 200, key.num_requests),
        block_ids=block_ids,
        block_size=BLOCK_SIZE,
    )


def _draw_mixture(
    parts: tuple[tuple[float, int, int], ...], key: LoadKey
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    which = np.random.default_rng([key.seed, 4]).choice(
        len(parts), size=key.num_requests, p=[share for share, _, _ in parts]
    )
    means = np.array([(prompt, output) for _, prompt, output in parts], dtype=np.float64)[which]
    normal = np.random.default_rng([key.seed, 5]).standard_normal((key.num_requests, 2))
    lengths = np.rint(means * np.exp(MADE_SIGMA * normal - MADE_SIGMA**2 / 2)).astype(np.int64)
    return lengths[:, 0], lengths[:, 1]


def _window(key: LoadKey) -> OfferedLoad:
    trace, times = _fitting(key.workload, key.max_model_len)
    start = int((key.seed + 1) * _GOLDEN % 1.0 * len(trace))
    places = np.arange(start, start + key.num_requests)
    rows, rounds = places % len(trace), places // len(trace)
    length = float(times[-1] - times[0] + np.mean(np.diff(times)))
    arrivals = times[rows] + rounds * length
    chosen = trace.take(rows)
    block_ids = chosen.block_ids
    if block_ids is not None and rounds[-1]:
        first_new = 1 + max(map(max, (ids for ids in block_ids if ids)))
        block_ids = tuple(
            tuple(each + first_new * turn for each in ids)
            for ids, turn in zip(block_ids, rounds.tolist(), strict=True)
        )
    return OfferedLoad(
        name=key.workload,
        arrivals=arrivals - arrivals[0],
        num_prompt_tokens=np.maximum(1, chosen.num_prompt_tokens),
        num_output_tokens=np.maximum(1, chosen.num_output_tokens),
        block_ids=block_ids,
        block_size=chosen.block_size,
    )


@lru_cache(maxsize=4)
def _fitting(workload: str, max_model_len: int) -> tuple[Trace, NDArray[np.float64]]:
    """Return the requests of a file that fit the context, and their times (zeros where it has none)."""
    trace = _read(TRACES.get(workload) or DRAWN[workload])
    times = np.zeros(len(trace)) if trace.times is None else trace.times
    if workload == "mooncake":
        times = spread_ticks(times, np.random.default_rng(2))
    fits = np.flatnonzero(trace.num_prompt_tokens + trace.num_output_tokens + 2 <= max_model_len)
    return trace.take(fits), times[fits]


def spread_ticks(times: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Return times of which equal ones are spread at random over the time to the next one."""
    ticks, counts = np.unique(times, return_counts=True)
    lengths = np.append(np.diff(ticks), np.median(np.diff(ticks)) if len(ticks) > 1 else 0.0)
    return np.sort(times + rng.random(len(times)) * np.repeat(lengths, counts))


@lru_cache(maxsize=8)
def _read(name: str) -> Trace:
    shared = os.environ.get("ONBEAT_SHARED")
    if not shared:
        raise ConfigError("the traces' folder is needed: set ONBEAT_SHARED (traces lie under data/traces)")
    return read_trace(Path(shared) / "data" / "traces" / name)
