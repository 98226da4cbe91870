"""One replica's scheduler with a loop around it, without a clock: python examples/scheduler.py [POLICY]."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from onbeat import SLO
from onbeat.core.request import Request, SamplingParams
from onbeat.core.step import BatchShape, ModelRunnerOutput, SchedulerOutput
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig


@dataclass(frozen=True)
class Machine(StepTimeModel):
    """A machine whose steps take 4 ms, and 0.05 ms for each token; it predicts them exactly."""

    fixed: float = 0.004
    per_token: float = 0.00005

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:  # noqa: ARG002 (always the same)
        """Return the seconds of a step."""
        return self.fixed + self.per_token * shape.num_new_tokens

    def max_chunk_tokens(
        self,
        shape: BatchShape,
        cached_tokens: int,  # noqa: ARG002 (reading them takes no time here)
        budget: float,
        q: float | None = None,
    ) -> int:
        """Return the longest chunk with which the step keeps within the budget, seconds."""
        return max(0, int((budget - self.step_time(shape, q)) / self.per_token + 1e-9))

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Learn nothing."""

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Return a token for each row that samples one."""
        return ModelRunnerOutput([[7] for row in step.rows if row.samples])


def requests() -> list[Request]:
    """Return three streams, and a long prompt that comes while they run."""
    asked = [("a", 0.0, 40, 12), ("b", 0.004, 60, 12), ("c", 0.008, 20, 12), ("long", 0.03, 1200, 3)]
    return [
        Request(
            request_id=name,
            prompt_token_ids=range(number * 5000, number * 5000 + num_tokens),
            arrival=arrival,
            sampling=SamplingParams(max_tokens=max_tokens),
            slo=SLO(ttft=0.3, tbt=0.012),
        )
        for number, (name, arrival, num_tokens, max_tokens) in enumerate(asked)
    ]


def main() -> None:
    policy = sys.argv[1] if len(sys.argv) > 1 else "sarathi"
    machine, arriving, now = Machine(), requests(), 0.0
    budget = 256 if policy == "sarathi" else 2048
    config = SchedulerConfig(
        policy=policy, max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=2048, num_blocks=256
    )
    scheduler = Scheduler(config, machine)
    print("  starts    takes   rows: request, tokens computed before + tokens of this step")
    while arriving or scheduler.num_unfinished:
        while arriving and arriving[0].arrival <= now:
            scheduler.add(arriving.pop(0), now)
        step = scheduler.schedule(now)
        if step is None:
            now = arriving[0].arrival
            continue
        seconds = machine.step_time(step.shape)
        rows = [f"{row.request_id} {row.num_computed_tokens}+{row.num_new_tokens}" for row in step.rows]
        print(f"{now * 1e3:5.1f} ms  {seconds * 1e3:4.1f} ms   {', '.join(rows)}")
        now += seconds
        for output in scheduler.update(step, machine.run(step), now):
            if output.finish_reason is not None:
                print(f"{now * 1e3:5.1f} ms            {output.request_id} ends: {output.finish_reason}")


if __name__ == "__main__":
    main()
