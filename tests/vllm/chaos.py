"""Plans at random: what no policy would choose vLLM serves all the same."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from pathlib import Path

from vllm.v1.core.sched.scheduler import Scheduler

from onbeat.vllm.scheduler import SLOSchedulerMixin


class Chaos:
    """Plans at random: skips, orders, chunks and preemptions that no policy would choose."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def compose(self, plan) -> None:
        rng = self.rng
        running = list(plan.running)
        rng.shuffle(running)
        if len(running) > 2 and rng.random() < 0.1:
            plan.preempt(running.pop())
        for state in running:
            if state.num_tokens + state.num_in_flight_tokens >= state.max_total_tokens:
                continue
            wanted = state.num_wanted_tokens
            if rng.random() < 0.35 or plan.num_tokens_left < 1:
                continue
            if wanted == 1 and (not plan.num_growing([state]) or plan.take_block()):
                plan.decodes.append(state)
                plan.num_tokens_left -= 1
            elif wanted > 1:
                num = rng.randrange(1, min(wanted, plan.num_tokens_left) + 1)
                plan.chunks.append((state, num))
                plan.num_tokens_left -= num
        waiting = list(plan.waiting)
        rng.shuffle(waiting)
        for state in waiting[: rng.randrange(3)]:
            if plan.num_slots_left < 1 or plan.num_tokens_left < 1 or state.num_in_flight_tokens:
                continue
            cached = plan.kv.match(state)
            most = min(state.num_tokens - len(cached) * plan.kv.block_size, plan.num_tokens_left)
            plan.admit(state, cached, rng.randrange(1, most + 1))
        if plan.is_empty and plan.running and not plan.victims:
            plan.decode_running()
            plan.continue_prefills()

    def commit(self, plan) -> None:
        pass


def let_chaos_plan(scheduler, seed: int) -> None:
    """Have a scheduler of ours plan at random."""
    planner = scheduler.onbeat.steps.planner
    planner.policy = dataclasses.replace(planner.policy, composer=Chaos(seed))


class ChaosScheduler(SLOSchedulerMixin, Scheduler):  # type: ignore[misc]
    """For `vllm serve --scheduler-cls`; it writes what it counted into the file CHAOS_COUNTS names."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        let_chaos_plan(self, seed=1)
        self.num_preempted = self.num_skipped = 0

    def schedule(self, *args, **kwargs):
        output = super().schedule(*args, **kwargs)
        self.num_skipped += sum(
            request.request_id not in output.num_scheduled_tokens for request in self.running
        )
        self.num_preempted += len(output.preempted_req_ids or ())
        return output

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if not self.running and not self.waiting:
            self._write_counts()
        return outputs

    def _write_counts(self) -> None:
        plugin = self.onbeat
        counts = {
            "planned": plugin.num_planned,
            "foreign": plugin.num_foreign,
            "faults": plugin.num_faults,
            "mismatches": plugin.num_mismatches,
            "skipped": self.num_skipped,
            "preempted": self.num_preempted,
        }
        Path(os.environ["CHAOS_COUNTS"]).write_text(json.dumps(counts))
