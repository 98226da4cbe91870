"""The rate at which full batches would serve a load: where a search for the capacity begins."""

from __future__ import annotations

from onbeat.planner.cases import BuiltCase
from onbeat.scheduler.replica.token_budget import full_step, mean_decode_context
from onbeat.simulator.config import SimulationConfig
from onbeat.workload.offered import OfferedLoad


def service_rate(case: BuiltCase, load: OfferedLoad) -> float:
    """Return about how many requests per second all replicas serve when their batches are always full.

    Each step decodes a full batch and takes in as many prompt tokens as keep it full: per decode the mean
    prompt over the mean output, but no more than the token budget has room for. Latency is not looked at.
    """
    limits = case.config.scheduler
    mean_prompt = float(load.num_prompt_tokens.mean())
    mean_output = float(load.num_output_tokens.mean())
    context = mean_decode_context(load.num_prompt_tokens.tolist(), load.num_output_tokens.tolist())
    num_kv_tokens = limits.num_blocks * limits.block_size
    num_decodes = max(1, min(limits.max_num_seqs, num_kv_tokens // context, len(load)))
    num_prompt_tokens = num_decodes * mean_prompt / mean_output
    room = max(1.0, limits.max_num_batched_tokens - num_decodes)
    num_steps_each = mean_output * max(1.0, num_prompt_tokens / room) / num_decodes
    budget = num_decodes + max(1, round(min(num_prompt_tokens, room)))
    shape = full_step(budget, max_num_seqs=num_decodes, context_tokens=context)
    seconds = case.step_time.step_time(shape) + case.config.host_overhead
    return _num_replicas(case.config) / (num_steps_each * seconds)


def _num_replicas(config: SimulationConfig) -> int:
    pools = config.disaggregation
    return config.num_replicas if pools is None else pools.prefill.num_replicas + pools.decode.num_replicas
