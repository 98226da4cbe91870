"""The state of a running server, from its metrics, as plain numbers. Times are seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from onbeat.metrics.exposition import Scrape, ScrapeWindow
from onbeat.report.fleet_view import FleetRows, fleet_rows
from onbeat.report.guided_view import GuidedView, guided_view

RATE_SECONDS = 10.0
"""Rates and means are over so long."""
LATENCY_SECONDS = 60.0
"""Classes and errors of predictions are over so long: the numbers of one row are all of one time."""
HISTORY_LENGTH = 240
"""Looks at the server that are kept to be drawn."""

_ENDED = "onbeat_slo_requests_total"
_TTFT = "onbeat_slo_time_to_first_token_seconds"
_TBT = "onbeat_slo_time_between_tokens_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """A latency of a class beside its objective; None where there is none."""

    p50: float | None
    p99: float | None
    objective: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassView:
    """One class of objectives."""

    name: str
    rate: float | None
    """Ended requests per second, refused ones included."""
    attainment: float | None
    goodput: float | None
    ttft: Percentiles
    tbt: Percentiles


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstDecileView:
    """The decile of prompt lengths with the least attainment, of late."""

    attainment: float
    min_prompt_tokens: float | None
    max_prompt_tokens: float | None
    longest_wait: float | None
    """Of all requests with objectives, those of other deciles too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """Steps, on average, and the plans behind them."""

    rate: float | None
    seconds: float | None
    predicted: float | None
    budget_p50: float | None
    """Of the steps that had one: a mean would be that of the few that hardly had a limit."""
    over_budget: float | None
    """Share of the steps with a budget that took longer."""
    decodes: float | None
    chunk_tokens: float | None
    error_p50: float | None
    """|predicted - actual| / actual."""
    error_p99: float | None
    bias: float | None
    """Actual / predicted."""
    planner_p99: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftView:
    """Speculation, of late."""

    proposer: str
    length: float | None
    """Drafts planned for a decode row, on average."""
    acceptance: float | None
    """Accepted of the drafts verified."""
    tokens_per_row: float | None
    """Output tokens that a decode row delivered."""
    goodput: float | None
    """Output tokens of decode rows per second of steps."""
    predicted_goodput: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadView:
    """What comes, what goes, and what the policy expects."""

    arrivals: float | None
    """Requests per second, counted."""
    finished: float | None
    prompt_tokens: float | None
    """Per second."""
    output_tokens: float | None
    cached_share: float | None
    """Of the prompt tokens, those from the prefix cache."""
    predicted_wait: float | None


@dataclass(frozen=True, slots=True)
class JobsView:
    """Jobs, since the start of the server."""

    num_open: float
    by_outcome: Mapping[str, float]
    in_calls: float | None
    """Share of the time of ended jobs in which calls were open; None before any ended."""
    kept_kv: float | None
    """Share of the KV cache that is kept for calls to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """All that a frame shows."""

    info: dict[str, str]
    """`version`, `model`, `policy`, `slo_mode`."""
    span: float | None
    """Seconds that rates cover; None: since the server's start."""
    latency_span: float | None
    """The same of percentiles."""
    uptime: float | None
    running: float
    waiting: float
    best_effort: float
    jobs: JobsView | None
    """None before any job came."""
    used_blocks: float
    blocks: float
    load: LoadView
    fleet: FleetRows | None
    """None where there is one replica."""
    steps: StepView
    drafts: DraftView | None
    """None where the server does not speculate."""
    guided: GuidedView | None
    """None before any request had a grammar."""
    classes: tuple[ClassView, ...]
    worst_decile: WorstDecileView | None
    """None where too few requests have ended, or all had prompts of one length."""
    refused: dict[str, float]
    """Reason -> requests since the start."""
    relegated: float
    missed: float
    preempted: float


def is_onbeat(scrape: Scrape) -> bool:
    """Return whether these are metrics of an onbeat server."""
    return scrape.value("onbeat_requests_running") is not None


