"""Capacity within latency objectives, with adaptive drafts and without, on the very same requests.

Cells, loads, searches and scores are those of `slo_study`; each seed's capacity without drafts is where the
search with drafts starts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from slo_study.cells import SET_UPS
from slo_study.grid_search import index_near, search_grid
from slo_study.loads import LoadKey
from slo_study.tasks import GRID
from slo_study.trials import Question, Trials, max_model_len

from onbeat.simulator.acceptance import Acceptance
from onbeat.simulator.speculation import SpeculationSettings

POLICY = "slo"
SHARE = 0.99
OFF = "off"
LOOKED_UP, COMPUTED = "n-gram", "draft model"
DRAFTERS = (LOOKED_UP, COMPUTED)
ACCEPTANCES = (0.5, 0.7, 0.9)
OBJECTIVES = ("1s-50ms", "1s-100ms", "2s-250ms")
WORKLOADS = ("poisson", "azure-code")
NUM_DRAFTS = 4
HIT_RATE = 0.5
"""Share of the steps for which a request's own text has something to look up."""
DRAFT_MODELS = {"mistral": "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "llama": "meta-llama/Llama-3.2-1B"}
FIRST_GUESS = 5.0
"""Requests per second from which the search without drafts starts."""


def drafting(set_up: str, drafter: str, acceptance: float) -> str:
    """Return the name of a set-up with drafts, which `slo_study` then knows."""
    if drafter == OFF:
        return set_up
    name = f"{set_up}, {drafter} {acceptance:g}"
    is_looked_up = drafter == LOOKED_UP
    speculation = SpeculationSettings(
        num_speculative_tokens=NUM_DRAFTS,
        draft_model=None if is_looked_up else DRAFT_MODELS[set_up],
        acceptance=Acceptance(rate=acceptance, hit_rate=HIT_RATE if is_looked_up else None),
    )
    SET_UPS[name] = replace(SET_UPS[set_up], speculation=speculation)
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRun:
    """One search: the highest rate at which a share of the requests is good."""

    set_up: str
    workload: str
    slo: str
    drafter: str
    """`off`, or one of `DRAFTERS`."""
    acceptance: float
    """0 without drafts."""
    seed: int
    num_requests: int
    start: float = FIRST_GUESS
    """Where the search begins, requests per second; it does not name the run."""
    deadline: float = 1e18

    def run(self) -> dict[str, float]:
        """Return the capacity, requests per second.

        Raises
        ------
        OutOfTime : the deadline (seconds since 1970) came first.
        """
        key = LoadKey(
            workload=self.workload,
            seed=self.seed,
            num_requests=self.num_requests,
            max_model_len=max_model_len(self.set_up),
        )
        question = Question(slo=self.slo, mode="stream")
        set_up = drafting(self.set_up, self.drafter, self.acceptance)
        trials = Trials(set_up, POLICY, key, [question], self.deadline)
        found = search_grid(
            lambda index: trials.keeps(index, question, SHARE), start=index_near(self.start), grid=GRID
        )
        return {"capacity": found.rate, "num_runs": trials.num_runs}
