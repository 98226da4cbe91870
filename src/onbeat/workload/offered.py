"""Who asks for what, when, and with which objectives: a load as columns, without any text.

A simulation needs lengths and times only; a million requests are a few arrays here, not a million objects.

Which requests of a load have which class, and how long those are whose class has a trace of its own.

Lengths are drawn from the class's own trace, any request as likely as any other, so a class keeps its
distribution and not its order; when requests come is the load's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO
from onbeat.workload.job import Job
from onbeat.workload.slo_classes import SLOClass, check_classes
from onbeat.workload.trace import read_trace, rows_of

Lengths = NDArray[np.int64]
ClassIds = NDArray[np.int16] | NDArray[np.int32]


def assign_classes(num_requests: int, classes: Sequence[SLOClass], rng: np.random.Generator) -> ClassIds:
    """Return the class of each request: the exact shares, in random order.

    Counts are the shares' whole parts; requests left over go to the largest remainders, so that a short run
    too has the mix it was asked for.
    """
    check_classes(classes)
    wanted = np.array([each.share for each in classes]) * num_requests
    counts = np.floor(wanted).astype(np.int64)
    left = num_requests - int(counts.sum())
    counts[np.argsort(counts - wanted, kind="stable")[:left]] += 1
    class_ids = np.repeat(np.arange(len(classes), dtype=np.int16), counts)
    rng.shuffle(class_ids)
    return class_ids


def lengths_by_class(
    prompts: Lengths, outputs: Lengths, classes: Sequence[SLOClass], class_ids: ClassIds, *, seed: int
) -> tuple[Lengths, Lengths]:
    """Return prompt and output tokens of each request, drawn anew where its class has a trace.

    Parameters
    ----------
    prompts, outputs : tokens of each request, without classes.
    seed : equal seeds draw equal lengths.

    Raises
    ------
    ConfigError : a trace that cannot be read, or whose prompts share blocks, which a draw would not keep.
    """
    prompts, outputs = prompts.copy(), outputs.copy()
    for number, each in enumerate(classes):
        if each.trace is None:
            continue
        trace = read_trace(each.trace)
        if trace.block_ids is not None:
            raise ConfigError(
                f"class {each.name!r}: the prompts of {each.trace} share blocks, and requests that are drawn "
                "from it would not; give such a trace to the whole load (--trace)"
            )
        own = np.flatnonzero(class_ids == number)
        rows = np.random.default_rng([seed, 3, number]).integers(len(trace), size=len(own))
        # No engine takes a request without a prompt or without an output.
        prompts[own] = np.maximum(1, trace.num_prompt_tokens[rows])
        outputs[own] = np.maximum(1, trace.num_output_tokens[rows])
    return prompts, outputs


def have_traces(classes: Sequence[SLOClass]) -> bool:
    """Whether a class has a trace of its own."""
    return any(each.trace is not None for each in classes)


Overlong = Literal["error", "skip"]
MOST_REQUESTS = 10**8
"""More than any memory holds the records of."""


def check_num_requests(number: int) -> None:
    """Raise ConfigError unless a load can have so many requests."""
    if not 1 <= number <= MOST_REQUESTS:
        raise ConfigError(f"--num-prompts must be at least 1 and at most {MOST_REQUESTS:,}, got {number}")


class LongerThanContext(ConfigError):
    """Requests do not fit a context.

    Parameters
    ----------
    num_tokens : of the longest, prompt and output.
    """

    def __init__(self, message: str, *, num_tokens: int) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRows:
    """Which rows of a load are the calls of which job."""

    jobs: tuple[Job, ...]
    firsts: NDArray[np.int64]
    """Row of the first call of each job; its others follow."""
    num_clients: int = 0
    """Of the jobs, the first ones that are clients at work from the start of the run: no rate counts them."""

    def place(self, row: int) -> tuple[int, int]:
        """Return the number of the job that a row is a call of, and which call of it."""
        number = int(np.searchsorted(self.firsts, row, side="right")) - 1
        return number, row - int(self.firsts[number])

    @property
    def heads(self) -> NDArray[np.int64]:
        """The rows that need no other."""
        rows = (
            int(first) + index
            for first, job in zip(self.firsts, self.jobs, strict=True)
            for index, call in enumerate(job.calls)
            if not call.needs
        )
        return np.fromiter(rows, dtype=np.int64)

    def each_job(self, of_rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return, for each row, whether something holds for all rows of its job."""
        kept = np.logical_and.reduceat(of_rows, self.firsts)
        return np.repeat(kept, [len(job.calls) for job in self.jobs])

    def take(self, rows: NDArray[np.int64]) -> JobRows:
        """Return the same of rows that are whole jobs, one behind another.

        Raises
        ------
        ConfigError : a job is not taken whole.
        """
        firsts = np.flatnonzero(np.isin(rows, self.firsts))
        jobs = tuple(self.jobs[self.place(int(rows[first]))[0]] for first in firsts)
        if sum(len(job.calls) for job in jobs) != len(rows):
            raise ConfigError("some calls of a job were taken without the others; take whole jobs")
        num_clients = int(np.isin(rows, self.firsts[: self.num_clients]).sum())
        return JobRows(jobs=jobs, firsts=firsts.astype(np.int64), num_clients=num_clients)


