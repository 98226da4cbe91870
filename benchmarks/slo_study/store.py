"""Results, one JSON line for each (cell, policy, seed); runs skip what is there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slo_study.cells import BOUND, Cell, is_blind, settings_of
from slo_study.grid_search import RATE_STEP

STUDY_VERSION = 2
"""Counts up with changes to loads or scoring that make earlier results incomparable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What one policy reached in one cell with one seed. Rates are requests per second."""

    set_up: str
    workload: str
    slo: str
    mode: str
    policy: str
    seed: int
    fingerprint: str
    tag: str
    """Version of a policy that plans with objectives; empty for all else."""
    num_requests: int
    """Without those that are over-long."""
    num_hopeless: int
    num_skipped: int
    capacity: dict[str, float]
    """Share -> the highest rate that keeps it; 0 where none does."""
    long: dict[str, float] = field(default_factory=dict)
    """Likewise in a longer window, to 3 %; only of hand-tuned policies, for the first seeds.
    Of the bound: what can be sustained for ever."""
    loose: dict[str, float] = field(default_factory=dict)
    """Likewise in the longer window with loosened objectives."""
    unbounded: list[str] = field(default_factory=list)
    """Shares that even the highest rate of the search keeps."""
    num_runs: int = 0
    seconds: float = 0.0

    @property
    def cell(self) -> Cell:
        return Cell(self.set_up, self.workload, self.slo, self.mode)  # type: ignore[arg-type]

    @property
    def key(self) -> tuple[Cell, str, int]:
        return self.cell, self.policy, self.seed


def fingerprint(set_up: str, policy: str, num_requests: int, long_factor: int, tag: str) -> str:
    """Name the settings that a line depends on.

    Parameters
    ----------
    tag : version of the policies that plan with objectives; hand-tuned ones are older than any.
    """
    replica = settings_of(set_up, policy)
    settings = {
        "version": STUDY_VERSION,
        "step": RATE_STEP,
        "replica": [replica.model, replica.device, replica.max_num_seqs, replica.max_num_batched_tokens],
        "policy": policy,
        "num_requests": num_requests,
        "long": long_factor if is_blind(policy) else None,
        "tag": tag_of(policy, tag),
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def tag_of(policy: str, tag: str) -> str:
    """Return the version that a policy's lines carry: hand-tuned ones and the bound are older than any."""
    return "" if policy == BOUND or is_blind(policy) else tag


class Store:
    """A file of lines, to which many runs append."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Line]:
        """Return all lines; of equal keys and fingerprints the last."""
        if not self.path.exists():
            return []
        found: dict[Any, Line] = {}
        for text in self.path.read_text(encoding="utf-8").splitlines():
            line = Line(**json.loads(text))
            found[line.key, line.fingerprint] = line
        return list(found.values())

    def append(self, lines: Iterable[Line]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(asdict(line)) + "\n")
