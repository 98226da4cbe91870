"""Who pays, in words and rows."""

from __future__ import annotations

from typing import Any

import pytest

from onbeat.metrics.breakdown import Breakdown, GroupOutcome, TenantOutcome
from onbeat.report.result import Beside, Table
from onbeat.report.run_report import breakdown_sections, decile_figure, worst_decile_line


def group(shortest: int, longest: int, **fields: Any) -> GroupOutcome:
    values: dict[str, Any] = {
        "num_offered": 200,
        "num_good": 78,
        "longest_wait": 232.4,
        "median_ttft": None,
        **fields,
    }
    return GroupOutcome(min_prompt_tokens=shortest, max_prompt_tokens=longest, **values)


def breakdown(*deciles: GroupOutcome, tenants: tuple[TenantOutcome, ...] = ()) -> Breakdown:
    return Breakdown(deciles=deciles, tenants=tenants)


def tenant(name: str | None, num_tenants: int) -> TenantOutcome:
    return TenantOutcome(tenant=name, num_tenants=num_tenants, outcome=group(1, 9))


@pytest.mark.parametrize(
    ("worst", "line"),
    [
        (
            group(2_735, 7_436),
            "Worst decile (prompts of 2,735 to 7,436 tokens): 39 % good, longest wait 232 s",
        ),
        (
            group(64, 64, num_good=200, longest_wait=0.042),
            "Worst decile (prompts of 64 tokens): 100 % good, longest wait 42 ms",
        ),
    ],
)
def test_one_line_says_who_pays(worst: GroupOutcome, line: str) -> None:
    best = group(1, 9, num_good=200, longest_wait=0.001)
    assert worst_decile_line(breakdown(best, worst)) == line


def cells(own: Breakdown) -> list[list[list[str]]]:
    """Those of each table."""
    parts = [part for section in breakdown_sections(own, {}) for part in section.parts]
    parts = [each for part in parts for each in (part.parts if isinstance(part, Beside) else [part])]
    return [part.cells for part in parts if isinstance(part, Table)]


def test_rows_have_numbers_for_people() -> None:
    first = group(1, 9, num_offered=1000, num_good=997, longest_wait=0.94, median_ttft=0.08425)
    assert cells(breakdown(first, group(2_735, 7_436))) == [
        [
            ["1 to 9", "1,000", "99.7%", "940.0", "84.2"],
            ["2,735 to 7,436", "200", "39.0%", "232,400", "-"],
        ]
    ]


def test_tenants_without_a_name_and_in_company_are_told_apart() -> None:
    (rows,) = cells(breakdown(tenants=(tenant("a", 1), tenant(None, 1), tenant(None, 1_200))))
    assert [row[0] for row in rows] == ["a", "(nobody named)", "(1,200 others)"]
    assert rows[0][1:] == ["1 to 9", "200", "39.0%", "232,400", "-"]


@pytest.mark.parametrize("deciles", [(), (group(64, 64),)])
def test_nothing_is_shown_where_there_is_nothing_to_compare(deciles: tuple[GroupOutcome, ...]) -> None:
    alone = breakdown(*deciles, tenants=(tenant("a", 1),))
    assert worst_decile_line(alone) is None
    assert decile_figure(alone) is None
    assert breakdown_sections(alone, {}) == []
