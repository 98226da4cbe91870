"""Which requests of a load have which class, and how long those are whose class has a trace of its own.

Lengths are drawn from the class's own trace, any request as likely as any other, so a class keeps its
distribution and not its order; when requests come is the load's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.workload.slo_classes import SLOClass, check_classes
from onbeat.workload.trace import read_trace

Lengths = NDArray[np.int64]
ClassIds = NDArray[np.int16] | NDArray[np.int32]


def assign_classes(num_requests: int, classes: Sequence[SLOClass], rng: np.random.Generator) -> ClassIds:
    """Return the class of each request: the exact shares, in random order.

    Counts are the shares' whole parts; requests left over go to the largest remainders, so that a short run
    too has the mix it was asked for.
    """
    check_classes(classes)
    if not classes:
        raise ConfigError("there are no classes to assign: give at least one")
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
