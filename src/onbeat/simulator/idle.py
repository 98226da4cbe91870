"""Which requests are infeasible: even an idle replica would miss their objectives."""

from __future__ import annotations

from onbeat.core.slo import SLO
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel, predict_step
from onbeat.metrics.record import RequestRecord
from onbeat.scheduler.replica.idle_check import num_late_at
from onbeat.scheduler.replica.request_state import LATE_TOKENS_IN
from onbeat.simulator.simulation_config import SimulationConfig


class IdleReplica:
    """A replica with nothing else to do, and nothing in its prefix cache.

    It runs a prompt in one step: in pieces, the context of each would be read again, so that is no faster. It
    then decodes alone, without drafts: these may all be rejected, and then are no help. What steps take is
    remembered.

    Parameters
    ----------
    step_time : of the replica, as it is before it learns.
    config : says what the host adds to every step, and what a request's first token waits for beside.
    """

    def __init__(self, step_time: StepTimeModel, config: SimulationConfig) -> None:
        self._step_time, self._config = step_time, config
        self._seconds: dict[tuple[int, int], float] = {}

    def __call__(self, record: RequestRecord) -> bool:
        """Return whether a request was infeasible; one without objectives is not."""
        if record.slo is None:
            return False
        offered, had = record.offered_output_tokens, record.num_output_tokens
        return self.is_infeasible(record.slo, record.num_prompt_tokens, had if offered is None else offered)

    def is_infeasible(self, slo: SLO, num_prompt_tokens: int, num_output_tokens: int = 2) -> bool:
        """Return whether the objectives are out of reach."""
        first = self._step(0, num_prompt_tokens) + self._config.request_overhead
        if slo.ttft is not None and first > slo.ttft:
            return True
        if num_output_tokens < 2:
            return slo.e2e is not None and first > slo.e2e
        num_more = num_output_tokens - 1
        decode = self._step(num_prompt_tokens, 1)  # the first one, which is the fastest
        if slo.tbt is not None:
            is_stream = self._config.scheduler.slo_mode == "stream"
            slack = slo.ttft - first if slo.ttft is not None and is_stream else 0.0
            if num_late_at(decode, slo.tbt, slack, num_more) * LATE_TOKENS_IN > num_output_tokens:
                return True
        return slo.e2e is not None and first + num_more * decode > slo.e2e

    def _step(self, num_computed_tokens: int, num_new_tokens: int) -> float:
        key = num_computed_tokens, num_new_tokens
        if key not in self._seconds:
            shape = BatchShape()
            shape.add(num_computed_tokens, num_new_tokens, samples=True)
            self._seconds[key] = predict_step(self._step_time, shape) + self._config.host_overhead
        return self._seconds[key]
