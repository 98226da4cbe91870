"""`onbeat profile`: measure the step times of a model on this machine, fit a model to them, and test it."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from onbeat.cli.args import INTERRUPTED, add_config_flag, count
from onbeat.cli.engine_args import add_model_arguments, find_model
from onbeat.cli.options import add_options, read_options
from onbeat.cli.outputs import check_writable, result_console
from onbeat.cli.profile_from import FromOptions, record, run_from
from onbeat.cli.step_socket import is_address
from onbeat.core.errors import ConfigError
from onbeat.core.extras import require
from onbeat.core.options import settings_of
from onbeat.engine.engine_config import EngineConfig
from onbeat.hub.files import ModelFiles

if TYPE_CHECKING:
    from onbeat.engine.loaded_model import LoadedModel
    from onbeat.engine.profiling.profiler import ProfileResult, ProfileSettings


RECORD = "record"
"""In place of a model."""
SECONDS, MOST_CONTEXT_TOKENS = 80.0, 2**15
"""Of a measurement, where nothing else is asked for."""
_WHAT_STEPS_DEPEND_ON = (
    *("load_format", "dtype", "quantization", "activation_quantization", "seed", "device", "backend"),
    *("instruction_set", "batch_invariant", "threads", "enforce_eager", "cuda_graph_pieces"),
    *("kv_cache_memory_bytes", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
)
"""Settings of the engine: how steps are computed, and how large they may get."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    add_config_flag(parser)
    add_model_arguments(parser)
    add_options(parser, EngineConfig, only=_WHAT_STEPS_DEPEND_ON)
    add_options(parser, FromOptions)
    parser.add_argument(
        "recorded",
        nargs="*",
        metavar="SOURCE FILE",
        help="with `onbeat profile record SOURCE FILE`: record only",
    )
    group = parser.add_argument_group("profile")
    group.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where the profile goes (default: the cache, where `onbeat serve` finds it)",
    )
    group.add_argument(
        "--report", type=Path, metavar="FILE.html", help="where the plot goes (default: beside the profile)"
    )
    group.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        metavar="S",
        help="time for running batches, or for listening to an engine",
    )
    group.add_argument(
        "--max-context-tokens",
        type=count,
        default=MOST_CONTEXT_TOKENS,
        metavar="N",
        help="largest context of a measured batch, over all its requests",
    )
    group.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Profile; return the exit code."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=args.quiet)
    if not args.seconds > 0:
        raise ConfigError(f"--seconds is {args.seconds:g}; it must be above 0")
    check_writable({"--output": args.output, "--report": args.report})  # before minutes are spent
    options = read_options(args, FromOptions)
    if args.model_positional == RECORD:
        _refuse(args, "`onbeat profile record`", from_=options.source, output=args.output, model=args.model)
        return _record(args, console)
    if args.recorded:
        raise ConfigError(
            f"unknown argument {args.recorded[0]!r}; `onbeat profile record SOURCE FILE` takes two"
        )
    require("scipy", extra="plan", purpose="onbeat profile")
    if options.source is not None:
        is_file = not is_address(options.source)
        _refuse(args, "--from", but=("device",), seconds=is_file and args.seconds != SECONDS)
        return run_from(args, options, console)
    try:
        result = _measure(args, console)
        return _finish(args, result)
    except KeyboardInterrupt:
        Console(stderr=True, highlight=False).print("interrupted: no profile was written")
        return INTERRUPTED


def _record(args: argparse.Namespace, console: Console) -> int:
    if len(args.recorded) != 2:
        raise ConfigError(
            f"`onbeat profile record` takes a source and a file, such as tcp://127.0.0.1:20380 steps.jsonl; "
            f"got {len(args.recorded)} arguments"
        )
    source, path = args.recorded
    check_writable({"FILE": Path(path)})
    return record(source, Path(path), seconds=args.seconds, console=console)


def _refuse(args: argparse.Namespace, what: str, *, but: Collection[str] = (), **given: Any) -> None:
    """Refuse flags that have no effect on steps of another engine: those that say how steps are measured.

    Parameters
    ----------
    what : has no use for them.
    but : flags that it takes all the same.
    given : further flags, and whether they are given.
    """
    for each in settings_of(EngineConfig):
        if each.name in _WHAT_STEPS_DEPEND_ON and each.name not in but:
            given[each.key] = getattr(args, each.key) != each.default
    given |= {"report": args.report, "revision": args.revision}
    given["max_context_tokens"] = args.max_context_tokens != MOST_CONTEXT_TOKENS
    for name, is_given in given.items():
        if is_given:
            flag = "--" + name.strip("_").replace("_", "-")
            raise ConfigError(f"{flag} has no effect on {what}, which measures no steps here; leave it out")


