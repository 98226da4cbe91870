"""Step time as a linear form of the batch's sums, with published coefficients.

DistServe (Zhong et al., OSDI 2024, appendix A and the released simulator) measures prefill and decode
steps apart: `a + b sum(len) + c sum(len^2)` and `a + b sum(context) + c batch`. TurboSpec (Liu et al.,
arXiv 2406.14066) has one form for all: a term each for context tokens, new tokens, sequences,
speculation, and a fixed one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.papers.linear_coefficients import (
    DistServeCoefficients,
    TurboSpecCoefficients,
    TurboSpecDrafts,
    read_distserve_coefficients,
    read_turbospec_coefficients,
    read_turbospec_drafts,
)
from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape

StepSeconds = Callable[[BatchShape], float]

_LOWEST_SHARE = 0.1
LINEAR_SIGMA = 0.10
"""Spread of log(measured / predicted) of these forms."""


@dataclass(frozen=True, slots=True)
class EngineOverhead:
    """What a step costs beside the model: scheduling and the calls to the workers; seconds.

    The defaults are those of DistServe's simulator: 2 ms and 0.1 us for each token of context in the batch.
    """

    per_step: float = 2e-3
    per_token: float = 1e-7


NO_OVERHEAD = EngineOverhead(0.0, 0.0)
STAGE_HOP = 1e-3
"""Seconds that a prefill step loses between two pipeline stages, as DistServe's simulator has it."""


def linear_closure(
    path: Path, *, model: str, tensor: int = 1, pipeline: int = 1, overhead: EngineOverhead | None = None
) -> StepSeconds:
    """Return the step time of a model with the coefficients of a file.

    Parameters
    ----------
    path : DistServe's profiler JSON (`.json`) or TurboSpec's regression (`.csv`).
    model : its name in the file.
    tensor, pipeline : degrees of parallelism.
    overhead : None takes DistServe's own for its format, and none for TurboSpec's, which was fitted to whole
        steps.

    Returns
    -------
    Seconds through all stages for a `BatchShape`.

    Raises
    ------
    ConfigError : a file of another kind, or one without that model and degree; stages with TurboSpec's form.
    """
    if path.suffix == ".json":
        distserve = read_distserve_coefficients(path, model=model, tensor=tensor)
        return distserve_closure(distserve, pipeline=pipeline, overhead=overhead or EngineOverhead())
    if path.suffix == ".csv":
        if pipeline != 1:
            raise ConfigError(
                f"the coefficients in {path} know no pipeline stages; pipeline is {pipeline}, use 1"
            )
        turbospec = read_turbospec_coefficients(path, model=model, tensor=tensor)
        return turbospec_closure(turbospec, overhead=overhead or NO_OVERHEAD)
    raise ConfigError(
        f"linear coefficients are read from DistServe's .json or TurboSpec's .csv, not from {str(path)!r}"
    )


