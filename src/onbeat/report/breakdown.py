"""Who pays where not all requests are good, as a sentence and rows of tables.

Both are made from the keys of a saved result (`metrics.breakdown`).
"""

from __future__ import annotations

from typing import Any

from rich.table import Table

from onbeat.report.table import number, rows_table
from onbeat.report.units import duration, percent, short

DECILES_TITLE = "Objectives by length of prompt"
TENANTS_TITLE = "Objectives by tenant"
_OUTCOME_COLUMNS = ("requests", "good", "longest wait", "TTFT P50")
DECILE_COLUMNS = ("prompt tokens", *_OUTCOME_COLUMNS)
TENANT_COLUMNS = ("tenant", "prompt tokens", *_OUTCOME_COLUMNS)


def worst_decile_line(summary: dict[str, Any]) -> str | None:
    """Return which prompts have the least attainment, and their longest wait; None of nothing to compare."""
    worst = summary["worst_decile"]
    if worst is None:
        return None
    seconds = worst["longest_wait_ms"] / 1e3
    wait = duration(seconds) if seconds < 1 else f"{short(seconds)} s"  # minutes would hide how far it is off
    return (
        f"Worst decile (prompts of {prompt_span(worst)} tokens): {percent(worst['attainment'])} good, "
        f"longest wait {wait}"
    )


def decile_rows(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return one row a decile of prompt length, as `DECILE_COLUMNS` names it; none of fewer than two."""
    deciles = summary["attainment_by_prompt_decile"]
    return [(prompt_span(own), *_cells(own)) for own in deciles if len(deciles) > 1]


def tenant_rows(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return one row a tenant, as `TENANT_COLUMNS` names it; none of fewer than two."""
    tenants = summary["attainment_by_tenant"]
    return [(_tenant_name(own), prompt_span(own), *_cells(own)) for own in tenants if len(tenants) > 1]


def breakdown_tables(summary: dict[str, Any]) -> list[Table]:
    """Return the tables of one run for a terminal; none where there is nothing to compare."""
    sections = (
        (DECILES_TITLE, DECILE_COLUMNS, decile_rows(summary)),
        (TENANTS_TITLE, TENANT_COLUMNS, tenant_rows(summary)),
    )
    return [rows_table(f"{title} (times in ms)", columns, rows) for title, columns, rows in sections if rows]


def prompt_span(own: dict[str, Any]) -> str:
    """Return the lengths of the prompts of a group, in words."""
    shortest, longest = own["min_prompt_tokens"], own["max_prompt_tokens"]
    return f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"


def _cells(own: dict[str, Any]) -> tuple[str, ...]:
    return (
        number(own["offered"]),
        f"{own['attainment']:.1%}",
        number(own["longest_wait_ms"]),
        number(own["median_ttft_ms"]),
    )


def _tenant_name(own: dict[str, Any]) -> str:
    if own["num_tenants"] > 1:
        return f"({own['num_tenants']:,} others)"
    return own["tenant"] or "(nobody named)"
