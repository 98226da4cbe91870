"""Which requests are infeasible: even an idle replica would miss their objectives."""

from __future__ import annotations

from onbeat.core.slo import SLO
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel, predict_step
from onbeat.metrics.record import RequestRecord
from onbeat.simulator.simulation_config import SimulationConfig


class IdleReplica:
    """A replica with nothing else to do, and nothing in its prefix cache.

    It runs a prompt in one step: in pieces, the context of each would be read again, so that is no faster. It
    then decodes alone, without drafts: these may all be rejected, and then are no help. Answers are
    remembered by what they depend on.

    Parameters
    ----------
    step_time : of the replica, as it is before it learns.
    host_overhead : added to every step, seconds.
    request_overhead : added to each request's first token, seconds.
    """

    def __init__(
        self, step_time: StepTimeModel, *, host_overhead: float = 0.0, request_overhead: float = 0.0
    ) -> None:
        self._step_time = step_time
        self._host_overhead = host_overhead
        self._request_overhead = request_overhead
        self._answers: dict[tuple[SLO, int, int], bool] = {}

    @classmethod
    def of(cls, step_time: StepTimeModel, config: SimulationConfig) -> IdleReplica:
        """Return a replica as it is simulated."""
        return cls(step_time, host_overhead=config.host_overhead, request_overhead=config.request_overhead)

    def __call__(self, record: RequestRecord) -> bool:
        """Return whether a request was infeasible; one without objectives is not."""
        if record.slo is None:
            return False
        num_output_tokens = record.offered_output_tokens
        if num_output_tokens is None:
            num_output_tokens = record.num_output_tokens
        return self.is_infeasible(record.slo, record.num_prompt_tokens, num_output_tokens)

    def is_infeasible(self, slo: SLO, num_prompt_tokens: int, num_output_tokens: int = 2) -> bool:
        """Return whether the objectives are out of reach.

        Parameters
        ----------
        num_output_tokens : for what it matters: a single token has no gap, and many take their time.
        """
        if slo.e2e is None:
            num_output_tokens = min(num_output_tokens, 2)
        key = (slo, num_prompt_tokens, num_output_tokens)
        found = self._answers.get(key)
        if found is None:
            found = self._answers[key] = self._misses(*key)
        return found

    def _misses(self, slo: SLO, num_prompt_tokens: int, num_output_tokens: int) -> bool:
        prefill = self._seconds(0, num_prompt_tokens) + self._request_overhead
        if slo.ttft is not None and prefill > slo.ttft:
            return True
        if num_output_tokens < 2:
            return slo.e2e is not None and prefill > slo.e2e
        decode = self._seconds(num_prompt_tokens, 1)  # the first one, which is the fastest
        if slo.tbt is not None and decode > slo.tbt:
            return True
        return slo.e2e is not None and prefill + (num_output_tokens - 1) * decode > slo.e2e

    def _seconds(self, num_computed_tokens: int, num_new_tokens: int) -> float:
        shape = BatchShape()
        shape.add(num_computed_tokens, num_new_tokens, samples=True)
        return predict_step(self._step_time, shape) + self._host_overhead