def distserve_closure(
    coefficients: DistServeCoefficients, *, pipeline: int = 1, overhead: EngineOverhead = NO_OVERHEAD
) -> StepSeconds:
    """Return DistServe's form as a function of the batch.

    Parameters
    ----------
    coefficients : of the model and its tensor-parallel degree.
    pipeline : stages; each takes its share of the layers, so only hops between stages come on top.
    overhead : added to every step.

    Notes
    -----
    Chunks: the form knows whole prompts. A chunk of n tokens behind m cached ones counts n^2 + 2 n m in
    place of len^2, so that the chunks of a prompt count len^2 together, and a whole prompt exactly that.

    Mixed steps: the form knows none. Their fixed part (reading the weights, launching kernels) is paid
    once, so it is the larger of the two; the parts that grow with tokens and sequences add up.

    Drafts: the form knows none. One counts as another sequence that brings no context to read.
    """
    prefill_fixed, per_token, per_square = coefficients.prefill
    small, large, large_batch = coefficients.decode_small, coefficients.decode_large, coefficients.large_batch
    per_step, per_context = overhead.per_step, overhead.per_token
    hops = STAGE_HOP * (pipeline - 1)
    lowest = _LOWEST_SHARE * min(prefill_fixed, small[0], large[0])

    def seconds(shape: BatchShape) -> float:
        num_decodes = shape.num_decodes
        fixed = growing = 0.0
        context = shape.decode_context_tokens
        if num_decodes:
            num_tokens = num_decodes + shape.num_draft_tokens
            fixed, per_decode_context, per_sequence = small if num_tokens < large_batch else large
            growing = per_decode_context * context + per_sequence * num_tokens
        if shape.num_chunks:
            num_tokens = shape.num_chunk_tokens
            fixed = max(fixed, prefill_fixed) + hops
            growing += per_token * num_tokens + per_square * (2 * shape.query_key_pairs - num_tokens)
            context += num_tokens + shape.chunk_cached_tokens
        elif not num_decodes:
            return 0.0
        return max(fixed + growing, lowest) + per_step + per_context * context

    return seconds


def turbospec_closure(
    coefficients: TurboSpecCoefficients, *, overhead: EngineOverhead = NO_OVERHEAD
) -> StepSeconds:
    """Return TurboSpec's form as a function of the batch.

    Context tokens are those that the step reads from the cache, drafts left out. The published coefficients
    have a negative term for each sequence: far outside of what was measured (hundreds of sequences with
    hardly any context) the sum would fall to zero, and is kept at a tenth of the fixed term.
    """
    per_context, per_new, per_sequence = (
        coefficients.per_context_token,
        coefficients.per_new_token,
        coefficients.per_sequence,
    )
    fixed, when_speculating = coefficients.fixed, coefficients.when_speculating
    lowest = _LOWEST_SHARE * fixed

    def seconds(shape: BatchShape) -> float:
        if not shape.num_sequences:
            return 0.0
        context = shape.decode_context_tokens - shape.num_draft_tokens + shape.chunk_cached_tokens
        total = (
            fixed
            + per_context * context
            + per_new * shape.num_new_tokens
            + per_sequence * shape.num_sequences
            + (when_speculating if shape.num_verify_rows else 0.0)
        )
        all_context = context + shape.num_chunk_tokens
        return max(total, lowest) + overhead.per_step + overhead.per_token * all_context

    return seconds


def turbospec_speculation(path: Path, *, model: str, tensor: int = 1, method: str) -> StepSeconds:
    """Return the time of a step that drafts by a method and verifies, as TurboSpec's goodput has it.

    Parameters
    ----------
    path : TurboSpec's regression (`.csv`).
    model : its name in the file.
    tensor : degree of parallelism.
    method : see `read_turbospec_drafts`.

    Raises
    ------
    ConfigError : no such file, model, degree or method.
    """
    target = read_turbospec_coefficients(path, model=model, tensor=tensor)
    drafts = read_turbospec_drafts(path, model=model, tensor=tensor, method=method)
    return turbospec_speculation_closure(target, drafts)


def turbospec_speculation_closure(target: TurboSpecCoefficients, drafts: TurboSpecDrafts) -> StepSeconds:
    """Return TurboSpec's form with what drafting takes; a step without drafts takes the target's time."""
    target_seconds = turbospec_closure(target)

    def seconds(shape: BatchShape) -> float:
        total = target_seconds(shape)
        if not shape.num_draft_tokens:
            return total
        context = shape.decode_context_tokens - shape.num_draft_tokens + shape.chunk_cached_tokens
        return (
            (1 + drafts.target_share) * total
            + drafts.fixed
            + drafts.per_context_token * context
            + drafts.per_new_token * shape.num_new_tokens
            + drafts.per_sequence * shape.num_sequences
            + drafts.per_draft * shape.num_draft_tokens / shape.num_verify_rows
        )

    return seconds