_COLUMNS = (
    *("num_prompt_tokens", "num_output_tokens", "arrivals", "block_ids", "class_ids", "tenants"),
    *("priorities", "lines", "texts"),
)
"""Of a load: one entry for each request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLoad:
    """The requests of a run in order of arrival, one row each.

    Raises
    ------
    ConfigError : no requests, columns of different lengths, times that are negative or not ascending,
        a length below 1; the message names the first row at fault (rows count from 0).
    """

    name: str
    num_prompt_tokens: NDArray[np.int64]
    num_output_tokens: NDArray[np.int64]
    """0 where a request wants an embedding, not an answer."""
    arrivals: NDArray[np.float64] | None = None
    """Seconds from the start of the run, ascending; None is a closed loop, where each request waits for
    an earlier one to end."""
    block_ids: Sequence[Sequence[int]] | None = None
    """Ids of each prompt's blocks; equal ids mean an equal prefix up to the block's end. A load of very many
    requests can make those of a row as it is asked for it."""
    block_size: int = 512
    """Tokens of one block of `block_ids`."""
    ids_cover_output: bool = False
    """Whether `block_ids` go on over the output, so that a later prompt may hold an earlier answer."""
    class_ids: ClassIds | None = None
    """Row of `classes` for each request; None where there are no objectives."""
    classes: tuple[SLOClass, ...] = ()
    tenants: tuple[str | None, ...] | None = None
    """Who each request is from; None where its class says."""
    priorities: NDArray[np.int64] | None = None
    """`Request.priority` of each; None where all are alike."""
    lines: NDArray[np.int64] | None = None
    """Where in a file each request was read, counted from 1; None where there is no file."""
    jobs: JobRows | None = None
    """Which requests are calls of which job; None where each stands for itself. A call arrives once the calls
    that it needs have ended; `arrivals` has the start of its job then."""
    texts: Sequence[str] | None = None
    """The prompts, where the data set brings them along."""
    num_skipped: int = 0
    """Requests left out because they did not fit the context."""

    def __post_init__(self) -> None:
        if not len(self.num_prompt_tokens):
            raise ConfigError(f"the {self.name} load has no requests")
        self._check_columns()
        self._check_lengths()
        if self.arrivals is not None:
            self._check_arrivals(self.arrivals)
        self._check_classes()

    def __len__(self) -> int:
        return len(self.num_prompt_tokens)

    @property
    def rate(self) -> float | None:
        """Requests per second, from the start of the run to the last arrival; None in a closed loop.

        Where requests are calls of jobs, it is jobs per second, as for `Load.request_rate`.
        """
        if self.arrivals is None:
            return None
        span = float(self.arrivals[-1])
        return self.num_at_rate / span if span > 0 else float("inf")

    @property
    def num_at_rate(self) -> int:
        """What `rate` counts: requests, or the jobs that they are calls of."""
        return len(self) if self.jobs is None else len(self.jobs.firsts) - self.jobs.num_clients

    def request_class(self, index: int) -> SLOClass | None:
        """Return the class of request `index`; None without objectives."""
        return None if self.class_ids is None else self.classes[int(self.class_ids[index])]

    def slo(self, index: int) -> SLO | None:
        """Return the objectives of request `index`; None without objectives."""
        found = self.request_class(index)
        return None if found is None else found.slo

    def tenant(self, index: int) -> str | None:
        """Return who request `index` is from: by itself, or by its class."""
        if self.tenants is not None:
            return self.tenants[index]
        found = self.request_class(index)
        return None if found is None else found.tenant

    def take(self, rows: NDArray[np.int64] | Sequence[int]) -> OfferedLoad:
        """Return the given rows, in the given order (arrivals must stay ascending)."""
        chosen = np.asarray(rows, dtype=np.int64)
        taken = {name: rows_of(getattr(self, name), chosen) for name in _COLUMNS}
        return replace(self, **taken, jobs=None if self.jobs is None else self.jobs.take(chosen))

    def check_lengths(self, max_model_len: int, *, overlong: Overlong) -> OfferedLoad:
        """Return the requests whose prompt and output fit the context together.

        Parameters
        ----------
        max_model_len : tokens of the context.
        overlong : `error` refuses the load if one does not fit, `skip` leaves those out.

        Raises
        ------
        LongerThanContext : a request that does not fit (`error`), or none that does.
        """
        totals = self.num_prompt_tokens + self.num_output_tokens
        fitting = totals <= max_model_len
        if fitting.all():
            return self
        if self.jobs is not None:
            fitting = self.jobs.each_job(fitting)
        num_overlong = len(self) - int(fitting.sum())
        if overlong == "skip" and num_overlong < len(self):
            fitted = self.take(np.flatnonzero(fitting))
            return replace(fitted, num_skipped=self.num_skipped + num_overlong)
        first = int(np.argmin(fitting))
        where = f"request {first}" if self.lines is None else f"on line {int(self.lines[first])}"
        leave_out = "" if num_overlong == len(self) else "; --overlong skip leaves such requests out"
        raise LongerThanContext(
            f"{num_overlong} of {len(self)} requests of the {self.name} load do not fit a context of "
            f"{max_model_len} tokens; the first is {where}: prompt {int(self.num_prompt_tokens[first])} + "
            f"output {int(self.num_output_tokens[first])} tokens{leave_out}",
            num_tokens=int(totals.max()),
        )

    def at_rate(self, rate: float) -> OfferedLoad:
        """Return the same requests stretched or squeezed in time to a rate, which counts as `rate` does."""
        if self.arrivals is None or (own := self.rate) is None:
            raise ConfigError("a closed loop has no arrival rate to scale")
        if not (np.isfinite(rate) and rate > 0):
            raise ConfigError(f"the request rate must be a finite number above 0, got {rate:g}")
        if not np.isfinite(own):
            raise ConfigError("all requests arrive at once: there is no rate to scale")
        return replace(self, arrivals=self.arrivals / (rate / own))

    def with_arrivals(self, arrivals: NDArray[np.float64] | None) -> OfferedLoad:
        """Return the same requests at other times."""
        return replace(self, arrivals=arrivals)

    def with_classes(self, classes: Sequence[SLOClass], *, seed: int) -> OfferedLoad:
        """Return the same requests with objectives, assigned by share; equal seeds give equal classes.

        All calls of a job have one class: that of the job's own name, if each job has one, else by share.

        Requests of a class with a trace of its own are as long as requests of that trace.

        Raises
        ------
        ConfigError : a trace that cannot be drawn from, or prompts of this load that share blocks beside it.
        """
        rng = np.random.default_rng([seed, 2])
        if self.jobs is None:
            class_ids = assign_classes(len(self), classes, rng)
        else:
            sizes = [len(job.calls) for job in self.jobs.jobs]
            ids = {each.name: number for number, each in enumerate(classes)}
            known = [ids.get(job.kind, -1) for job in self.jobs.jobs]
            of_jobs = assign_classes(len(sizes), classes, rng) if -1 in known else np.array(known, np.int16)
            class_ids = np.repeat(of_jobs, sizes).astype(np.int16)
        load = replace(self, classes=tuple(classes), class_ids=class_ids)
        if not have_traces(classes):
            return load
        if self.block_ids is not None:
            raise ConfigError(
                f"prompts of the {self.name} load share blocks, so classes cannot have their own "
                "traces: leave 'trace' out of the classes"
            )
        prompts, outputs = lengths_by_class(
            self.num_prompt_tokens, self.num_output_tokens, classes, class_ids, seed=seed
        )
        names = [self.name if each.trace is None else each.trace.name for each in classes]
        return replace(
            load,
            name=" + ".join(dict.fromkeys(names)),
            num_prompt_tokens=prompts,
            num_output_tokens=outputs,
            lines=None,
        )

    def _check_columns(self) -> None:
        for column in _COLUMNS:
            values = getattr(self, column)
            if values is not None and len(values) != len(self):
                raise ConfigError(
                    f"the {self.name} load has {len(self)} prompt lengths, but {len(values)} {column}"
                )

    def _check_lengths(self) -> None:
        for what, lengths, least in (
            ("prompt", self.num_prompt_tokens, 1),
            ("output", self.num_output_tokens, 0),
        ):
            if int(lengths.min()) < least:
                first = int(np.argmax(lengths < least))
                raise ConfigError(
                    f"the {what} of request {first} has {int(lengths[first])} tokens; "
                    f"every {what} must have at least {least}"
                )
        if self.block_size < 1:
            raise ConfigError(f"a block must have at least 1 token, got {self.block_size}")

    def _check_arrivals(self, arrivals: NDArray[np.float64]) -> None:
        if not np.isfinite(arrivals).all():
            first = int(np.argmin(np.isfinite(arrivals)))
            raise ConfigError(f"request {first} arrives at {arrivals[first]:g} s: give finite times")
        if arrivals[0] < 0:
            raise ConfigError(f"request 0 arrives at {arrivals[0]:g} s: times must not be negative")
        falling = np.flatnonzero(np.diff(arrivals) < 0)
        if falling.size:
            row = int(falling[0]) + 1
            raise ConfigError(
                f"request {row} arrives at {arrivals[row]:g} s, before request {row - 1} at "
                f"{arrivals[row - 1]:g} s: sort the requests by time"
            )

    def _check_classes(self) -> None:
        check_classes(self.classes)
        if (self.class_ids is None) != (not self.classes):
            raise ConfigError("class_ids and classes go together: give both or neither")
        if self.class_ids is not None and not (
            int(self.class_ids.min()) >= 0 and int(self.class_ids.max()) < len(self.classes)
        ):
            raise ConfigError(f"a class id lies outside of the {len(self.classes)} classes")
