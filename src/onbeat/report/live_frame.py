"""One frame of `onbeat top`: a server's state on 80 columns. Colour adds nothing that the text lacks.

What the server does is told from looks at its `GET /state`. Times are seconds, by the server's clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from onbeat.report.units import NOTHING, against, duration, percent, short

LATENCY_SECONDS = 60.0
"""Classes and errors of predictions are over so long: the numbers of one row are all of one time."""
ANY = "*"
"""Stands for all values of a label."""
State = Mapping[str, Any]
"""An answer of `GET /state`."""


@dataclass(frozen=True, slots=True)
class Window:
    """The time from one look at a server to a later one."""

    old: State | None
    """None: the server's start, when all was 0."""
    new: State

    @property
    def uptime(self) -> float:
        """Since the server's start."""
        return max(float(self.new["unix_time"] - self.new["start_time"]), 1.0)

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.uptime if self.old is None else float(self.new["unix_time"] - self.old["unix_time"])

    def value(self, name: str, *labels: str) -> float | None:
        """Return a number at its end, or the sum of all with these labels; None of none."""
        return _total(self.new.get(name), labels)

    def delta(self, name: str, *labels: str) -> float | None:
        """Return by how much a number, or all with these labels, grew; None where there are none."""
        new = self.value(name, *labels)
        if new is None or self.old is None:
            return new
        return new - (_total(self.old.get(name), labels) or 0.0)

    def rate(self, name: str, *labels: str) -> float | None:
        """Return the growth per second."""
        return ratio(self.delta(name, *labels), self.seconds)

    def count(self, histogram: str, *labels: str) -> float:
        """Return how many values a histogram took in."""
        return sum(self._grown(histogram, labels)[1])

    def sum(self, histogram: str, *labels: str) -> float:
        """Return the sum of these values."""
        return self._grown(histogram, labels)[2]

    def mean(self, histogram: str) -> float | None:
        """Return their mean; None if it took none."""
        return ratio(self.sum(histogram), self.count(histogram))

    def quantile(self, histogram: str, q: float, *labels: str) -> float | None:
        """Return a quantile of them; None if it took none."""
        bounds, counts, _ = self._grown(histogram, labels)
        return quantile(bounds, counts, q)

    def attainment(self, slo_class: str = ANY) -> float | None:
        """Return the share of the requests judged in it that were good; None of none."""
        ended, left = (self.delta("slo_requests_total", slo_class, each) for each in (ANY, "abandoned"))
        return ratio(self.delta("slo_requests_total", slo_class, "good"), (ended or 0.0) - (left or 0.0))

    def _grown(self, name: str, labels: Sequence[str]) -> tuple[Sequence[float], Sequence[float], float]:
        new, old = _at(self.new.get(name), labels), _at((self.old or {}).get(name), labels)
        if not new or not old:
            return (new["bounds"], new["counts"], new["sum"]) if new else ((), (), 0.0)
        counts = [after - before for after, before in zip(new["counts"], old["counts"], strict=True)]
        return new["bounds"], counts, new["sum"] - old["sum"]