class ServerHistory:
    """What was seen of one server; forgets it when the server has been started anew."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Scrape]] = deque()
        self.attainment: deque[float | None] = deque(maxlen=HISTORY_LENGTH)
        """Share of good requests of late, of all classes, at each look; None where none had ended."""
        self.step_seconds: deque[float | None] = deque(maxlen=HISTORY_LENGTH)
        """Mean step time since the look before; None without a step."""

    def add(self, scrape: Scrape, now: float) -> None:
        """Take in a look at the server.

        Parameters
        ----------
        now : seconds of any clock that goes forward.
        """
        if self._seen and _is_restarted(self._seen[-1][1], scrape):
            self._seen.clear()
        last = self._seen[-1] if self._seen else None
        self._seen.append((now, scrape))
        while len(self._seen) > 2 and self._seen[1][0] <= now - LATENCY_SECONDS:
            self._seen.popleft()
        if last is not None:
            step = ScrapeWindow(last[1], scrape, now - last[0])
            self.step_seconds.append(step.mean("onbeat_step_seconds"))
            self.attainment.append(_attainment(self.window(LATENCY_SECONDS)))

    def window(self, seconds: float, *, uptime: float | None = None) -> ScrapeWindow:
        """Return the latest so many seconds, or as much of them as was seen.

        Parameters
        ----------
        uptime : the window's length where the server was seen only once; the window is then all its life.
        """
        now, new = self._seen[-1]
        if len(self._seen) == 1:
            return ScrapeWindow(None, new, uptime)
        start, old = next(
            ((time, scrape) for time, scrape in reversed(self._seen) if time <= now - seconds), self._seen[0]
        )
        return ScrapeWindow(old, new, now - start)

    def view(self, unix_time: float) -> ServerView:
        """Return the state as of the last look, at least one of which there must have been.

        Parameters
        ----------
        unix_time : of the last look.
        """
        new = self._seen[-1][1]
        started = new.value("process_start_time_seconds")
        uptime = None if started is None else max(unix_time - started, 1.0)
        recent = self.window(RATE_SECONDS, uptime=uptime)
        longer = self.window(LATENCY_SECONDS, uptime=uptime)
        return ServerView(
            info=_info(new),
            span=None if recent.old is None else recent.seconds,
            latency_span=None if longer.old is None else longer.seconds,
            uptime=uptime,
            running=new.value("onbeat_requests_running") or 0.0,
            waiting=new.value("onbeat_requests_waiting") or 0.0,
            best_effort=new.value("onbeat_requests_best_effort") or 0.0,
            jobs=_jobs(new),
            used_blocks=new.value("onbeat_kv_blocks_used") or 0.0,
            blocks=new.value("onbeat_kv_blocks") or 0.0,
            load=_load(recent),
            fleet=fleet_rows(recent),
            steps=_steps(recent, longer),
            drafts=_drafts(recent),
            guided=guided_view(recent, longer),
            classes=_classes(longer),
            worst_decile=_worst_decile(new),
            refused=_by_reason(new),
            relegated=new.value("onbeat_requests_relegated_total") or 0.0,
            missed=new.value("onbeat_requests_lost_total") or 0.0,
            preempted=new.value("onbeat_preemptions_total") or 0.0,
        )


def _is_restarted(old: Scrape, new: Scrape) -> bool:
    """Return whether two scrapes are of different processes, or of one whose counters went back."""
    name = "process_start_time_seconds"
    if old.value(name) != new.value(name):
        return True
    return (new.value("onbeat_steps_total") or 0.0) < (old.value("onbeat_steps_total") or 0.0)


def _jobs(scrape: Scrape) -> JobsView | None:
    num_open = scrape.value("onbeat_jobs_open") or 0.0
    by_outcome = {
        outcome: scrape.total("onbeat_jobs_total", outcome=outcome) or 0.0
        for outcome in scrape.label_values("onbeat_jobs_total", "outcome")
    }
    in_calls = scrape.total("onbeat_job_seconds_total", part="in_calls") or 0.0
    between = scrape.total("onbeat_job_seconds_total", part="between") or 0.0
    if not num_open and not by_outcome:
        return None
    kept, blocks = scrape.value("onbeat_kv_blocks_kept"), scrape.value("onbeat_kv_blocks")
    return JobsView(
        num_open,
        by_outcome,
        in_calls=in_calls / (in_calls + between) if in_calls else None,
        kept_kv=kept / blocks if kept is not None and blocks else None,
    )


def _info(scrape: Scrape) -> dict[str, str]:
    name = "onbeat_server_info"
    return {
        label: next(iter(scrape.label_values(name, label)), "")
        for label in ("version", "model", "policy", "slo_mode")
    }


def _by_reason(scrape: Scrape) -> dict[str, float]:
    name = "onbeat_requests_rejected_total"
    return {
        reason: scrape.total(name, reason=reason) or 0.0 for reason in scrape.label_values(name, "reason")
    }


def _load(window: ScrapeWindow) -> LoadView:
    new = window.new
    finished = window.delta("onbeat_requests_total")
    arrivals = finished
    if finished is not None:
        arrivals = finished + _open(new) - (0.0 if window.old is None else _open(window.old))
    return LoadView(
        arrivals=None if arrivals is None or not window.seconds else max(arrivals, 0.0) / window.seconds,
        finished=window.rate("onbeat_requests_total"),
        prompt_tokens=window.rate("onbeat_prompt_tokens_total"),
        output_tokens=window.rate("onbeat_output_tokens_total"),
        cached_share=window.share("onbeat_prompt_tokens_cached_total", "onbeat_prompt_tokens_total"),
        predicted_wait=new.value("onbeat_predicted_wait_seconds"),
    )


def _open(scrape: Scrape) -> float:
    return (scrape.value("onbeat_requests_running") or 0.0) + (scrape.value("onbeat_requests_waiting") or 0.0)


def _steps(recent: ScrapeWindow, longer: ScrapeWindow) -> StepView:
    return StepView(
        rate=recent.rate("onbeat_steps_total"),
        seconds=recent.mean("onbeat_step_seconds"),
        predicted=recent.mean("onbeat_step_predicted_seconds"),
        budget_p50=recent.quantile("onbeat_step_budget_seconds", 0.5),
        over_budget=longer.share("onbeat_steps_over_budget_total", "onbeat_step_budget_seconds_count"),
        decodes=recent.mean("onbeat_step_decodes"),
        chunk_tokens=recent.mean("onbeat_step_chunk_tokens"),
        error_p50=longer.quantile("onbeat_step_prediction_error_ratio", 0.5),
        error_p99=longer.quantile("onbeat_step_prediction_error_ratio", 0.99),
        bias=recent.new.value("onbeat_step_prediction_bias_ratio"),
        planner_p99=recent.quantile("onbeat_planner_seconds", 0.99),
    )


def _drafts(recent: ScrapeWindow) -> DraftView | None:
    new = recent.new
    proposers = new.label_values("onbeat_spec_drafts_total", "proposer")
    if not proposers:
        return None
    return DraftView(
        proposer=proposers[0],
        length=recent.mean("onbeat_spec_draft_length"),
        acceptance=recent.share("onbeat_spec_accepted_tokens_total", "onbeat_spec_draft_tokens_total"),
        tokens_per_row=recent.share("onbeat_spec_delivered_tokens_total", "onbeat_spec_draft_length_count"),
        goodput=new.total("onbeat_spec_goodput_tokens_per_second"),
        predicted_goodput=new.total("onbeat_spec_goodput_predicted_tokens_per_second"),
    )


def _classes(window: ScrapeWindow) -> tuple[ClassView, ...]:
    """Return the classes, the most urgent first."""
    names = window.new.label_values(f"{_TTFT}_count", "slo_class")
    classes = [_class(name, window) for name in names]
    return tuple(
        sorted(classes, key=lambda own: (own.ttft.objective or inf, own.tbt.objective or inf, own.name))
    )


def _class(name: str, window: ScrapeWindow) -> ClassView:
    def percentiles(histogram: str, objective: str) -> Percentiles:
        return Percentiles(
            p50=window.quantile(histogram, 0.5, slo_class=name),
            p99=window.quantile(histogram, 0.99, slo_class=name),
            objective=window.new.value("onbeat_slo_objective_seconds", slo_class=name, objective=objective),
        )

    return ClassView(
        name=name,
        rate=window.rate(_ENDED, slo_class=name),
        attainment=_attainment(window, slo_class=name),
        goodput=window.rate(_ENDED, slo_class=name, outcome="good"),
        ttft=percentiles(_TTFT, "ttft"),
        tbt=percentiles(_TBT, "tbt"),
    )


def _worst_decile(scrape: Scrape) -> WorstDecileView | None:
    attainment = scrape.value("onbeat_slo_attainment_worst_decile")
    if attainment is None:
        return None
    return WorstDecileView(
        attainment=attainment,
        min_prompt_tokens=scrape.value("onbeat_slo_worst_decile_prompt_tokens", bound="min"),
        max_prompt_tokens=scrape.value("onbeat_slo_worst_decile_prompt_tokens", bound="max"),
        longest_wait=scrape.value("onbeat_slo_longest_wait_seconds"),
    )


def _attainment(window: ScrapeWindow, **labels: str) -> float | None:
    ended = window.delta(_ENDED, **labels)
    if ended is None:
        return None
    judged = ended - (window.delta(_ENDED, outcome="abandoned", **labels) or 0.0)
    return (window.delta(_ENDED, outcome="good", **labels) or 0.0) / judged if judged > 0 else None
