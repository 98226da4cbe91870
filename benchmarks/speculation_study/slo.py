"""Capacity within latency objectives, with adaptive drafts and without, on the very same requests.

Set-ups, loads that last, searches and scores are those of `slo_study`; each seed's capacity without drafts is
where the search with drafts starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from onbeat.core.options import change
from onbeat.simulator.acceptance import Acceptance
from onbeat.simulator.speculation import SpeculationSettings
from slo_study.cells import SET_UPS, settings_of
from slo_study.search import find_capacity
from slo_study.trial import Question, Runner, longest_request

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
    SET_UPS[name] = change(SET_UPS[set_up], speculation=speculation)
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
    start: float = FIRST_GUESS
    """Where the search begins, requests per second; it does not name the run."""

    def run(self) -> dict[str, float]:
        """Return the capacity, requests per second."""
        set_up = drafting(self.set_up, self.drafter, self.acceptance)
        runner = Runner(settings_of(set_up, POLICY), self.workload, longest_request(self.set_up))
        question = Question(self.slo, "stream")
        rate = find_capacity(runner, question, f"{SHARE * 100:g} %", start=self.start, seed=self.seed)
        return {"capacity": rate}