class StateHistory:
    """What was seen of one server; forgets it when the server has been started anew."""

    def __init__(self) -> None:
        self._seen: deque[State] = deque()

    def add(self, state: State) -> None:
        """Take in a look at the server."""
        if self._seen and self._seen[-1]["start_time"] != state["start_time"]:
            self._seen.clear()
        self._seen.append(state)
        while len(self._seen) > 2 and self._seen[1]["unix_time"] <= state["unix_time"] - LATENCY_SECONDS:
            self._seen.popleft()

    def window(self, seconds: float) -> Window:
        """Return the latest so many seconds, or as much as was seen; all its life if it was seen once."""
        new = self._seen[-1]
        if len(self._seen) == 1:
            return Window(None, new)
        since = new["unix_time"] - seconds
        return Window(next((s for s in reversed(self._seen) if s["unix_time"] <= since), self._seen[0]), new)


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return a share, or a mean; None where either is not known, or of nothing."""
    return None if part is None or not whole else part / whole


def quantile(bounds: Sequence[float], counts: Sequence[float], q: float) -> float | None:
    """Estimate a quantile from buckets, evenly spread within each; None of no values.

    Parameters
    ----------
    bounds : upper bounds of the buckets, ascending.
    counts : values in each, and in one more that takes the rest.
    q : in [0, 1].

    Notes
    -----
    As Prometheus' `histogram_quantile`: the first bucket starts at 0 (or is its bound, below 0), and a value
    beyond the last bound is that bound.
    """
    rank = q * sum(counts)
    low, below = 0.0, 0.0
    if not any(counts):
        return None
    for bound, count in zip((*bounds, math.inf), counts, strict=True):
        if count > 0 and below + count >= rank:
            if math.isinf(bound) or bound <= low:
                return low if math.isinf(bound) else bound
            return low + (bound - low) * (rank - below) / count
        low, below = bound, below + count
    return low


def _at(tree: Any, labels: Sequence[str]) -> Any:
    for label in labels:
        tree = (tree or {}).get(label)
    return tree


def _total(tree: Any, labels: Sequence[str]) -> float | None:
    if not isinstance(tree, Mapping):
        return None if tree is None else float(tree)
    first, *rest = labels or (ANY,)
    known = [_total(each, rest) for key, each in tree.items() if first in (ANY, key)]
    found = [each for each in known if each is not None]
    return sum(found) if found else None


RATE_SECONDS = 10.0
"""Rates and means are over so long."""
GOOD, FAIR = 0.99, 0.9
"""Attainment from here on is green, or yellow."""
LONG_GAPS = "Stream mode: attained judges token deadlines, so single gaps may exceed TBT."
LABEL_WIDTH = 13

Field = tuple[str, str]
"""A value and what it is."""

_GAP = Text(" ")
_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "down": "bold red"}
_TTFT, _TBT = "slo_time_to_first_token_seconds", "slo_time_between_tokens_seconds"
_CLASS = ("class", "req/s", "good/s", "attained", "TTFT P50", "TTFT P99", "TBT P99")
_REPLICA = ("replica", "state", "run", "wait", "KV", "step", "delay", "hits", "req/s", "moves", "lives")


def live_frame(history: StateHistory, *, url: str, note: str = "") -> RenderableType:
    """Return the frame.

    Parameters
    ----------
    history : looks at the server, at least one.
    note : what went wrong since the last of them; it stands at the foot.
    """
    recent, longer = history.window(RATE_SECONDS), history.window(LATENCY_SECONDS)
    parts: list[RenderableType] = [*_head(recent, url), Rule(style="dim"), *_queues(recent), _GAP]
    replicas = sorted(recent.new.get("replica_lives", ()), key=lambda name: (len(name), name))
    if len(replicas) > 1 or recent.value("fleet_replicas_wanted") is not None:
        rows = (_replica(recent, name) for name in replicas)
        parts += [*_fleet(recent), _table(_REPLICA, rows), _GAP]
    parts += [*_classes(longer), _GAP, *_steps(recent, longer), *_decisions(recent)]
    if not note and recent.value("engine_alive") == 0:
        note = "No replica takes requests at present: GET /ready says why."
    foot = Text(note, style="bold red") if note else Text(_footnote(recent, longer), style="dim")
    shown = (part for part in parts if part)  # a row without values is empty
    return Group(*shown, Rule(style="dim"), foot)


def _head(now: Window, url: str) -> Iterator[RenderableType]:
    info = now.new["server_info"]
    yield Text.assemble(
        ("onbeat", "bold"),
        (f" {info['version']}  ", "dim"),
        info["model"],
        (f"  {info['policy']} {info['slo_mode']}", "cyan"),
        no_wrap=True,
        overflow="ellipsis",
    )
    yield Text(f"{url}  up {duration(now.uptime)}", style="dim", no_wrap=True, overflow="ellipsis")


def _queues(now: Window) -> Iterator[RenderableType]:
    """Yield who is there, what comes and goes, and what holds the KV cache."""
    queues = ((short(now.value(f"requests_{each}")), each) for each in ("running", "waiting"))
    yield _row("requests", *queues, (short(now.value("requests_best_effort")), "best effort"))
    ended, still = now.value("jobs_total"), now.value("jobs_open")
    if ended is not None or still:
        jobs = [(short(number), how) for how, number in sorted(now.new.get("jobs_total", {}).items())]
        yield _row("jobs", (short(still), "open"), *jobs)
    finished = now.rate("requests_total")
    changes = [now.delta(name) for name in ("requests_total", "requests_running", "requests_waiting")]
    arrived = ratio(sum(each or 0.0 for each in changes), now.seconds)
    yield _row(
        "load",
        (short(max(arrived or 0.0, 0.0)), "req/s in"),
        (short(finished), "req/s out"),
        (duration(now.value("predicted_wait_seconds")), "predicted wait"),
    )
    read, made = now.rate("prompt_tokens_total"), now.rate("output_tokens_total")
    cached = ratio(now.rate("prompt_tokens_cached_total"), read)
    tokens = ((short(read), "prompt/s"), (short(made), "output/s"))
    yield _row("tokens", *tokens, (percent(cached), "of prompts cached"))
    used, blocks = now.value("kv_blocks_used"), now.value("kv_blocks")
    yield _row(
        "KV cache", (percent(ratio(used, blocks)), "used"), (short(used), f"of {short(blocks)} blocks")
    )


def _fleet(now: Window) -> Iterator[RenderableType]:
    """Yield what became of replicas and of the requests that were to go elsewhere."""
    states = [(short(count), state) for state, count in now.new["fleet_replicas"].items() if count]
    moved = now.value("fleet_moves_total", "*", "moved") or 0
    yield _row(
        "fleet",
        *states,
        (short(now.value("fleet_requests_waiting")), "waiting for one"),
        (short(moved), "moved"),
        (short(now.value("fleet_resumed_total")), "resumed"),
        (short(now.value("fleet_lost_total")), "lost"),
    )
    if (wanted := now.value("fleet_replicas_wanted")) is not None:
        least, most = now.value("fleet_replicas_min"), now.value("fleet_replicas_max")
        load = percent(now.value("fleet_load_share"))
        yield _row("size", (short(wanted), f"wanted of {short(least)} to {short(most)}"), (load, "load"))


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
    """Yield a table of the classes, the most urgent one first, and the prompts that pay most."""
    objectives = span.new.get("slo_objective_seconds", {})
    names = span.new.get("slo_requests_total", ())
    if not names:
        yield Text("no request with objectives so far", style="dim")
        return

    def urgency(name: str) -> tuple[float, float, str]:
        own = objectives.get(name, {})
        return own.get("ttft") or inf, own.get("tbt") or inf, name

    yield _table(
        _CLASS, (_class(span, name, objectives.get(name, {}).get) for name in sorted(names, key=urgency))
    )
    gaps = ((span.quantile(_TBT, 0.99, name), objectives.get(name, {}).get("tbt")) for name in names)
    if span.new["server_info"]["slo_mode"] == "stream" and any(_is_over(*each) for each in gaps):
        yield Text(LONG_GAPS, style="dim")
    if (share := span.value("slo_attainment_worst_decile")) is not None:
        least, most = (span.value("slo_worst_decile_prompt_tokens", each) for each in ("min", "max"))
        longest = (duration(span.value("slo_longest_wait_seconds")), "longest wait of all")
        yield _row("worst decile", (percent(share), f"good, {short(least)} to {short(most)} tokens"), longest)


def _class(span: Window, name: str, objective: Callable[[str], float | None]) -> Iterator[str | Text]:
    share = span.attainment(name)
    yield "no class" if name == "unnamed" else name
    yield short(span.rate("slo_requests_total", name))
    yield short(span.rate("slo_requests_total", name, "good"))
    yield Text(percent(share), style=_attainment_style(share))
    yield duration(span.quantile(_TTFT, 0.5, name))
    for metric, limit in ((_TTFT, objective("ttft")), (_TBT, objective("tbt"))):
        p99 = span.quantile(metric, 0.99, name)
        yield Text(against(p99, limit), style="yellow" if _is_over(p99, limit) else "")


def _steps(recent: Window, longer: Window) -> Iterator[RenderableType]:
    """Yield what steps took, what they were expected to take, and what drafts and grammars did."""
    yield _row(
        "step",
        (duration(recent.mean("step_seconds")), "actual"),
        (duration(recent.mean("step_predicted_seconds")), "predicted"),
        (duration(recent.quantile("step_budget_seconds", 0.5)), "budget P50"),
        (short(recent.rate("steps_total")), "/s"),
    )
    yield _row(
        "batch",
        (short(recent.mean("step_decodes")), "decodes"),
        (short(recent.mean("step_chunk_tokens")), "chunk tokens"),
        (duration(recent.quantile("planner_seconds", 0.99)), "planner P99"),
    )
    over = ratio(longer.delta("steps_over_budget_total"), longer.count("step_budget_seconds"))
    errors = [percent(longer.quantile("step_prediction_error_ratio", q)) for q in (0.5, 0.99)]
    yield _row(
        "plan", (errors[0], "prediction error P50"), (errors[1], "P99"), (percent(over), "over budget")
    )
    for proposer in recent.new.get("spec_drafts_total", ()):
        accepted = ratio(recent.delta("spec_accepted_tokens_total"), recent.delta("spec_draft_tokens_total"))
        tokens = ratio(
            recent.delta("spec_delivered_tokens_total"), recent.count("spec_draft_length", proposer)
        )
        yield _row(
            "drafts",
            (proposer, "proposes"),
            (percent(accepted), "accepted"),
            (short(tokens), "tokens a row"),
            (
                short(ratio(recent.delta("spec_delivered_tokens_total"), recent.sum("step_seconds"))),
                "tokens/s",
            ),
        )
    if asked := recent.delta("guided_tokens_total"):
        again = ratio(recent.delta("guided_tokens_total", "refused"), asked)
        share = ratio(recent.delta("guide_seconds_total"), recent.sum("step_seconds"))
        yield _row("grammars", (percent(again), "drawn again"), (percent(share), "of the step's time"))


def _decisions(now: Window) -> Iterator[RenderableType]:
    counts = (
        ("requests_rejected_total", "refused"),
        ("requests_relegated_total", "relegated"),
        ("requests_lost_total", "missed"),
        ("preemptions_total", "preempted"),
    )
    yield _row("decisions", *((short(now.value(name) or 0), word) for name, word in counts))
    yield _row(
        "refused for",
        *((short(count), why) for why, count in now.new["requests_rejected_total"].items() if count),
    )


def _row(label: str, *fields: Field) -> Text:
    """Return a line of the values that are known; an empty one where none is."""
    line = Text(no_wrap=True, overflow="ellipsis")
    for value, name in fields:
        if value != NOTHING:
            line.append("   " if line else f"{label:<{LABEL_WIDTH}}", style="dim")
            line.append(value, style="bold")
            line.append(f" {name}", style="dim")
    return line


def _table(titles: tuple[str, ...], rows: Iterable[Iterator[str | Text]]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, expand=True, pad_edge=False, padding=(0, 0, 0, 1))
    table.header_style = table.border_style = "dim"
    table.add_column(titles[0], no_wrap=True, overflow="ellipsis", ratio=1)
    for title in titles[1:]:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


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
