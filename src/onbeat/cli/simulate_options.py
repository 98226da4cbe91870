"""The flags that say what is simulated: model, devices, replicas, scheduler, step-time model."""

from __future__ import annotations

import argparse
from math import isfinite
from pathlib import Path

from onbeat.cli.args import (
    add_config_flag,
    add_queue_seconds_argument,
    add_shed_order_argument,
    checked,
    count,
)
from onbeat.cli.simulate_speculation import add_speculation_arguments, speculation_settings
from onbeat.cli.workload_options import add_workload_arguments
from onbeat.core.errors import ConfigError
from onbeat.core.slo import ShedMode
from onbeat.perfmodel.models import STEP_TIME_MODELS
from onbeat.scheduler.cluster.routers import ROUTERS
from onbeat.scheduler.replica.parts import QUEUE_ORDERS
from onbeat.scheduler.replica.policies import BASELINES, POLICIES
from onbeat.simulator.setup import (
    AUTO,
    DEFAULT_POLICY,
    POOL_POLICY,
    DisaggregationSettings,
    ReplicaSettings,
)

DEFAULT_KV_GBPS = 200.0
"""Of one InfiniBand HDR link."""
DTYPES = ("bf16", "fp16", "fp32", "fp8", "int8", "int4")


def _budget(text: str) -> int | str:
    return AUTO if text == AUTO else count(text)


budget = checked(_budget, "a number of tokens, or auto")
milliseconds = checked(lambda text: float(text) / 1e3, "milliseconds")
"""Argparse type: milliseconds on the command line, seconds inside."""


