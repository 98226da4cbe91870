"""From a description of a data set to the load that it offers: lengths and times, no text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError, counted
from onbeat.workload.arrival_plan import ArrivalPlan
from onbeat.workload.job import Job
from onbeat.workload.job_file import read_jobs
from onbeat.workload.job_kinds import JOB_KINDS, JobKind, draw_jobs
from onbeat.workload.job_load import given_starts, job_load
from onbeat.workload.lanes import LANES, lane_load
from onbeat.workload.lengths import Lengths, LogNormalLength, UniformLength, ZipfLength, check_length
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.sharegpt import read_sharegpt, sharegpt_workload
from onbeat.workload.trace import TIMED_KINDS, Trace, TraceKind, read_trace

SharedName = Literal["random", "conversation", "zipf", "sharegpt", TraceKind, "jobs", JobKind]
"""Loads that are simulated and sent."""
LoadName = Literal[SharedName, "lanes"]
DRAWN_LOADS = frozenset({"random", "conversation", "zipf", LANES, *JOB_KINDS})
"""Those whose lengths come from a distribution, not from a file."""
TIMED_LOADS = TIMED_KINDS | {"jobs"}
"""Those whose files may have times."""
JOB_LOADS = frozenset({"jobs", *JOB_KINDS})
"""Those of calls that depend on one another: numbers and rates are of jobs, not of calls."""

DEFAULT_NUM_REQUESTS = 1000
DEFAULT_NUM_JOBS = 100

# Spread of conversation lengths: the logarithm's standard deviation of ShareGPT-like chats.
CONVERSATION_PROMPT_SIGMA = 1.0
CONVERSATION_OUTPUT_SIGMA = 0.7
CONVERSATION_MIN_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSource:
    """Where the lengths of requests come from.

    Raises
    ------
    ConfigError : a file is missing or not wanted.
    """

    name: LoadName = "random"
    path: Path | None = None
    input_len: int = 1024
    """Mean prompt tokens; of `zipf` the most."""
    output_len: int | None = None
    """Mean output tokens (128 if None), of `zipf` the most; replaces those of a file."""
    range_ratio: float = 0.0
    """Spread of `random` around the mean; 0 gives every request the same lengths."""
    zipf_exponent: float = 1.0
    columns: tuple[str, str] | None = None
    """Columns of prompt and output tokens of `lengths`."""
    shuffle: bool = True
    """Take requests of files without times in random order."""
    count_tokens: Callable[[str], int] | None = None
    """Measures the texts of `sharegpt` and `jobs`."""
    job_deadline: float | None = None
    """Of each job, seconds; None: as its file says, or by its length."""

    def __post_init__(self) -> None:
        if self.output_len is not None:
            check_length(self.output_len)
        if (self.name in DRAWN_LOADS) != (self.path is None):
            raise ConfigError(
                f"--dataset-name {self.name} reads no file, but {self.path} was given"
                if self.path is not None
                else f"--dataset-name {self.name} needs a file: give it with --dataset-path"
            )
        if self.columns is not None and self.name != "lengths":
            raise ConfigError(f"--length-columns is for --dataset-name lengths; this run uses {self.name}")
        if self.name == "sharegpt" and self.count_tokens is None:
            raise ConfigError(
                "a ShareGPT file holds texts, whose lengths only a tokenizer can tell: give --tokenizer, or "
                "a CSV of lengths with --dataset-name lengths"
            )

    def lengths(self, prompt_sigma: float, output_sigma: float) -> tuple[Lengths, Lengths]:
        """Return the distributions of prompt and output lengths of a drawn load."""
        output_len = self.output_len or 128
        if self.name == "zipf":
            return (
                ZipfLength(exponent=self.zipf_exponent, high=self.input_len),
                ZipfLength(exponent=self.zipf_exponent, high=output_len),
            )
        if self.name == "conversation":
            return conversation_lengths(self.input_len, prompt_sigma), conversation_lengths(
                output_len, output_sigma
            )
        return UniformLength(self.input_len, self.range_ratio), UniformLength(output_len, self.range_ratio)


def conversation_lengths(mean: int, sigma: float) -> LogNormalLength:
    """Return log-normal lengths as of chats, between a few tokens and eight times the mean."""
    return LogNormalLength(mean=mean, sigma=sigma, low=min(CONVERSATION_MIN_TOKENS, mean), high=8 * mean)


def make_load(
    source: LoadSource, arrivals: ArrivalPlan | None, *, num_requests: int | None, seed: int
) -> OfferedLoad:
    """Return the load that a data set and a plan of arrivals make together.

    Parameters
    ----------
    arrivals : None is a closed loop.
    num_requests : None takes 1,000 (100 jobs), or the whole file. A file with fewer requests is drawn from
        again, with replacement, unless its own times are replayed or its prompts share blocks.
    seed : decides lengths, order and arrivals.

    Raises
    ------
    ConfigError : a bad file, or fewer requests than asked for in one that cannot be drawn from again.
    """
    rng = np.random.default_rng([seed, 0])
    if source.name == LANES:
        if arrivals is None:
            raise ConfigError("chats and queries of lanes arrive by themselves: give --request-rate")
        num_online = num_requests or DEFAULT_NUM_REQUESTS
        return lane_load(arrivals.offsets(num_online, rng=np.random.default_rng([seed, 1])), rng)
    if source.name in JOB_LOADS:
        return _job_load(source, arrivals, num_requests, seed, rng)
    if source.name in DRAWN_LOADS:
        load, times = _drawn(source, num_requests or DEFAULT_NUM_REQUESTS, rng), None
    elif source.name == "sharegpt":
        load, times = _from_sharegpt(source, num_requests, rng), None
    else:
        is_replay = arrivals is not None and arrivals.kind == "replay"
        load, times = _from_trace(source, num_requests, rng, is_replay=is_replay)
    if arrivals is None:
        return load
    return load.with_arrivals(arrivals.offsets(len(load), rng=np.random.default_rng([seed, 1]), times=times))


def load_jobs(source: LoadSource, num_jobs: int | None, rng: np.random.Generator) -> list[Job]:
    """Return the jobs of a data set of them: those of a file, from its beginning, or drawn ones.

    Raises
    ------
    ConfigError : a bad file, or fewer jobs than asked for.
    """
    if source.name != "jobs":
        return draw_jobs(source.name, num_jobs or DEFAULT_NUM_JOBS, rng, deadline=source.job_deadline)  # type: ignore[arg-type]
    assert source.path is not None  # checked by the source
    jobs = read_jobs(source.path, source.count_tokens)
    if num_jobs is not None and num_jobs > len(jobs):
        raise ConfigError(f"{source.path} has {counted(len(jobs), 'job')}, and --num-prompts is {num_jobs}")
    if source.job_deadline is not None:
        jobs = [replace(job, deadline=source.job_deadline) for job in jobs]
    return jobs[:num_jobs]


def _job_load(
    source: LoadSource,
    arrivals: ArrivalPlan | None,
    num_jobs: int | None,
    seed: int,
    rng: np.random.Generator,
) -> OfferedLoad:
    jobs = load_jobs(source, num_jobs, rng)
    starts = None
    if arrivals is not None:
        starts = arrivals.offsets(len(jobs), rng=np.random.default_rng([seed, 1]), times=given_starts(jobs))
    return job_load(source.name, jobs, starts)


def _drawn(source: LoadSource, num_requests: int, rng: np.random.Generator) -> OfferedLoad:
    prompts, outputs = source.lengths(CONVERSATION_PROMPT_SIGMA, CONVERSATION_OUTPUT_SIGMA)
    return OfferedLoad(
        name=source.name,
        num_prompt_tokens=prompts.draw(num_requests, rng),
        num_output_tokens=outputs.draw(num_requests, rng),
    )


def _from_sharegpt(source: LoadSource, num_requests: int | None, rng: np.random.Generator) -> OfferedLoad:
    assert source.path is not None  # checked by the source
    assert source.count_tokens is not None
    exchanges = read_sharegpt(source.path)
    workload = sharegpt_workload(
        exchanges,
        num_requests=min(DEFAULT_NUM_REQUESTS, len(exchanges)) if num_requests is None else num_requests,
        output_len=source.output_len,
        count_tokens=source.count_tokens,
        order=rng if source.shuffle else None,
    )
    return OfferedLoad(
        name="sharegpt", num_prompt_tokens=workload.num_prompt_tokens, num_output_tokens=workload.max_tokens
    )


def _from_trace(
    source: LoadSource, num_requests: int | None, rng: np.random.Generator, *, is_replay: bool
) -> tuple[OfferedLoad, NDArray[np.float64] | None]:
    assert source.path is not None  # checked by the source
    kind: TraceKind = source.name  # type: ignore[assignment]
    trace = read_trace(source.path, kind=kind, columns=source.columns)
    trace = trace.take(_rows(trace, source, num_requests, rng, is_replay=is_replay))
    outputs = trace.num_output_tokens
    if source.output_len is not None:
        outputs = np.full(len(trace), source.output_len, dtype=np.int64)
    load = OfferedLoad(
        name=trace.kind,
        # No engine takes a request without a prompt or without an output.
        num_prompt_tokens=np.maximum(1, trace.num_prompt_tokens),
        num_output_tokens=np.maximum(1, outputs),
        block_ids=trace.block_ids,
        block_size=trace.block_size,
        lines=trace.lines,
    )
    return load, trace.times


def _rows(
    trace: Trace, source: LoadSource, num_requests: int | None, rng: np.random.Generator, *, is_replay: bool
) -> NDArray[np.int64]:
    wanted = len(trace) if num_requests is None else num_requests
    if wanted > len(trace):
        if is_replay or trace.block_ids is not None:
            remedy = "their shared blocks" if trace.block_ids is not None else "their times"
            raise ConfigError(
                f"{source.path} has {counted(len(trace), 'request')}, and --num-prompts is {wanted}; no "
                f"request can be drawn again because of {remedy}"
                + ("" if trace.block_ids is not None else ": give --request-rate to draw only their lengths")
            )
        return rng.integers(len(trace), size=wanted)
    if trace.times is None and source.shuffle:
        return rng.permutation(len(trace))[:wanted]
    return np.arange(wanted)
