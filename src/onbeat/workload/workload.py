"""Who asks for what: the requests of a run, one index each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError, counted
from onbeat.workload.lengths import Lengths
from onbeat.workload.prompts import BlockPrompts, FreshPrompts, PromptSource, PromptWriter
from onbeat.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What one request asks for."""

    index: int
    prompt: str
    num_prompt_tokens: int
    """As planned; special tokens included, a chat template's own tokens not."""
    max_tokens: int
    group: str | None = None
    """Kind of prompt, where the workload mixes several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Lengths and prompts of all requests; prompts are made only when asked for."""

    name: str
    prompts: PromptSource
    num_prompt_tokens: NDArray[np.int64]
    max_tokens: NDArray[np.int64]
    times: NDArray[np.float64] | None = None
    """Recorded arrivals, seconds from any origin, ascending; None where there are none."""
    groups: tuple[str, ...] | None = None
    """Kind of prompt of each request; None where there is one kind."""

    def __post_init__(self) -> None:
        if not len(self.num_prompt_tokens):
            raise ConfigError(f"the {self.name} workload has no requests")

    def __len__(self) -> int:
        return len(self.num_prompt_tokens)

    def request(self, index: int) -> RequestSpec:
        """Return request `index`, the same each time."""
        return RequestSpec(
            index,
            self.prompts.text(index),
            int(self.num_prompt_tokens[index]),
            int(self.max_tokens[index]),
            None if self.groups is None else self.groups[index],
        )


def synthetic_workload(
    name: str,
    *,
    num_requests: int,
    prompt_lengths: Lengths,
    output_lengths: Lengths,
    writer: PromptWriter,
    rng: np.random.Generator,
) -> Workload:
    """Return requests of drawn lengths, each with a fresh prompt."""
    num_prompt_tokens = prompt_lengths.draw(num_requests, rng)
    return Workload(
        name=name,
        prompts=FreshPrompts(writer=writer, num_tokens=num_prompt_tokens.tolist()),
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=output_lengths.draw(num_requests, rng),
    )


def shared_prefix_workload(
    name: str,
    *,
    num_prefix_tokens: int,
    groups: NDArray[np.int64],
    num_own_tokens: NDArray[np.int64],
    max_tokens: NDArray[np.int64],
    writer: PromptWriter,
) -> Workload:
    """Return requests that start with the prefix of their group.

    Parameters
    ----------
    num_prefix_tokens : length of every prefix.
    groups : which prefix each request has.
    num_own_tokens : what follows the prefix.
    """
    totals = num_own_tokens + num_prefix_tokens
    prompts = FreshPrompts(
        writer=writer,
        num_tokens=totals.tolist(),
        num_prefix_tokens=num_prefix_tokens,
        prefix_groups=groups.tolist(),
    )
    return Workload(name=name, prompts=prompts, num_prompt_tokens=totals, max_tokens=max_tokens)


def trace_workload(trace: Trace, *, num_requests: int | None, writer: PromptWriter) -> Workload:
    """Return the first requests of a trace, in order of time, with prompts of the recorded lengths.

    Requests of recorded length 0 ask for one token: no API takes less.

    Raises
    ------
    ConfigError : the trace has fewer requests than asked for.
    """
    if num_requests is not None and num_requests > len(trace):
        raise ConfigError(
            f"the trace has {counted(len(trace), 'request')}, and --num-prompts is {num_requests}"
        )
    order = np.arange(len(trace)) if trace.times is None else np.argsort(trace.times, kind="stable")
    trace = trace.take(order[:num_requests])
    num_prompt_tokens = np.maximum(1, trace.num_prompt_tokens)
    prompts: PromptSource
    if trace.block_ids is not None:
        prompts = BlockPrompts(
            writer=writer,
            num_tokens=num_prompt_tokens.tolist(),
            block_ids=trace.block_ids,
            block_size=trace.block_size,
        )
    else:
        prompts = FreshPrompts(writer=writer, num_tokens=num_prompt_tokens.tolist())
    return Workload(
        name=trace.kind,
        prompts=prompts,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=np.maximum(1, trace.num_output_tokens),
        times=trace.times,
    )
