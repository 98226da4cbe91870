"""Who pays, in words and rows."""

from __future__ import annotations

from typing import Any

import pytest

from onbeat.report.breakdown import decile_rows, tenant_rows, worst_decile_line
from onbeat.report.breakdown_chart import decile_figure


def group(shortest: int, longest: int, **fields: Any) -> dict[str, Any]:
    return {
        "min_prompt_tokens": shortest,
        "max_prompt_tokens": longest,
        "offered": 200,
        "good": 78,
        "attainment": 0.39,
        "longest_wait_ms": 232_400.0,
        "median_ttft_ms": None,
        **fields,
    }


def summary(*deciles: dict[str, Any], tenants: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {
        "attainment_by_prompt_decile": list(deciles),
        "attainment_by_tenant": list(tenants),
        "worst_decile": deciles[-1] if len(deciles) > 1 else None,
    }


@pytest.mark.parametrize(
    ("worst", "line"),
    [
        (
            group(2_735, 7_436),
            "Worst decile (prompts of 2,735 to 7,436 tokens): 39 % good, longest wait 232 s",
        ),
        (
            group(64, 64, attainment=1.0, longest_wait_ms=42.0),
            "Worst decile (prompts of 64 tokens): 100 % good, longest wait 42 ms",
        ),
    ],
)
def test_one_line_says_who_pays(worst: dict[str, Any], line: str) -> None:
    assert worst_decile_line(summary(group(1, 9), worst)) == line


def test_rows_have_numbers_for_people() -> None:
    first = group(1, 9, attainment=0.997, longest_wait_ms=940.0, median_ttft_ms=84.25)
    assert decile_rows(summary(first, group(2_735, 7_436))) == [
        ("1 to 9", "200", "99.7%", "940.0", "84.2"),
        ("2,735 to 7,436", "200", "39.0%", "232,400", "-"),
    ]


def test_tenants_without_a_name_and_in_company_are_told_apart() -> None:
    tenants = tuple(
        {"tenant": name, "num_tenants": count, **group(1, 9)}
        for name, count in (("a", 1), (None, 1), (None, 1_200))
    )
    rows = tenant_rows(summary(tenants=tenants))
    assert [row[0] for row in rows] == ["a", "(nobody named)", "(1,200 others)"]
    assert rows[0][1:] == ("1 to 9", "200", "39.0%", "232,400", "-")


@pytest.mark.parametrize("deciles", [(), (group(64, 64),)])
def test_nothing_is_shown_where_there_is_nothing_to_compare(deciles: tuple[dict[str, Any], ...]) -> None:
    alone = summary(*deciles, tenants=({"tenant": "a", "num_tenants": 1, **group(1, 9)},))
    assert worst_decile_line(alone) is None
    assert decile_figure(alone) is None
    assert decile_rows(alone) == tenant_rows(alone) == []
