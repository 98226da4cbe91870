"""Versions and settings of vLLM's under which it would not carry out a plan: a sentence refuses each."""

from __future__ import annotations

from typing import Any

from onbeat.core.errors import ConfigError

HINT = "or start vLLM without --scheduler-cls"
SUPPORTED = ((0, 26), (0, 33))
"""First and last minor version of vLLM whose scheduler was read and tried."""


def check_version(version: str) -> tuple[int, int]:
    """Return the minor version of vLLM.

    Raises
    ------
    ConfigError : one that was not tried.
    """
    parts = version.split(".")
    found = tuple(int(part) for part in parts[:2]) if all(part.isdigit() for part in parts[:2]) else ()
    low, high = SUPPORTED
    if len(found) != 2 or not low <= found <= high:
        raise ConfigError(
            f"onbeat's scheduler works inside vLLM {low[0]}.{low[1]} to {high[0]}.{high[1]}; this is vLLM "
            f"{version}. Install one of these, {HINT}"
        )
    return found[0], found[1]


def check_settings(scheduler: Any) -> None:
    """Raise ConfigError for a setting under which vLLM would not carry out a plan."""
    config = scheduler.vllm_config
    scheduling, parallel = config.scheduler_config, config.parallel_config
    refusals = (
        (
            scheduling.policy != "fcfs",
            f"--scheduling-policy is {scheduling.policy}, but objectives are the order; leave it out "
            "(the weight of a request says what it is worth)",
        ),
        (
            parallel.pipeline_parallel_size > 1,
            f"--pipeline-parallel-size is {parallel.pipeline_parallel_size}; onbeat plans no pipelines "
            "inside vLLM yet: use tensor parallelism",
        ),
        (
            getattr(parallel, "decode_context_parallel_size", 1) > 1
            or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "context parallelism spreads a request's KV over devices, which onbeat does not count; leave it "
            "out",
        ),
        (
            not scheduling.enable_chunked_prefill,
            "chunked prefill is off, but a step's time is kept by cutting prompts; leave out "
            "--no-enable-chunked-prefill",
        ),
        (
            scheduling.long_prefill_token_threshold > 0,
            f"--long-prefill-token-threshold is {scheduling.long_prefill_token_threshold}, which cuts "
            "prompts a second time; leave it out, objectives bound a step's prompts",
        ),
        (
            getattr(scheduling, "prefill_schedule_interval", 1) > 1
            and getattr(parallel, "data_parallel_size", 1) == 1,
            "--prefill-schedule-interval holds prompts back; leave it out, objectives say when they run",
        ),
        (
            bool(getattr(config.model_config, "is_encoder_decoder", False)),
            "the model has an encoder beside its decoder, whose blocks onbeat does not count",
        ),
        (
            bool(getattr(config.model_config, "is_diffusion", False)),
            "the model writes by diffusion, so that it has no time between tokens",
        ),
        (
            getattr(scheduler, "num_spec_tokens", 0) > 0
            and bool(scheduling.async_scheduling)
            and not getattr(scheduler, "use_v2_model_runner", False),
            "speculative decoding beside asynchronous scheduling finds its drafts by the step before, so "
            "that no stream can be skipped; add --no-async-scheduling",
        ),
    )
    for is_so, why in refusals:
        if is_so:
            raise ConfigError(f"onbeat's scheduler cannot run so: {why}, {HINT}")
