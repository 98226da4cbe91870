"""The first sentences of the pages of a capacity and a plan, and what their charts mark."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from onbeat.cli import plan_output
from onbeat.cli.answers import cost_text, limit_text, promise_text, state_text
from onbeat.cli.capacity_output import CapacityReport, answer_of, capacity_result, facts_of, search_figures
from onbeat.cli.plan_output import FLEET_LEGEND, conclusions, plan_result
from onbeat.core.options import change
from onbeat.core.slo import SLO
from onbeat.planner.capacity import Capacity, Repeat, SearchEnd
from onbeat.planner.objectives import Measure, parse_objective, verdict_of
from onbeat.planner.search import Bracket, Trial
from onbeat.planner.units import Unit, device_text
from onbeat.report.charts import capacity_marks
from onbeat.report.result import Table, write_page
from tests.pure.cli.test_plan_warnings import fleet_of, report_of
from tests.pure.planner.test_units import BASE
from tests.told import numbers

CHAT = {"": SLO(ttft=0.5, tbt=0.1)}
PROMISE = promise_text(parse_objective("attainment:0.99"), CHAT)


def share(value: float):
    binds = "time to the first token (TTFT)"
    return verdict_of((Measure(name="attainment", value=value, limit=0.99, unit="share", binds=binds),))


LOST = (Trial(rate=28.0, verdict=share(0.02)),)


def found(**labels: str) -> Capacity:
    trials = (Trial(rate=7.0, verdict=share(1.0)), Trial(rate=14.0, verdict=share(0.992)))
    bracket = Bracket(low=14.0, high=14.3, trials=trials, is_finished=True)
    beyond = tuple(
        Trial(rate=rate, verdict=share(good)) for rate, good in ((14.3, 0.985), (17.5, 0.9), (28.0, 0.61))
    )
    return Capacity(
        labels=tuple(labels.items()),
        outcome=SearchEnd.FOUND,
        rate=14.0,
        interval=(14.0, 14.3),
        num_devices=2,
        reason="at 14.3 requests/s: too few",
        repeats=(Repeat(bracket=bracket, reason="", num_devices=2, beyond=beyond),),
    )


def page_report(*capacities: Capacity) -> CapacityReport:
    return CapacityReport(
        title="Capacity",
        lead="a load",
        settings={
            "flags": {"device": "h100-sxm"},
            "load": {"mean_output_tokens": 200.0, "num_requests": 150},
        },
        capacities=capacities,
        promises={each.labels: PROMISE for each in capacities},
    )


def test_a_capacity_of_jobs_is_of_jobs() -> None:
    report, load = page_report(found()), {"mean_output_tokens": 20.0, "num_requests": 1500}
    settings = {**report.settings, "load": {**load, "requests_per_job": 10}}
    of_jobs = replace(report, unit="job", settings=settings)
    assert answer_of(of_jobs) == answer_of(report).replace("requests/s", "jobs/s")
    assert dict(facts_of(of_jobs))["What it costs"] == dict(facts_of(report))["What it costs"]
    assert "jobs/s" in str(capacity_result(of_jobs).sections) + str(capacity_result(of_jobs).warnings)
    assert "requests/s" not in str(search_figures([found()], unit="job"))


def test_a_capacity_answers_before_it_explains(tmp_path: Path) -> None:
    report = page_report(found())
    answer = answer_of(report)
    assert answer.startswith("2 \u00d7 H100 SXM5 80 GB ")
    assert numbers(answer)[2:] == [14, 99, 500, 100, 13.76]
    facts = dict(facts_of(report))
    assert numbers(facts["What it costs"])[:2] == [13.76, 10045]
    assert numbers(facts["What limits it"]) == [14.3, 98.5, 99, 28, 61]
    assert "(TTFT)" in facts["What limits it"]
    path = tmp_path / "page.html"
    write_page(capacity_result(report), path)
    text = path.read_text()
    assert text.index(answer) < text.index("What it costs") < text.index("<details>")
    assert len(text) < 1_000_000


def test_the_share_is_drawn_over_the_rate_with_the_promise_and_the_capacity() -> None:
    (figure,) = search_figures([found()])
    line, mark = figure["data"]
    assert (line["x"], line["y"]) == ([7.0, 14.0, 14.3, 17.5, 28.0], [100, 99.2, 98.5, 90, 61])
    assert (mark["x"], mark["y"]) == ([14.0], [99.2])
    assert figure["layout"]["annotations"][0]["text"] == "99 % promised"
    (lost,) = search_figures([replace(found(), repeats=(replace(found().repeats[0], beyond=LOST),))])
    assert "type" not in lost["layout"]["yaxis"], "few good requests do not make it a logarithmic axis"


def test_a_case_that_cannot_keep_it_says_so() -> None:
    none = replace(found(), outcome=SearchEnd.INFEASIBLE, rate=0.0, repeats=(), reason="too slow")
    report = page_report(none)
    assert re.fullmatch(r"INFEASIBLE: .*: too slow\.", answer_of(report))
    assert facts_of(report) == []
    several = page_report(found(policy="slo"), replace(found(policy="orca"), rate=3.0))
    assert answer_of(several).endswith(" 2 cases: policy slo.")


def test_latencies_are_told_with_their_limits() -> None:
    verdict = verdict_of((Measure(name="P99 TBT", value=0.051, limit=0.05),))
    assert numbers(limit_text(3.0, verdict)) == [3, 51, 50]
    assert "P99 TBT is 51 ms" in state_text(verdict)
    assert state_text(verdict) in limit_text(3.0, verdict)


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ("sarathi", "keep 99 % of the waits within 500 ms to the first token and 100 ms between tokens"),
        ("vidur", "begin 99 % of the requests within 5 s"),
        ("distserve:0.9", "keep 90 % of the answers within 500 ms to the first token"),
    ],
)
def test_promises_have_words(objective: str, words: str) -> None:
    assert promise_text(parse_objective(objective, tbt=0.1), CHAT).startswith(words)


def test_a_plan_answers_before_it_explains() -> None:
    report = report_of(fleet_of([12.0], [0.97]))
    (answer,) = plan_output.answer_of(report)
    assert numbers(answer)[-4:] == [10, 90, 1, 2]
    facts = dict(plan_output.facts_of(report))
    assert numbers(facts["What limits it"]) == [12, 20]
    assert "(TTFT)" in facts["What limits it"]


def test_a_plan_is_told_in_plain_words() -> None:
    settings = change(BASE, device="l4", tensor_parallel=2)
    pair = Unit(settings=settings, usd_per_hour=1.4, watts=144.0)
    assert pair.times(1) == "1 \u00d7 (2 L4)"
    best = replace(fleet_of([13.7, 13.7], [0.96, 0.97]), parts=((pair, 3),))
    report = report_of(best)
    lines = conclusions(report)
    assert lines[:3] == [
        "Plan: 3 \u00d7 (2 L4). The cost is $4.20 an hour, and the GPUs draw at most 432 watts.",
        "Simulated, 96.5 % of the requests are in time; 90 % are promised. The 95 % interval over 2 runs is "
        "90.1 to 100.0 %.",
        "The fleet keeps the promise up to 13.7 requests/s, 37 % more than asked for. Beyond that, most late "
        "requests miss the time to the first token (TTFT).",
    ]
    parts = [part for section in plan_result(report).sections for part in section.parts]
    (table,) = (part for part in parts if isinstance(part, Table) and part.caption == FLEET_LEGEND)
    row = dict(zip((column.title for column in table.columns), table.cells[0], strict=True))
    assert (row["fleet"], row["limit"]) == ("3 \u00d7 (2 L4)", "first token")
    assert device_text("/my/gpu.yaml") == "/my/gpu.yaml"


def test_what_no_output_token_costs_is_not_said() -> None:
    assert cost_text(1.5, 1000) == "$1.50 an hour, about $1,095 a month. A million output tokens cost $0.42."
    assert cost_text(1.5, 0) == "$1.50 an hour, about $1,095 a month."


def test_a_load_that_saturates_nothing_tells_no_capacity() -> None:
    capacity = replace(found(), outcome=SearchEnd.UNBOUNDED, rate=101_036.0, interval=(101_036.0, math.inf))
    report = page_report(capacity)
    assert answer_of(report) == (
        "No rate missed the objective: the load is too short to tell what 2 \u00d7 H100 SXM5 80 GB can serve."
    )
    (warning,) = capacity_result(report).warnings
    assert "raise --num-prompts" in warning


def test_many_capacities_in_one_figure_have_no_names_to_lie_over_each_other() -> None:
    few, many = ([(float(load), 90.0) for load in range(number)] for number in (3, 4))
    assert capacity_marks(few)["text"] == ["0", "1", "2"]
    assert set(capacity_marks(many)["text"]) == {""}
