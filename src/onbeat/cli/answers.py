"""The first sentences of the pages of `onbeat capacity` and `onbeat plan`, for who decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onbeat.core.slo import SLO
from onbeat.perfmodel.device_spec import find_device
from onbeat.planner.objectives import JOBS_KEPT, JobsObjective, Objective, ShareObjective, Verdict
from onbeat.report.objectives import classes_text
from onbeat.report.units import duration, rate_text

COST, LIMIT = "What it costs", "What limits it"
"""What a reader wants to know next."""
HOURS_A_MONTH = 730
_PLACES = {"ttft": "to the first token", "tbt": "between tokens", "e2e": "to the last token"}


def gpus_text(device: str, count: int) -> str:
    """Return a number of GPUs: `2 \u00d7 H100 SXM5 80 GB`."""
    return f"{count} \u00d7 {find_device(device).name.removeprefix('NVIDIA ')}"


def limits_text(objectives: Mapping[str, SLO]) -> str:
    """Return in words within what answers are to come; empty where nothing is asked.

    Parameters
    ----------
    objectives : by the name of the class.
    """
    if len(objectives) != 1:
        text = classes_text(objectives)
        return f"the objectives of their classes ({text})" if text else ""
    (slo,) = objectives.values()
    limits = {name: getattr(slo, name) for name in _PLACES}
    words = [f"{duration(limit)} {_PLACES[name]}" for name, limit in limits.items() if limit is not None]
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def promise_text(objective: Objective, objectives: Mapping[str, SLO]) -> str:
    """Return what a rate must keep, after `and`: `keep 99 % of the answers within 1 s to the first token`."""
    if isinstance(objective, JobsObjective):
        return f"keep the deadlines of {objective.share * 100:g} % of the jobs"
    limits = limits_text(objectives)
    if isinstance(objective, ShareObjective):
        return f"keep {objective.share * 100:g} % of the answers within {limits}"
    if objective.name == "sarathi":
        return f"keep 99 % of the waits within {limits}, and half of the requests begin within 2 s"
    return "begin 99 % of the requests within 5 s"


def third_person(text: str) -> str:
    """Return what one GPU does, of what several do: `serves 3 requests/s`."""
    verb, _, rest = text.partition(" ")
    return f"{verb}s {rest}"


def cost_text(usd_per_hour: float, tokens_per_second: float) -> str:
    """Return what an hour, a month and a million output tokens cost."""
    text = f"${usd_per_hour:,.2f} an hour, about ${usd_per_hour * HOURS_A_MONTH:,.0f} a month."
    if not tokens_per_second:  # embeddings have none
        return text
    return f"{text} A million output tokens cost ${usd_per_hour / (tokens_per_second * 3600) * 1e6:,.2f}."


def state_text(verdict: Verdict) -> str:
    """Return what a run showed: `98.8 % of the answers are in time`."""
    words = []
    for measure in verdict.measures:
        if measure.unit == "share":
            what = "jobs" if measure.name == JOBS_KEPT else "answers"
            words.append(f"{measure.value * 100:.3g} % of the {what} are in time")
        else:
            words.append(f"the {measure.name} is {duration(measure.value)}")
    return " and ".join(words)


def limit_text(rate: float, verdict: Verdict, *, of: str = "request") -> str:
    """Return what a rate that is a little too high misses."""
    missed: Sequence[str] = [
        f"{measure.limit * 100:g} % are promised. Most of the others miss the {measure.binds}."
        if measure.unit == "share"
        else f"the {measure.name} may be {duration(measure.limit)}."
        for measure in verdict.measures
        if not measure.is_met
    ]
    return f"At {rate_text(rate, of=of)}, {state_text(verdict)}; {' '.join(missed[:1])}"
