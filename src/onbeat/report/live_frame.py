"""One frame of `onbeat top`: a server's state on 80 columns. Colour adds nothing that the text lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from onbeat.report.live_state import LATENCY_SECONDS, StateHistory, Window, ratio
from onbeat.report.units import NOTHING, against, duration, percent, short, sparkline

RATE_SECONDS = 10.0
"""Rates and means are over so long."""
GOOD, FAIR = 0.99, 0.9
"""Attainment from here on is green, or yellow."""
LONG_GAPS = "Stream mode: attained judges token deadlines, so single gaps may exceed TBT."
LABEL_WIDTH = 12
BAR_WIDTH = 20
Field = tuple[str, str]
"""(value, what it is)."""
_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "down": "bold red"}
_TTFT, _TBT = "slo_time_to_first_token_seconds", "slo_time_between_tokens_seconds"


def live_frame(history: StateHistory, *, url: str, note: str = "") -> RenderableType:
    """Return a frame of what was seen of a server, once at least.

    Parameters
    ----------
    note : shown in place of the explanation at the foot; what is above it is then out of date.
    """
    recent, longer = history.window(RATE_SECONDS), history.window(LATENCY_SECONDS)
    gap = Text()
    parts: list[RenderableType] = [_head(recent, url), Rule(style="dim"), *_queues(recent), gap]
    replicas = sorted(recent.new.get("replica_lives", ()), key=lambda name: (len(name), name))
    if len(replicas) > 1 or recent.value("fleet_replicas_wanted") is not None:
        parts += [*_fleet(recent, replicas), gap]
    parts += [*_classes(longer), *_worst_decile(recent), gap, *_steps(recent, longer)]
    parts += [*_drafts(recent), *_grammars(recent, longer), *_decisions(recent)]
    if any(history.step_seconds):
        parts += [gap, *_history(history)]
    if not note and recent.value("engine_alive") == 0:
        note = "No replica takes requests at present: GET /ready says why."
    foot = Text(note, style="bold red") if note else Text(_footnote(recent, longer), style="dim")
    return Group(*parts, Rule(style="dim"), foot)


def _head(now: Window, url: str) -> RenderableType:
    info = now.new["server_info"]
    what = Text("onbeat", style="bold")
    what.append(f" {info['version']}  ", style="dim")
    what.append(info["model"])
    what.append(f"  {info['policy']} {info['slo_mode']}", style="cyan")
    line = Table.grid(expand=True, padding=(0, 1))
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_column(justify="right", no_wrap=True)
    line.add_row(what, Text(f"up {duration(now.uptime)}", style="dim"))
    line.add_row(Text(url, style="dim"), "")
    return line


def _queues(now: Window) -> Iterator[RenderableType]:
    states = (("requests_running", "running"), ("requests_waiting", "waiting"))
    counts = [
        (short(now.value(name)), word) for name, word in (*states, ("requests_best_effort", "best effort"))
    ]
    yield _row("requests", *counts)
    blocks = now.value("kv_blocks")
    ended, still = now.value("jobs_total"), now.value("jobs_open")
    if ended is not None or still:
        in_calls = ratio(now.value("job_seconds_total", "in_calls"), now.value("job_seconds_total"))
        kept = ratio(now.value("kv_blocks_kept"), blocks)
        jobs = [(short(number), how) for how, number in sorted(now.new.get("jobs_total", {}).items())]
        yield _row("jobs", (short(still), "open"), *jobs)
        shares = ((percent(in_calls), "of the time in calls"), (percent(kept), "of KV kept for them"))
        yield _row("", *_known(*shares))
    finished = now.rate("requests_total")
    arrived = ratio(sum(now.delta(each) or 0.0 for each in ("requests_total", *dict(states))), now.seconds)
    yield _row("load", (short(max(arrived or 0.0, 0.0)), "req/s in"), (short(finished), "req/s out"))
    if (wait := now.value("predicted_wait_seconds")) is not None:
        yield _row("forecast", (duration(wait), "predicted wait"))
    read, made = now.rate("prompt_tokens_total"), now.rate("output_tokens_total")
    cached = ratio(now.rate("prompt_tokens_cached_total"), read)
    tokens = ((short(read), "prompt/s"), (short(made), "output/s"))
    yield _row("tokens", *tokens, *_known((percent(cached), "of prompts cached")))
    used = now.value("kv_blocks_used")
    share = ratio(used, blocks)
    bar = ProgressBar(
        total=1, completed=share or 0, width=BAR_WIDTH, complete_style="cyan", finished_style="red"
    )
    kv = Table.grid(padding=(0, 1))
    number = Text.assemble((percent(share), "bold"), (f"  {short(used)} of {short(blocks)} blocks", "dim"))
    kv.add_row(bar, number)
    yield _row("KV cache", shown=kv)


def _fleet(now: Window, replicas: Sequence[str]) -> Iterator[RenderableType]:
    """Yield the line of the fleet, the rows of its replicas, and what it has decided on its size."""
    line = Text("fleet        ", style="dim")
    counts = [f"{short(count)} {state}" for state, count in now.new["fleet_replicas"].items() if count]
    line.append("  ".join(counts), style="bold")
    if waiting := now.value("fleet_requests_waiting"):
        line.append(f"   {short(waiting)} waiting for one", style="bold yellow")
    moved, resumed = now.value("fleet_moves_total", "*", "moved") or 0, now.value("fleet_resumed_total")
    lost, error = now.value("fleet_lost_total"), now.quantile("fleet_ttft_prediction_error_ratio", 0.5)
    line.append(f"   {short(moved)} moved", style="bold" if moved else "dim")
    line.append(f"   {short(resumed)} resumed", style="bold" if resumed else "dim")
    line.append(f"   {short(lost)} lost", style="bold red" if lost else "dim")
    if error is not None:
        line.append(f"   TTFT off by {percent(error)}", style="dim")
    yield line
    if (wanted := now.value("fleet_replicas_wanted")) is not None:
        least, most = now.value("fleet_replicas_min"), now.value("fleet_replicas_max")
        size = Text("size         ", style="dim")
        size.append(f"{short(wanted)} wanted", style="bold")
        size.append(f" of {short(least)} to {short(most)}", style="dim")
        if (load := now.value("fleet_load_share")) is not None:
            planned = now.value("fleet_planned_share")
            size.append(
                f"   load takes {percent(load)}" + (f" (planned {percent(planned)})" if planned else "")
            )
        ups, downs = (now.value("fleet_rescales_total", each) or 0 for each in ("up", "down"))
        size.append(f"   {short(ups)} up, {short(downs)} down", style="dim")
        yield size
    titles = ("state", "run", "wait", "KV", "step", "delay", "hits", "req/s", "moves", "lives")
    table = _table("replica", *titles)
    for name in replicas:
        table.add_row(*_replica(now, name))
    yield table


def _replica(now: Window, name: str) -> Iterator[str | Text]:
    def value(metric: str) -> float | None:
        return now.value(metric, name)

    state = next((each for each, is_so in now.new["replica_state"][name].items() if is_so), NOTHING)
    queries = now.delta("replica_prefix_cache_queries_total", name)
    yield " ".join((name, *now.new.get("replica_role", {}).get(name, ())))
    yield Text(state, style=_STYLES.get(state, ""))
    yield short(value("replica_running"))
    yield short(value("replica_waiting"))
    yield percent(ratio(value("replica_kv_blocks_used"), value("replica_kv_blocks")))
    yield duration(value("replica_step_seconds_last") or None)
    yield duration(value("replica_predicted_wait_seconds"))
    yield percent(ratio(now.delta("replica_prefix_cache_hits_total", name), queries))
    yield short(now.rate("fleet_routed_total", name))
    yield short(now.value("fleet_replica_moves_total", name) or 0)
    yield short(value("replica_lives"))


def _classes(span: Window) -> Iterator[RenderableType]:
    """Yield the classes, the most urgent first."""
    objectives = span.new.get("slo_objective_seconds", {})
    if not (names := span.new.get("slo_requests_total", ())):
        yield Text("no request with objectives so far", style="dim")
        return
    table = _table("class", "req/s", "good/s", "attained", "TTFT P50", "TTFT P99", "TBT P99")
    has_long_gaps = False

    def wanted(name: str, objective: str) -> float | None:
        return span.value("slo_objective_seconds", name, objective)

    for name in sorted(
        names, key=lambda each: (wanted(each, "ttft") or inf, wanted(each, "tbt") or inf, each)
    ):
        ttft, tbt = objectives.get(name, {}).get("ttft"), objectives.get(name, {}).get("tbt")
        slow, gap = span.quantile(_TTFT, 0.99, name), span.quantile(_TBT, 0.99, name)
        share = span.attainment(name)
        has_long_gaps = has_long_gaps or _is_over(gap, tbt)
        table.add_row(
            "no class" if name == "unnamed" else name,
            short(span.rate("slo_requests_total", name)),
            short(span.rate("slo_requests_total", name, "good")),
            Text(percent(share), style=_attainment_style(share)),
            duration(span.quantile(_TTFT, 0.5, name)),
            _against(slow, ttft),
            _against(gap, tbt),
        )
    yield table
    if has_long_gaps and span.new["server_info"]["slo_mode"] == "stream":
        yield Text(LONG_GAPS, style="dim")


def _worst_decile(now: Window) -> Iterator[RenderableType]:
    if (share := now.value("slo_attainment_worst_decile")) is None:
        return
    least, most = (now.value("slo_worst_decile_prompt_tokens", each) for each in ("min", "max"))
    longest = (duration(now.value("slo_longest_wait_seconds")), "longest wait of all")
    yield Text()
    yield _row("worst decile", (percent(share), f"good, {short(least)} to {short(most)} tokens"), longest)


def _steps(recent: Window, longer: Window) -> Iterator[RenderableType]:
    plan = (
        (duration(recent.mean("step_predicted_seconds")), "predicted"),
        (duration(recent.quantile("step_budget_seconds", 0.5)), "budget P50"),
    )
    actual, rate = duration(recent.mean("step_seconds")), short(recent.rate("steps_total"))
    yield _row("step", (actual, "actual"), *_known(*plan), (rate, "/s"))
    yield _row(
        "batch",
        (short(recent.mean("step_decodes")), "decodes"),
        (short(recent.mean("step_chunk_tokens")), "chunk tokens"),
        (duration(recent.quantile("planner_seconds", 0.99)), "planner P99"),
    )
    over = ratio(longer.delta("steps_over_budget_total"), longer.count("step_budget_seconds"))
    errors = [percent(longer.quantile("step_prediction_error_ratio", q)) for q in (0.5, 0.99)]
    known = _known((errors[0], "prediction error P50"), (errors[1], "P99"), (percent(over), "over budget"))
    if known:
        yield _row("plan", *known)


def _drafts(now: Window) -> Iterator[RenderableType]:
    for proposer in now.new.get("spec_drafts_total", ()):
        verified, accepted = (now.delta(f"spec_{each}_tokens_total") for each in ("draft", "accepted"))
        rows = now.count("spec_draft_length", proposer)
        yield _row(
            "drafts",
            (proposer, "proposes"),
            (short(ratio(now.sum("spec_draft_length", proposer), rows)), "a row"),
            *_known((percent(ratio(accepted, verified)), "accepted")),
            (short(ratio(now.delta("spec_delivered_tokens_total"), rows)), "tokens a row"),
        )
        names = (("goodput", "tokens/s of steps"), ("goodput_predicted", "predicted"))
        known = _known(*((short(now.value(f"spec_{each}_tokens_per_second")), word) for each, word in names))
        if known:
            yield _row("goodput", *known)


def _grammars(recent: Window, longer: Window) -> Iterator[RenderableType]:
    refused = recent.value("grammar_refusals_total") or 0
    if not (recent.value("guided_tokens_total") or refused):
        return
    asked = recent.delta("guided_tokens_total")
    again = ratio(recent.delta("guided_tokens_total", "refused"), asked)
    share = ratio(recent.delta("guide_seconds_total"), recent.sum("step_seconds"))
    shares = _known((percent(again), "drawn again"), (percent(share), "of the step's time"))
    yield _row("grammars", (short(ratio(asked, recent.delta("steps_total"))), "rows a step"), *shares)
    compiling = duration(longer.quantile("grammar_compile_seconds", 0.99))
    yield _row("new grammars", *_known((compiling, "compile P99")), (short(refused), "refused"))


def _decisions(now: Window) -> Iterator[RenderableType]:
    counts = (
        ("requests_rejected_total", "refused"),
        ("requests_relegated_total", "relegated"),
        ("requests_lost_total", "missed"),
        ("preemptions_total", "preempted"),
    )
    yield _row("decisions", *((short(now.value(name) or 0), word) for name, word in counts))
    reasons = [(short(count), why) for why, count in now.new["requests_rejected_total"].items() if count]
    if reasons:
        yield _row("refused for", *reasons)


def _history(history: StateHistory) -> Iterator[RenderableType]:
    longest = max((value for value in history.step_seconds if value is not None), default=0.0)
    share = next((value for value in reversed(history.attainment) if value is not None), None)
    scale = f"max {duration(longest)}"
    if share is not None:
        # Padded, so that what was at the same time stands one above the other.
        last = percent(share).ljust(len(scale))
        yield _row("attainment", shown=_Sparkline(history.attainment, high=1.0, last=last, style="green"))
    steps = _Sparkline(history.step_seconds, high=longest, last=scale, style="cyan")
    yield _row("step time", shown=steps)


class _Sparkline:
    """The latest values, as many as there is room for, and a word on the scale."""

    def __init__(self, values: Sequence[float | None], *, high: float, last: str, style: str) -> None:
        self._values = values
        self._high = high
        self._last = last
        self._style = style

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(options.max_width - len(self._last) - 2, 1)
        bars = sparkline(list(self._values)[-room:], low=0.0, high=self._high)
        yield Text.assemble((bars, self._style), "  ", (self._last, "bold"), no_wrap=True)


def _table(first: str, *others: str) -> Table:
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


def _row(label: str, *fields: Field, shown: RenderableType | None = None) -> RenderableType:
    """Return a line: what it is about, and values with their names, or what is `shown` in their place."""
    line = Text(no_wrap=True, overflow="ellipsis")
    for number, (value, name) in enumerate(fields):
        line.append("   " if number else "")
        line.append(value, style="bold")
        line.append(f" {name}", style="dim")
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(style="dim", width=LABEL_WIDTH, no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_row(label, shown or line)
    return grid


def _known(*fields: Field) -> list[Field]:
    """Leave out what the server does not say."""
    return [field for field in fields if field[0] != NOTHING]


def _against(p99: float | None, objective: float | None) -> Text:
    style = "yellow" if _is_over(p99, objective) else "dim" if p99 is None else ""
    return Text(against(p99, objective), style=style)


def _is_over(p99: float | None, objective: float | None) -> bool:
    return p99 is not None and objective is not None and p99 > objective


def _attainment_style(share: float | None) -> str:
    if share is None:
        return "dim"
    return "bold green" if share >= GOOD else "bold yellow" if share >= FAIR else "bold red"


def _footnote(recent: Window, longer: Window) -> str:
    if recent.old is None:
        return "Since the server started."
    return (
        f"Classes, plan: last {longer.seconds:.0f} s. Other rates: last {recent.seconds:.0f} s. "
        "Decisions: since start."
    )
