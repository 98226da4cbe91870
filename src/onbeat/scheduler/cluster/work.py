"""What a router is told of a request: its prefix, and how long it keeps a replica busy."""

from __future__ import annotations

from onbeat.core.request import Request
from onbeat.core.slo import ShedMode
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel, predict_step
from onbeat.scheduler.cluster.routing import RoutingRequest

_TYPICAL_BATCH = 32
"""Decodes that share a step, where the work of one of them is asked for."""


class WorkEstimate:
    """Predicts how long a request keeps a replica busy, from its prompt's length alone.

    Its output length is not known beforehand: the mean of the load stands for it. A decode costs
    its share of a step of `_TYPICAL_BATCH` of them.
    """

    def __init__(self, step_time: StepTimeModel, *, mean_output_tokens: float) -> None:
        self._step_time = step_time
        self._mean_output_tokens = mean_output_tokens

    def prefill(self, num_prompt_tokens: int) -> float:
        """Return the seconds of a step with this prompt alone."""
        shape = BatchShape()
        shape.add(0, num_prompt_tokens, samples=True)
        return predict_step(self._step_time, shape)

    def decode(self, num_prompt_tokens: int) -> float:
        """Return the request's share of the steps that generate the mean number of tokens."""
        context = num_prompt_tokens + int(self._mean_output_tokens / 2)
        shape = BatchShape.of_decodes(_TYPICAL_BATCH, _TYPICAL_BATCH * (context + 1))
        return self._mean_output_tokens * predict_step(self._step_time, shape) / _TYPICAL_BATCH


def describe(request: Request, work: WorkEstimate | None) -> RoutingRequest:
    """Return what a router is told of a request.

    Parameters
    ----------
    work : None where the router does not weigh work.

    Raises
    ------
    ConfigError : the step-time model predicts no finite time above 0.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    return RoutingRequest(
        request.request_id,
        request.block_hashes or (),
        0.0 if work is None else work.prefill(num_prompt_tokens),
        0.0 if work is None else work.decode(num_prompt_tokens),
        num_prompt_tokens,
        request.sampling.max_tokens,
        arrival=request.arrival,
        slo=request.slo,
        rather_refused=request.shed is ShedMode.REJECT,
        priority=request.priority,
    )