def measured_engine(args: argparse.Namespace, model: ModelFiles) -> EngineConfig:
    """Return the engine to measure; --tensor-parallel-size is that of another engine, of --from."""
    return read_options(args, EngineConfig, model=model, tensor_parallel_size=1)


def _measure(args: argparse.Namespace, console: Console) -> ProfileResult:
    from onbeat.engine.profiling.profiler import FULL, profile_model
    from onbeat.engine.start import prepare

    loaded = prepare(measured_engine(args, find_model(args))).load(
        lambda text: console.print(text, markup=False)
    )
    _say_what_sets_give(loaded, console)
    settings = replace(FULL, seconds=args.seconds, max_context_tokens=args.max_context_tokens)
    with _progress_bar(console) as bar:
        task = bar.add_task("measuring steps", total=1.0)
        result = profile_model(loaded, settings, lambda share: bar.update(task, completed=share))
        bar.update(task, completed=1.0, description="measured and fitted")
    _say_what_was_cut(loaded, settings, result, console)
    return result


def _progress_bar(console: Console) -> Progress:
    # Drawing takes time from the steps that are measured.
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=1,
    )


def _say_what_sets_give(loaded: LoadedModel, console: Console) -> None:
    """Say what each instruction set takes for a few steps, also beside one that was asked for."""
    from onbeat.engine.native.forward import NativeForward, NativeModel
    from onbeat.engine.native.instruction_sets import time_all_sets

    forward = loaded.runner.forward
    if not isinstance(forward, NativeForward):
        return
    model = NativeModel(forward.library, forward.config, forward.weights, forward.options)
    kinds, times = time_all_sets(model)
    console.print(f"ms by instruction set: {' / '.join(kind.title for kind in kinds)}", markup=False)
    for name, seconds in times.items():
        numbers = " / ".join(f"{1000 * value:.2f}" for value in seconds)
        taken = " (taken)" if name == forward.instruction_set else ""
        console.print(f"  {name}{taken}: {numbers}", markup=False)


def _say_what_was_cut(
    loaded: LoadedModel, settings: ProfileSettings, result: ProfileResult, console: Console
) -> None:
    from onbeat.engine.profiling.batches import BatchLimits
    from onbeat.engine.profiling.profiler import MIN_RUNS

    in_cache = loaded.limits.num_blocks * loaded.limits.block_size
    if in_cache > settings.max_context_tokens:
        console.print(
            f"batches had up to {settings.max_context_tokens:,} tokens of context; the KV cache holds "
            f"{in_cache:,} (--max-context-tokens measures further)",
            markup=False,
        )
    measured = BatchLimits.of_scheduler(
        loaded.limits,
        max_context_tokens=settings.max_context_tokens,
        device_type=loaded.backend.device.device.type,
    )
    if measured.max_num_seqs < loaded.limits.max_num_seqs:
        console.print(
            f"batches had up to {measured.max_num_seqs} requests of {loaded.limits.max_num_seqs}, as the KV "
            f"cache holds {in_cache:,} tokens (more --kv-cache-memory-bytes measures further)",
            markup=False,
        )
    if result.runs_per_batch < MIN_RUNS:
        console.print(
            f"each batch ran {result.runs_per_batch:.1f} times only, which leaves disturbances in: the "
            "machine is slow or busy; give --seconds more",
            markup=False,
        )


def _finish(args: argparse.Namespace, result: ProfileResult) -> int:
    from onbeat.cli.profile_output import profile_result
    from onbeat.perfmodel.profile_file import profile_path, profiles_dir, write_profile
    from onbeat.report.page import write_page
    from onbeat.report.result import show

    path = args.output or profile_path(profiles_dir(), result.profile.key)
    try:
        write_profile(path, result.profile)
    except OSError as error:
        raise ConfigError(f"cannot write the profile {path}: {error.strerror}; give --output FILE") from error
    report = args.report or path.with_suffix(".html")
    shown = profile_result(result, [f"profile: {path}", f"plot: {report}"])
    write_page(shown, report)
    show(shown, result_console())
    return 0
