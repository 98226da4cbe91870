"""A fleet of replicas in `onbeat top`: one line for all, and a row for each. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from onbeat.metrics.exposition import Scrape, ScrapeWindow
from onbeat.report.units import duration, percent, short

_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "down": "bold red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRow:
    """One replica."""

    name: str
    state: str
    running: float | None
    waiting: float | None
    kv_share: float | None
    step_seconds: float | None
    predicted_wait: float | None
    hits: float | None
    """Of the prompt tokens looked up of late, those found in its prefix cache."""
    routed: float | None
    """Requests sent to it per second."""
    lives: float
    moves: float
    """Requests that came with their KV, and that left with it."""
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRows:
    """All replicas, and what deaths have cost."""

    states: dict[str, float]
    waiting: float
    """Requests that no replica has."""
    resumed: float
    resumed_tokens: float
    moved: float
    """Requests that went on elsewhere with their KV."""
    lost: float
    """Requests that ended with an error since their replicas were lost."""
    error_p50: float | None
    """|predicted - actual| / actual, of the router's TTFT."""
    replicas: tuple[ReplicaRow, ...]
    scaling: ScalingRow | None
    """Of a fleet that changes its own size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """What a fleet has decided about its size."""

    wanted: float
    least: float
    most: float
    load_share: float | None
    planned_share: float | None
    ups: float
    """Decisions to have more replicas; `downs`: fewer."""
    downs: float


def fleet_rows(recent: ScrapeWindow) -> FleetRows | None:
    """Return what a server's metrics say of its replicas; None where there can be but one."""
    new = recent.new
    names = sorted(new.label_values("onbeat_replica_lives", "engine"), key=lambda name: (len(name), name))
    scaling = _scaling(new)
    if len(names) < 2 and scaling is None:
        return None
    states = {
        state: new.value("onbeat_fleet_replicas", state=state) or 0.0
        for state in new.label_values("onbeat_fleet_replicas", "state")
    }
    return FleetRows(
        states=states,
        waiting=new.value("onbeat_fleet_requests_waiting") or 0.0,
        resumed=new.value("onbeat_fleet_resumed_total") or 0.0,
        resumed_tokens=new.value("onbeat_fleet_resumed_tokens_total") or 0.0,
        moved=sum(
            new.value("onbeat_fleet_moves_total", why=why, outcome="moved") or 0.0
            for why in new.label_values("onbeat_fleet_moves_total", "why")
        ),
        lost=new.value("onbeat_fleet_lost_total") or 0.0,
        error_p50=recent.quantile("onbeat_fleet_ttft_prediction_error_ratio", 0.5),
        replicas=tuple(_row(name, recent) for name in names),
        scaling=scaling,
    )


def _scaling(new: Scrape) -> ScalingRow | None:
    wanted = new.value("onbeat_fleet_replicas_wanted")
    if wanted is None:
        return None
    changes = {
        direction: sum(
            new.value("onbeat_fleet_rescales_total", direction=direction, why=why) or 0.0
            for why in new.label_values("onbeat_fleet_rescales_total", "why")
        )
        for direction in ("up", "down")
    }
    return ScalingRow(
        wanted=wanted,
        least=new.value("onbeat_fleet_replicas_min") or 0.0,
        most=new.value("onbeat_fleet_replicas_max") or 0.0,
        load_share=new.value("onbeat_fleet_load_share"),
        planned_share=new.value("onbeat_fleet_planned_share"),
        ups=changes["up"],
        downs=changes["down"],
    )


def _row(name: str, recent: ScrapeWindow) -> ReplicaRow:
    new = recent.new

    def value(metric: str) -> float | None:
        return new.value(f"onbeat_replica_{metric}", engine=name)

    blocks, queries = value("kv_blocks"), "onbeat_replica_prefix_cache_queries_total"
    looked_up = recent.delta(queries, engine=name)
    found = recent.delta("onbeat_replica_prefix_cache_hits_total", engine=name)
    return ReplicaRow(
        name=name,
        state=_state(name, new),
        running=value("running"),
        waiting=value("waiting"),
        kv_share=(value("kv_blocks_used") or 0.0) / blocks if blocks else None,
        step_seconds=value("step_seconds_last") or None,
        predicted_wait=value("predicted_wait_seconds"),
        hits=(found or 0.0) / looked_up if looked_up else None,
        routed=recent.rate("onbeat_fleet_routed_total", engine=name),
        lives=value("lives") or 0.0,
        moves=sum(
            new.value("onbeat_fleet_replica_moves_total", engine=name, direction=direction) or 0.0
            for direction in ("in", "out")
        ),
        role=next(
            (
                role
                for role in new.label_values("onbeat_replica_role", "role")
                if new.value("onbeat_replica_role", engine=name, role=role)
            ),
            "",
        ),
    )


def _state(name: str, scrape: Scrape) -> str:
    metric = "onbeat_replica_state"
    states = scrape.label_values(metric, "state")
    return next((state for state in states if scrape.value(metric, engine=name, state=state)), "-")


def plain_table(first: str, *others: str) -> Table:
    """Return an empty table: a wide first column, and right-justified others."""
    table = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        expand=True,
        pad_edge=False,
        padding=(0, 0, 0, 1),
        header_style="dim",
        border_style="dim",
    )
    table.add_column(first, no_wrap=True, overflow="ellipsis", ratio=1)
    for title in others:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def fleet_table(fleet: FleetRows) -> RenderableType:
    """Return the line of the fleet and the rows of its replicas."""
    line = Text("fleet        ", style="dim")
    counts = [f"{short(count)} {state}" for state, count in fleet.states.items() if count]
    line.append("  ".join(counts), style="bold")
    if fleet.waiting:
        line.append(f"   {short(fleet.waiting)} waiting for one", style="bold yellow")
    line.append(f"   {short(fleet.moved)} moved", style="bold" if fleet.moved else "dim")
    line.append(f"   {short(fleet.resumed)} resumed", style="bold" if fleet.resumed else "dim")
    line.append(f"   {short(fleet.lost)} lost", style="bold red" if fleet.lost else "dim")
    if fleet.error_p50 is not None:
        line.append(f"   TTFT off by {percent(fleet.error_p50)}", style="dim")
    table = plain_table(
        "replica", "state", "run", "wait", "KV", "step", "pred. wait", "hits", "req/s", "moves", "lives"
    )
    for row in fleet.replicas:
        table.add_row(
            f"{row.name} {row.role}".strip(),
            Text(row.state, style=_STYLES.get(row.state, "")),
            short(row.running),
            short(row.waiting),
            percent(row.kv_share),
            duration(row.step_seconds),
            duration(row.predicted_wait),
            percent(row.hits),
            short(row.routed),
            short(row.moves),
            short(row.lives),
        )
    if (scaling := fleet.scaling) is None:
        return Group(line, table)
    size = Text("size         ", style="dim")
    size.append(f"{short(scaling.wanted)} wanted", style="bold")
    size.append(f" of {short(scaling.least)} to {short(scaling.most)}", style="dim")
    if scaling.load_share is not None:
        planned = "" if scaling.planned_share is None else f" (planned {percent(scaling.planned_share)})"
        size.append(f"   load takes {percent(scaling.load_share)}{planned}")
    size.append(f"   {short(scaling.ups)} up, {short(scaling.downs)} down", style="dim")
    return Group(line, size, table)