def add_simulation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is simulated and under which load: all flags that `simulate` and `capacity` share."""
    add_config_flag(parser)
    add_hardware_arguments(parser)
    add_fleet_arguments(parser)
    add_policy_arguments(parser)
    add_speculation_arguments(parser)
    add_step_time_arguments(parser)
    add_workload_arguments(parser)


def add_hardware_arguments(parser: argparse.ArgumentParser) -> None:
    """Say which model runs on what."""
    group = parser.add_argument_group("model and devices")
    group.add_argument(
        "--model",
        required=True,
        help="a known model such as meta-llama/Llama-3.1-8B, or the path of a config.json or its directory",
    )
    group.add_argument("--device", required=True, metavar="ID", help="such as h100-sxm, a100-80-sxm, l4, cpu")
    group.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the weights")
    group.add_argument(
        "--kv-cache-dtype",
        choices=(AUTO, *DTYPES),
        default=AUTO,
        help="of the KV cache; auto: that of the weights, at least 16 bits wide",
    )
    group.add_argument(
        "--tensor-parallel-size",
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="devices that share each layer",
    )
    group.add_argument(
        "--pipeline-parallel-size", "--pp", type=int, default=1, metavar="N", help="stages of layers"
    )
    group.add_argument(
        "--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE", help="of the device's memory"
    )
    group.add_argument(
        "--num-blocks",
        type=count,
        metavar="N",
        help="KV blocks of a replica (default: what the memory holds)",
    )
    group.add_argument("--block-size", type=int, default=16, help="tokens in a KV block")


def add_fleet_arguments(parser: argparse.ArgumentParser) -> None:
    """Say how many replicas there are and who sends requests where."""
    group = parser.add_argument_group("replicas")
    group.add_argument("--replicas", type=int, default=1, metavar="N")
    group.add_argument("--router", choices=tuple(ROUTERS), default="round-robin")
    group.add_argument(
        "--prefill-replicas",
        type=int,
        metavar="N",
        help="split prompts from generation: replicas for prompts",
    )
    group.add_argument("--decode-replicas", type=int, metavar="N", help="replicas for generation")
    group.add_argument(
        "--kv-transfer-gbps",
        type=checked(float, "a number"),
        metavar="GBIT",
        help=f"speed of a KV transfer between them, gigabits per second (default: {DEFAULT_KV_GBPS:g})",
    )
    group.add_argument(
        "--kv-transfer-latency-ms", type=milliseconds, metavar="MS", help="start of a transfer (default: 0)"
    )
    group.add_argument(
        "--decode-kv-cap-tokens", type=count, metavar="N", help="most KV tokens of a decode replica"
    )


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """Say which request runs when."""
    group = parser.add_argument_group("scheduler")
    group.add_argument(
        "--policy",
        choices=tuple(POLICIES),
        help=f"how steps are composed (default: {DEFAULT_POLICY}; with --prefill-replicas: {POOL_POLICY}); "
        f"baselines, to compare with: {', '.join(BASELINES)}",
    )
    group.add_argument(
        "--scheduling-policy", choices=tuple(QUEUE_ORDERS), default="fcfs", help="order of requests"
    )
    group.add_argument("--max-num-seqs", type=count, default=256, metavar="N", help="most requests at once")
    group.add_argument(
        "--max-num-batched-tokens",
        type=budget,
        metavar="N",
        help="token budget of a step; only a cap under slo, whose budget is time; auto: the largest multiple "
        "of 128 whose step keeps --slo-tbt-ms (default: 8192 where it is, 512 under others with chunked "
        "prefill, else the longest request)",
    )
    group.add_argument(
        "--max-model-len",
        type=count,
        metavar="TOKENS",
        help="longest request (default: the model's, or what the KV cache holds)",
    )
    group.add_argument(
        "--declared-max-tokens",
        type=count,
        metavar="TOKENS",
        help="output limit that every request declares, for policies that reserve memory for it "
        "(default: exactly its output)",
    )
    group.add_argument(
        "--shed",
        choices=[mode.value for mode in ShedMode],
        default=ShedMode.RELEGATE.value,
        help="what every request asks for where its TTFT objective is predicted to be missed: nothing (off), "
        "best effort (relegate, the default), or to be refused (reject); slo alone predicts it",
    )
    add_shed_order_argument(group)
    group.add_argument(
        "--max-num-queued-reqs", type=count, metavar="N", help="most requests that wait at a replica"
    )
    group.add_argument(
        "--max-num-queued-tokens", type=count, metavar="N", help="most prompt tokens that wait at a replica"
    )
    add_queue_seconds_argument(group)
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the KV of shared prompt prefixes (traces with block hashes)",
    )


def add_step_time_arguments(parser: argparse.ArgumentParser) -> None:
    """Say how the time of a step is predicted."""
    group = parser.add_argument_group("step time")
    group.add_argument("--step-time", choices=tuple(STEP_TIME_MODELS), default="roofline", help="the model")
    group.add_argument(
        "--profile", type=Path, metavar="FILE", help="what it is made from: of `onbeat profile`, or a table"
    )
    group.add_argument(
        "--host-overhead-ms",
        type=milliseconds,
        default=0.0,
        metavar="MS",
        help="added to every step: planning, sampling on the host, messages",
    )
    group.add_argument(
        "--step-noise",
        type=checked(float, "a number"),
        default=0.0,
        metavar="SIGMA",
        help="let each step take its predicted time x a log-normal factor of mean 1; 0.05 is about 5%%",
    )


def replica_settings(args: argparse.Namespace) -> ReplicaSettings:
    """Return what the flags ask for.

    Raises
    ------
    ConfigError : flags that do not go together.
    """
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "replicas"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    if not args.host_overhead_ms >= 0:
        raise ConfigError(f"--host-overhead-ms is {args.host_overhead_ms * 1e3:g}; it must be at least 0")
    if not (isfinite(args.step_noise) and args.step_noise >= 0):
        raise ConfigError(f"--step-noise is {args.step_noise:g}; it must be at least 0, such as 0.05")
    disaggregation = _disaggregation(args)
    return ReplicaSettings(
        model=args.model,
        device=args.device,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        tensor_parallel=args.tensor_parallel_size,
        pipeline_parallel=args.pipeline_parallel_size,
        replicas=args.replicas,
        router=args.router,
        policy=args.policy or (DEFAULT_POLICY if disaggregation is None else POOL_POLICY),
        scheduling_policy=args.scheduling_policy,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        enable_prefix_caching=args.enable_prefix_caching,
        gpu_memory_utilization=args.gpu_memory_utilization,
        step_time=args.step_time,
        profile=args.profile,
        host_overhead=args.host_overhead_ms,
        seed=args.seed,
        max_concurrency=args.max_concurrency,
        declared_max_tokens=args.declared_max_tokens,
        slo_mode=args.slo_mode,
        shed=ShedMode(args.shed),
        shed_order=args.shed_order,
        max_num_queued_reqs=args.max_num_queued_reqs,
        max_num_queued_tokens=args.max_num_queued_tokens,
        max_queue_seconds=args.max_queue_seconds,
        step_noise=args.step_noise,
        speculation=speculation_settings(args),
        disaggregation=disaggregation,
    )


def _disaggregation(args: argparse.Namespace) -> DisaggregationSettings | None:
    if args.prefill_replicas is None and args.decode_replicas is None:
        for name in ("decode_kv_cap_tokens", "kv_transfer_gbps", "kv_transfer_latency_ms"):
            if getattr(args, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} needs --prefill-replicas and --decode-replicas")
        return None
    if args.prefill_replicas is None or args.decode_replicas is None:
        missing = "--decode-replicas" if args.decode_replicas is None else "--prefill-replicas"
        raise ConfigError(f"prompts and generation are split between two pools; {missing} is missing")
    if args.prefill_replicas < 1 or args.decode_replicas < 1 or args.replicas != 1:
        raise ConfigError(
            "give at least one prefill replica and one decode replica, and no --replicas beside them"
        )
    gbps = DEFAULT_KV_GBPS if args.kv_transfer_gbps is None else args.kv_transfer_gbps
    if not gbps > 0:
        raise ConfigError(f"--kv-transfer-gbps is {gbps:g}; it must be above 0")
    return DisaggregationSettings(
        prefill_replicas=args.prefill_replicas,
        decode_replicas=args.decode_replicas,
        bandwidth=gbps * 1e9 / 8,
        latency=args.kv_transfer_latency_ms or 0.0,
        decode_kv_tokens=args.decode_kv_cap_tokens,
    )
