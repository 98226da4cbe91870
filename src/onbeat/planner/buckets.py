"""A load cut into buckets of requests of like size and equal objectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onbeat.core.slo import SLO
from onbeat.workload.offered import OfferedLoad

PROMPT_EDGES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Upper ends of the ranges of prompt tokens; the last range has none."""
OUTPUT_EDGES = (16, 64, 128, 256, 512, 1024, 2048)
"""The same of output tokens."""

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Requests that the planner takes to be alike."""

    share: float
    """Of all requests, in (0, 1]."""
    num_prompt_tokens: int
    """Their mean, rounded."""
    num_output_tokens: int
    slo: SLO
    rows: Rows
    """Of the load."""

    @property
    def name(self) -> str:
        return f"{self.num_prompt_tokens} in, {self.num_output_tokens} out"


def buckets_of(load: OfferedLoad) -> tuple[Bucket, ...]:
    """Return the buckets that hold requests, by class of objectives, prompt and output."""
    prompts = np.searchsorted(PROMPT_EDGES, load.num_prompt_tokens)
    outputs = np.searchsorted(OUTPUT_EDGES, load.num_output_tokens)
    classes = np.zeros(len(load), np.int64) if load.class_ids is None else load.class_ids.astype(np.int64)
    keys = np.stack([classes, prompts, outputs], axis=1)
    _, bucket_of_row = np.unique(keys, axis=0, return_inverse=True)
    bucket_of_row = bucket_of_row.reshape(-1)
    buckets = []
    for number in range(int(bucket_of_row.max()) + 1):
        rows = np.flatnonzero(bucket_of_row == number)
        buckets.append(
            Bucket(
                share=len(rows) / len(load),
                num_prompt_tokens=round(float(load.num_prompt_tokens[rows].mean())),
                num_output_tokens=round(float(load.num_output_tokens[rows].mean())),
                slo=load.slo(int(rows[0])) or SLO(),
                rows=rows,
            )
        )
    return tuple(buckets)


def rows_of(buckets: Sequence[Bucket]) -> Rows:
    """Return the rows of some buckets, in the order of the load."""
    return np.sort(np.concatenate([bucket.rows for bucket in buckets]))
