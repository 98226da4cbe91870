"""What requests asked for, as pages show it: in words, and as limits in distributions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onbeat.core.slo import SLO
from onbeat.metrics.summary import RunSummary

_NAMES = {"ttft": "TTFT", "tbt": "TBT", "tpot": "TPOT", "e2e": "E2E"}
_OBJECTIVE_OF = {"ttft": "ttft", "itl": "tbt", "tpot": "tpot"}
"""Metric -> the objective that limits it."""
_MOST_NAMED = 3
"""Classes whose objectives a sentence holds."""


def classes_text(objectives: Mapping[str, SLO | None]) -> str:
    """Return the objectives of classes in words: `TTFT 1000 ms and TBT 50 ms`; empty where none has any.

    Parameters
    ----------
    objectives : by the name of the class.
    """
    return _asked_text({name: _limits(slo) for name, slo in objectives.items() if slo is not None})


def run_text(summary: RunSummary) -> str:
    """Return in words what a run's requests asked for, and how it was judged; empty where it was nothing."""
    text = _asked_text(_asked(summary))
    is_judged_by_mode = summary.score.own.num_offered and _NAMES["tbt"] in text
    return f"{text} ({summary.score.slo_mode} mode)" if is_judged_by_mode else text


def limits_of(summaries: Iterable[RunSummary], metric: str) -> dict[float, str]:
    """Return the objectives of a metric in some runs, ms, each with the classes that have it.

    Parameters
    ----------
    metric : of `METRICS`.
    """
    own = _OBJECTIVE_OF.get(metric, "")
    found: dict[float, dict[str, None]] = {}
    for asked in map(_asked, summaries):
        for name, limits in asked.items():
            if own in limits:
                found.setdefault(limits[own] * 1e3, {})[name if len(asked) > 1 else "objective"] = None
    return {limit: ", ".join(found[limit]) for limit in sorted(found)}


def _asked(summary: RunSummary) -> dict[str, dict[str, float]]:
    """Return objectives, seconds, by class: those of the requests, else those of the whole run."""
    score = summary.score
    if not score.own.num_offered:
        renamed = {name.replace("e2el", "e2e"): limit for name, limit in score.objectives.items()}
        return {"": renamed} if renamed else {}
    classes = {name: own.objectives for name, own in summary.classes.items()}
    return {name: _limits(slo) for name, slo in classes.items() if slo is not None}


def _limits(slo: SLO) -> dict[str, float]:
    values = {name: getattr(slo, name, None) for name in _NAMES}
    return {name: value for name, value in values.items() if value is not None}


def _asked_text(asked: Mapping[str, Mapping[str, float]]) -> str:
    asked = {name: limits for name, limits in asked.items() if limits}
    if len(asked) > _MOST_NAMED:
        return f"objectives of {len(asked)} classes"
    texts = {name: _limits_text(limits) for name, limits in asked.items()}
    if len(texts) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{name} {text}" for name, text in texts.items())


def _limits_text(limits: Mapping[str, float]) -> str:
    words = [f"{_NAMES[name]} {limit * 1e3:g} ms" for name, limit in limits.items()]
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
