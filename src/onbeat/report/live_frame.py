"""One frame of `onbeat top`: a server's state on 80 columns. Colour adds nothing that the text lacks."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from onbeat.report.fleet_view import fleet_table, plain_table
from onbeat.report.guided_view import GuidedView
from onbeat.report.live_view import ClassView, DraftView, Percentiles, ServerView, StepView, WorstDecileView
from onbeat.report.units import against, duration, percent, short, sparkline

GOOD, FAIR = 0.99, 0.9
"""Attainment from here on is green, or yellow."""
LONG_GAPS = "Stream mode: attained judges token deadlines, so single gaps may exceed TBT."
LABEL_WIDTH = 12
BAR_WIDTH = 20
Field = tuple[str, str]
"""(value, what it is)."""


def live_frame(
    view: ServerView,
    *,
    url: str,
    attainment: Sequence[float | None] = (),
    step_seconds: Sequence[float | None] = (),
    note: str = "",
) -> RenderableType:
    """Return a frame.

    Parameters
    ----------
    attainment, step_seconds : one value for each look at the server so far, drawn as lines.
    note : shown in place of the explanation at the foot; what is above it is then out of date.
    """
    gap = Text()
    parts: list[RenderableType] = [_head(view, url), Rule(style="dim"), _queues(view), gap]
    parts += [] if view.fleet is None else [fleet_table(view.fleet), gap]
    parts.append(_classes(view.classes))
    parts += [] if not _has_long_gaps(view) else [Text(LONG_GAPS, style="dim")]
    parts += [] if view.worst_decile is None else [gap, _worst_decile(view.worst_decile)]
    parts += [gap, _steps(view.steps)]
    parts += [] if view.drafts is None else [_drafts(view.drafts)]
    parts += [] if view.guided is None else [_guided(view.guided)]
    parts.append(_decisions(view))
    if any(step_seconds):
        parts += [gap, _history(attainment, step_seconds)]
    parts += [Rule(style="dim"), Text(note, style="bold red") if note else Text(_footnote(view), style="dim")]
    return Group(*parts)


def _head(view: ServerView, url: str) -> RenderableType:
    info = view.info
    what = Text("onbeat", style="bold")
    what.append(f" {info['version']}  ", style="dim")
    what.append(info["model"])
    policy = " ".join(filter(None, (info["policy"], info["slo_mode"])))
    what.append(f"  {policy}", style="cyan")
    line = Table.grid(expand=True, padding=(0, 1))
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_column(justify="right", no_wrap=True)
    line.add_row(what, Text(f"up {duration(view.uptime)}", style="dim"))
    line.add_row(Text(url, style="dim"), "")
    return line


def _queues(view: ServerView) -> RenderableType:
    load = view.load
    share = view.used_blocks / view.blocks if view.blocks else None
    blocks = Text.assemble(
        (percent(share), "bold"), (f"  {short(view.used_blocks)} of {short(view.blocks)} blocks", "dim")
    )
    bar = ProgressBar(
        total=1, completed=share or 0, width=BAR_WIDTH, complete_style="cyan", finished_style="red"
    )
    kv = Table.grid(padding=(0, 1))
    kv.add_row(bar, blocks)
    rows = _grid()
    rows.add_row(
        "requests",
        _fields(
            (short(view.running), "running"),
            (short(view.waiting), "waiting"),
            (short(view.best_effort), "best effort"),
        ),
    )
    if (jobs := view.jobs) is not None:
        ended = [(short(number), outcome) for outcome, number in sorted(jobs.by_outcome.items())]
        spent = _known((percent(jobs.in_calls), "of the time in calls"))
        kept = _known((percent(jobs.kept_kv), "of KV kept for them"))
        rows.add_row("jobs", _fields((short(jobs.num_open), "open"), *ended))
        rows.add_row("", _fields(*spent, *kept))
    rows.add_row("load", _fields((short(load.arrivals), "req/s in"), (short(load.finished), "req/s out")))
    forecast = _known((duration(load.predicted_wait), "predicted wait"))
    if forecast:
        rows.add_row("forecast", _fields(*forecast))
    rows.add_row(
        "tokens",
        _fields(
            (short(load.prompt_tokens), "prompt/s"),
            (short(load.output_tokens), "output/s"),
            *_known((percent(load.cached_share), "of prompts cached")),
        ),
    )
    rows.add_row("KV cache", kv)
    return rows


def _classes(classes: Sequence[ClassView]) -> RenderableType:
    if not classes:
        return Text("no request with objectives so far", style="dim")
    table = plain_table("class", "req/s", "good/s", "attained", "TTFT P50", "TTFT P99", "TBT P99")
    for own in classes:
        table.add_row(
            own.name,
            short(own.rate),
            short(own.goodput),
            Text(percent(own.attainment), style=_attainment_style(own.attainment)),
            duration(own.ttft.p50),
            _against(own.ttft),
            _against(own.tbt),
        )
    return table


def _has_long_gaps(view: ServerView) -> bool:
    """Return whether there are gaps over an objective that attainment, in stream mode, need not mind."""
    tbts = (own.tbt for own in view.classes)
    return view.info["slo_mode"] == "stream" and any(map(_is_over, tbts))


def _worst_decile(worst: WorstDecileView) -> RenderableType:
    span = f"good, {short(worst.min_prompt_tokens)} to {short(worst.max_prompt_tokens)} tokens"
    rows = _grid()
    rows.add_row(
        "worst decile",
        _fields((percent(worst.attainment), span), (duration(worst.longest_wait), "longest wait of all")),
    )
    return rows


def _steps(steps: StepView) -> RenderableType:
    rows = _grid()
    rows.add_row(
        "step",
        _fields(
            (duration(steps.seconds), "actual"),
            *_known((duration(steps.predicted), "predicted"), (duration(steps.budget_p50), "budget P50")),
            (short(steps.rate), "/s"),
        ),
    )
    rows.add_row(
        "batch",
        _fields(
            (short(steps.decodes), "decodes"),
            (short(steps.chunk_tokens), "chunk tokens"),
            (duration(steps.planner_p99), "planner P99"),
        ),
    )
    plan = _known(
        (percent(steps.error_p50), "prediction error P50"),
        (percent(steps.error_p99), "P99"),
        (percent(steps.over_budget), "over budget"),
    )
    if plan:
        rows.add_row("plan", _fields(*plan))
    return rows


def _drafts(drafts: DraftView) -> RenderableType:
    rows = _grid()
    rows.add_row(
        "drafts",
        _fields(
            (drafts.proposer, "proposes"),
            (short(drafts.length), "a row"),
            *_known((percent(drafts.acceptance), "accepted")),
            (short(drafts.tokens_per_row), "tokens a row"),
        ),
    )
    goodput = _known(
        (short(drafts.goodput), "tokens/s of steps"), (short(drafts.predicted_goodput), "predicted")
    )
    if goodput:
        rows.add_row("goodput", _fields(*goodput))
    return rows


def _guided(guided: GuidedView) -> RenderableType:
    rows = _grid()
    shares = _known(
        (percent(guided.redrawn), "drawn again"), (percent(guided.step_share), "of the step's time")
    )
    rows.add_row("grammars", _fields((short(guided.rows), "rows a step"), *shares))
    compiling = _known((duration(guided.compile_p99), "compile P99"))
    rows.add_row("new grammars", _fields(*compiling, (short(guided.refused), "refused")))
    return rows


def _decisions(view: ServerView) -> RenderableType:
    rows = _grid()
    refused = sum(view.refused.values())
    counts = (
        (refused, "refused"),
        (view.relegated, "relegated"),
        (view.missed, "missed"),
        (view.preempted, "preempted"),
    )
    rows.add_row("decisions", _fields(*((short(number), name) for number, name in counts)))
    if refused:
        reasons = [(short(number), reason) for reason, number in view.refused.items() if number]
        rows.add_row("refused for", _fields(*reasons))
    return rows


def _history(attainment: Sequence[float | None], step_seconds: Sequence[float | None]) -> RenderableType:
    rows = _grid()
    longest = max((value for value in step_seconds if value is not None), default=0.0)
    share = next((value for value in reversed(attainment) if value is not None), None)
    scale = f"max {duration(longest)}"
    if share is not None:
        # Padded, so that what was at the same time stands one above the other.
        last = percent(share).ljust(len(scale))
        rows.add_row("attainment", _Sparkline(attainment, high=1.0, last=last, style="green"))
    rows.add_row("step time", _Sparkline(step_seconds, high=longest, last=scale, style="cyan"))
    return rows


class _Sparkline:
    """The latest values, as many as there is room for, and a word on the scale."""

    def __init__(self, values: Sequence[float | None], *, high: float, last: str, style: str) -> None:
        self._values = values
        self._high = high
        self._last = last
        self._style = style

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(options.max_width - len(self._last) - 2, 1)
        shown = list(self._values)[-room:]
        bars = sparkline(shown, low=0.0, high=self._high)
        yield Text.assemble((bars, self._style), "  ", (self._last, "bold"), no_wrap=True)


def _grid() -> Table:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(style="dim", width=LABEL_WIDTH, no_wrap=True)
    grid.add_column(ratio=1)
    return grid


def _fields(*fields: Field) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for number, (value, name) in enumerate(fields):
        line.append("   " if number else "")
        line.append(value, style="bold")
        line.append(f" {name}", style="dim")
    return line


def _known(*fields: Field) -> list[Field]:
    """Leave out what the server does not say."""
    return [field for field in fields if field[0] != "-"]


def _against(latency: Percentiles) -> Text:
    style = "yellow" if _is_over(latency) else "dim" if latency.p99 is None else ""
    return Text(against(latency.p99, latency.objective), style=style)


def _is_over(latency: Percentiles) -> bool:
    return latency.p99 is not None and latency.objective is not None and latency.p99 > latency.objective


def _attainment_style(share: float | None) -> str:
    if share is None:
        return "dim"
    return "bold green" if share >= GOOD else "bold yellow" if share >= FAIR else "bold red"


def _footnote(view: ServerView) -> str:
    if view.span is None or view.latency_span is None:
        return "Since the server started."
    return (
        f"Classes, plan: last {view.latency_span:.0f} s. Other rates: last {view.span:.0f} s. "
        "Decisions: since start."
    )
