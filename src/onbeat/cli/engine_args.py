"""Flags of an engine, named as vLLM names them, and the configuration that they make."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from onbeat.cli.args import JSON, add_queue_seconds_argument, count
from onbeat.core.errors import ConfigError
from onbeat.engine.config import (
    BACKENDS,
    DEFAULT_STEP_TIME,
    DTYPES,
    LOAD_FORMATS,
    QUANTIZATIONS,
    EngineConfig,
)
from onbeat.engine.speculation.config import METHODS, parse_speculative_config
from onbeat.hub.files import ModelFiles
from onbeat.hub.known import DEFAULT_MODEL
from onbeat.scheduler.replica.parts import QUEUE_ORDERS
from onbeat.scheduler.replica.policies import BASELINES, POLICIES


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, and how its text is made."""
    group = add_weights_arguments(parser)
    group.add_argument("--tokenizer", type=Path, help="directory or .gguf to take the tokenizer from")
    group.add_argument("--chat-template", type=Path, help="file with a Jinja chat template")


def add_weights_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Which model, and how it is loaded; return the group for more."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "model_positional",
        metavar="MODEL",
        nargs="?",
        help=f"Hugging Face directory, .gguf file, hub id or known model (default: {DEFAULT_MODEL})",
    )
    group.add_argument("--model", help="the same as MODEL")
    group.add_argument("--revision", help="branch, tag or commit of a hub model")
    group.add_argument("--load-format", choices=LOAD_FORMATS, default="auto", help="dummy: random weights")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="type of weights and activations")
    group.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        default="auto",
        help="of weights; auto: as in the file; none: all in --dtype; int8: all in 8 bits",
    )
    group.add_argument("--seed", type=int, default=0, help="seed of dummy weights")
    return group


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """How the engine runs."""
    group = add_device_arguments(parser)
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=count,
        default=1,
        metavar="N",
        help="processes that the model is split among, on the CPU and by torch; for tests, not for speed",
    )
    group.add_argument(
        "--step-time-profile",
        default=DEFAULT_STEP_TIME,
        metavar="FILE",
        help="what predicts step times: a file of `onbeat profile`; auto: that of this model and machine in "
        "the cache, else the roofline alone; calibrate: some seconds of measuring now; roofline; none",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the KV of shared prompt prefixes",
    )
    group.add_argument(
        "--speculative-config",
        type=parse_speculative_config,
        metavar=JSON,
        help=f"draft tokens ahead and verify them together: method ({', '.join(METHODS)}), "
        "num_speculative_tokens, draft_length (adaptive to the load, or fixed), model, prompt_lookup_max, "
        'prompt_lookup_min, num_layers; such as \'{"method": "ngram"}\'',
    )


def add_device_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Where the engine runs and what memory it takes; return the group for more."""
    group = parser.add_argument_group("engine")
    group.add_argument("--device", default="auto", help="where to run: auto, cpu, cuda or cuda:N")
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="what computes steps: the native CPU engine, or torch (default: native where it can)",
    )
    group.add_argument(
        "--threads",
        type=int,
        help="CPU threads of a forward pass (default: all cores, or what a CPU quota leaves)",
    )
    group.add_argument(
        "--kv-cache-memory-bytes",
        type=count,
        metavar="BYTES",
        help="memory of the KV cache, such as 2G (default: a quarter of what is free, at most 4G)",
    )
    group.add_argument("--block-size", type=int, default=16, help="tokens in a KV block")
    group.add_argument(
        "--max-model-len",
        type=count,
        metavar="TOKENS",
        help="longest request, prompt and output (default: the model's, or what the KV cache holds)",
    )
    return group


def add_scheduler_arguments(parser: argparse.ArgumentParser) -> None:
    """Which request runs when."""
    group = parser.add_argument_group("scheduler")
    group.add_argument(
        "--policy",
        choices=tuple(POLICIES),
        default="slo",
        help="how steps are composed (default: slo, by deadlines and predicted step times); "
        f"baselines, to compare with: {', '.join(BASELINES)}",
    )
    group.add_argument(
        "--scheduling-policy",
        choices=tuple(QUEUE_ORDERS),
        default="fcfs",
        help="order of requests; priority: lower `priority` first, strictly",
    )
    add_batch_arguments(group)
    add_queue_arguments(group)
    group.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="plan the next step while the current one runs",
    )


def add_queue_arguments(group: argparse._ArgumentGroup) -> None:
    """Limit what may wait."""
    group.add_argument(
        "--max-num-queued-reqs",
        type=count,
        metavar="N",
        help="most requests that wait; more are refused with 503 (default: no limit)",
    )
    group.add_argument(
        "--max-num-queued-tokens",
        type=count,
        metavar="N",
        help="most prompt tokens that wait, likewise (default: no limit)",
    )
    add_queue_seconds_argument(group)


def add_batch_arguments(group: argparse._ArgumentGroup) -> None:
    """How large a step may be."""
    group.add_argument("--max-num-seqs", type=count, default=64, metavar="N", help="most requests at once")
    group.add_argument(
        "--max-num-batched-tokens",
        type=count,
        metavar="N",
        help="token budget of a step; only a cap under slo, whose budget is time (default: 8192 where it is, "
        "512 under others with chunked prefill, else the longest request)",
    )


def model_name(args: argparse.Namespace) -> str:
    """Return the model that was asked for.

    Raises
    ------
    ConfigError : two different models were given.
    """
    if args.model and args.model_positional and args.model != args.model_positional:
        raise ConfigError(
            f"two models are given: {args.model_positional} and --model {args.model} (a --config file counts "
            "too); give one"
        )
    return str(args.model or args.model_positional or DEFAULT_MODEL)


def find_model(args: argparse.Namespace) -> ModelFiles:
    """Find or fetch the model that was asked for, with a progress bar.

    Raises
    ------
    ModelLoadError : it cannot be found.
    """
    from onbeat.cli.models import show_progress
    from onbeat.hub.resolve import resolve_model

    with show_progress() as progress:
        return resolve_model(
            model_name(args),
            revision=args.revision,
            needs_weights=args.load_format != "dummy",
            progress=progress,
        )


def bare_engine_config(args: argparse.Namespace, model: ModelFiles) -> EngineConfig:
    """Build from parsed flags what tells how steps are computed, and how large they may get."""
    return EngineConfig(
        model=model,
        dtype=args.dtype,
        device=args.device,
        load_format=args.load_format,
        quantization=args.quantization,
        backend=args.backend,
        seed=args.seed,
        threads=args.threads,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        block_size=args.block_size,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )


def engine_config(args: argparse.Namespace, model: ModelFiles) -> EngineConfig:
    """Build the engine's configuration from parsed flags."""
    return replace(
        bare_engine_config(args, model),
        tensor_parallel_size=args.tensor_parallel_size,
        step_time_profile=args.step_time_profile,
        policy=args.policy,
        scheduling_policy=args.scheduling_policy,
        enable_prefix_caching=args.enable_prefix_caching,
        async_scheduling=args.async_scheduling,
        speculative=args.speculative_config,
        slo_mode=args.slo_mode,
        shed_order=args.shed_order,
        max_num_queued_reqs=args.max_num_queued_reqs,
        max_num_queued_tokens=args.max_num_queued_tokens,
        max_queue_seconds=args.max_queue_seconds,
    )
