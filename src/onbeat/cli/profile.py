"""`onbeat profile`: measure the step times of a model on this machine, fit a model to them, and test it.

What `onbeat profile` shows: how well the fit predicts, what typical steps reach, and a plot.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from onbeat.cli.args import INTERRUPTED, PASSED_ON, add_config_flag
from onbeat.cli.engine_args import add_model_arguments, find_model
from onbeat.cli.options import add_options, read_options
from onbeat.cli.outputs import check_writable, files_of, progress_bar, result_console
from onbeat.cli.profile_from import FromOptions, record, run_from, save_profile
from onbeat.cli.step_socket import is_address
from onbeat.core.errors import ConfigError, counted
from onbeat.core.extras import require
from onbeat.core.options import check, option, settings_of
from onbeat.core.step import BatchShape
from onbeat.engine.engine_config import EngineConfig
from onbeat.hub.files import ModelFiles
from onbeat.perfmodel.shapes import MeasuredStep
from onbeat.perfmodel.utilisation import StepOperations
from onbeat.report import plot
from onbeat.report.result import Column, Lines, Part, Plots, Result, Section, Table, show, write_page
from onbeat.report.units import exact_percent, whole_percent
from onbeat.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from onbeat.engine.loaded_model import LoadedModel
    from onbeat.engine.profiling.profiler import ProfileResult, ProfileSettings
    from onbeat.engine.start import ModelLoader


FIGURE_HEIGHT = 380
_ERRORS = tuple(
    Column(name, title, exact_percent)
    for name, title in zip(("p50", "p90", "p95", "mean"), ("P50", "P90", "P95", "mean"), strict=True)
)
ERROR_COLUMNS = (Column("steps", "steps", str), Column("number", "number"), *_ERRORS)
STEP_COLUMNS = (
    *(Column("step", "step", str), Column("measured_ms", "measured ms", "{:.1f}".format)),
    *(Column("predicted_ms", "predicted ms", "{:.1f}".format), Column("mbu", "MBU", whole_percent)),
    *(Column("mfu", "MFU", whole_percent),),
)


def profile_result(result: ProfileResult, files: Sequence[str] = ()) -> Result:
    """Return errors, typical steps and plots of a profile.

    Parameters
    ----------
    files : where it is, in sentences for a terminal.
    """
    errors = result.profile.fitted.errors
    tiles = [(f"error at {name.upper()}", f"{getattr(errors, name):.1%}") for name in ("p50", "p90", "p95")]
    plots = Plots([_scatter(result), _error_figure(result)], per_row=2)
    parts: list[Part] = [
        plots,
        Table("Errors", ERROR_COLUMNS, error_rows(result), key="errors"),
        Table("Typical steps", STEP_COLUMNS, typical_rows(result), key="steps"),
        Lines([limits_line(result)]),
    ]
    return Result(
        kind="profile",
        title="Step times",
        lead=_title(result),
        tiles=tiles,
        sections=[
            Section("", [Lines([_title(result)])], "terminal"),
            Section("", parts),
            Section("", [Lines(files)], "terminal"),
        ],
    )


def error_rows(result: ProfileResult) -> list[dict[str, Any]]:
    """Return the errors: of fitted steps, and of held-back ones, also by what they are made of."""
    from onbeat.perfmodel.fitted import FitErrors

    kinds = {
        "held back": list(result.held_back),
        "held back, to 100 ms": [step for step in result.held_back if step.seconds <= 0.1],
        "held back, above 100 ms": [step for step in result.held_back if step.seconds > 0.1],
        "held back, with drafts": [step for step in result.held_back if step.shape.num_draft_tokens],
        "fitted": list(result.fitted_steps),
    }
    rows = []
    for name, steps in kinds.items():
        if steps:
            predicted = result.target.predict(result.profile.fitted, steps)
            errors = FitErrors.of(predicted, [step.seconds for step in steps])
            rows.append({"steps": name, "number": len(steps), **asdict(errors)})
    return rows


def typical_rows(result: ProfileResult) -> list[dict[str, Any]]:
    """Return what some plain and some mixed steps took and reached."""
    operations = StepOperations(result.target.model, result.target.precision)
    device, dtype = result.target.device, result.target.precision.compute
    return [
        {
            "step": describe(step.shape),
            "measured_ms": step.seconds * 1e3,
            "predicted_ms": _predicted(result, [step], 1e3)[0],
            "mbu": operations.bytes_read(step.shape) / step.seconds / device.memory_bandwidth,
            "mfu": operations.flops(step.shape) / step.seconds / device.peak(dtype),
        }
        for step in _typical(result.fitted_steps)
    ]


def describe(shape: BatchShape) -> str:
    """Return a batch in words."""
    parts = []
    if shape.num_decodes:
        context = shape.decode_context_tokens // shape.num_decodes
        drafts = f" with {counted(shape.num_draft_tokens, 'draft', ',')}" if shape.num_draft_tokens else ""
        parts.append(f"{counted(shape.num_decodes, 'decode', ',')} at {context:,} tokens{drafts}")
    if shape.num_chunks:
        tokens = shape.num_chunk_tokens
        after = f" after {shape.chunk_cached_tokens:,}" if shape.chunk_cached_tokens else ""
        parts.append(f"{counted(shape.num_chunks, 'chunk', ',')} of {tokens:,} tokens{after}")
    return ", ".join(parts)


def limits_line(result: ProfileResult) -> str:
    """Return what MBU and MFU are shares of."""
    device = result.target.device
    origin = "measured" if result.profile.limits is not None else "data sheet"
    peak = device.peak(result.target.precision.compute)
    return (
        f"MBU and MFU are shares of {device.memory_bandwidth / 1e9:,.1f} GB/s and {peak / 1e9:,.0f} GFLOP/s "
        f"({origin}, {result.target.precision.compute})"
    )


def _title(result: ProfileResult) -> str:
    key = result.profile.key
    return (
        f"{key.model} on {key.device_name} ({key.threads} threads, {key.precision.compute}): "
        f"{len(result.profile.steps)} batches, fitted by {result.profile.fitted.method}"
    )


def _typical(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Return the least and the most of plain decodes, of one request and of many, of prompts and of mixes."""
    steps = [step for step in steps if not step.shape.num_draft_tokens]
    decodes = [step for step in steps if not step.shape.num_chunks]
    most = max((step.shape.num_decodes for step in decodes), default=0)
    groups = [[step for step in decodes if step.shape.num_decodes == number] for number in (1, most)]
    groups.append([step for step in steps if not step.shape.num_decodes])
    groups.append([step for step in steps if step.shape.num_chunks and step.shape.num_decodes])
    ends = [end(group, key=_work) for group in groups if group for end in (min, max)]
    return [step for index, step in enumerate(ends) if step not in ends[:index]]


def _work(step: MeasuredStep) -> int:
    return step.shape.query_key_pairs + step.shape.decode_context_tokens


def _scatter(result: ProfileResult) -> plot.Figure:
    times = [step.seconds * 1e3 for step in result.profile.steps]
    ends = [min(times), max(times)]
    data = [
        _points(name, colour, steps, [step.seconds * 1e3 for step in steps], _predicted(result, steps, 1e3))
        for name, colour, steps in _parts(result)
    ]
    data.append(plot.trace("exact", ends, ends, line={"dash": "dot", "color": plot.QUEUE_COLOUR}))
    scale = plot.log_scale(ends)
    axes = plot.axis("measured (ms)", **scale), plot.axis("predicted (ms)", **{**scale, "range": None})
    return plot.figure("Predicted against measured", data, *axes, height=FIGURE_HEIGHT)


def _parts(result: ProfileResult) -> tuple[tuple[str, str, Sequence[MeasuredStep]], ...]:
    """Return the steps that were fitted and those that were held back, each with a colour."""
    fitted = ("fitted", plot.STREAM_COLOUR, result.fitted_steps)
    return fitted, ("held back", plot.WAIT_COLOUR, result.held_back)


def _points(
    name: str, colour: str, steps: Sequence[MeasuredStep], x: Sequence[float], y: Sequence[float]
) -> plot.Trace:
    marker = {"color": colour, "size": 6, "opacity": 0.8}
    return plot.trace(name, x, y, "markers", text=[describe(step.shape) for step in steps], marker=marker)


def _error_figure(result: ProfileResult) -> plot.Figure:
    """Return how far off each step was, over its new tokens: a pattern is what the fit cannot express."""
    data = []
    for name, colour, steps in _parts(result):
        pairs = zip(_predicted(result, steps), steps, strict=True)
        errors = [100 * (seconds / step.seconds - 1) for seconds, step in pairs]
        data.append(_points(name, colour, steps, [step.shape.num_new_tokens for step in steps], errors))
    sizes = plot.log_scale([step.shape.num_new_tokens for step in result.profile.steps])
    axes = plot.axis("new tokens of the step", **sizes), plot.axis("predicted too much (%)", zeroline=True)
    return plot.figure("Error by size", data, *axes, height=FIGURE_HEIGHT)


def _predicted(result: ProfileResult, steps: Sequence[MeasuredStep], unit: float = 1.0) -> list[float]:
    if not steps:
        return []
    return [float(seconds) * unit for seconds in result.target.predict(result.profile.fitted, steps)]


RECORD = "record"
"""In place of a model."""
_WHAT_STEPS_DEPEND_ON = (
    *("load_format", "dtype", "quantization", "activation_quantization", "seed", "device", "backend"),
    *("instruction_set", "batch_invariant", "threads", "enforce_eager", "cuda_graph_pieces"),
    *("kv_cache_memory_bytes", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    "kv_cache_dtype",
)
"""Settings of the engine: how steps are computed, and how large they may get."""


_option = partial(option, group="profile")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How steps are measured, and where the profile goes."""

    output: Path | None = _option(
        None,
        metavar="FILE",
        help="where the profile goes (default: the cache, where `onbeat serve` finds it)",
    )
    report: Path | None = _option(
        None, metavar="FILE.html", help="where the plot goes (default: beside the profile)"
    )
    seconds: float = _option(
        80.0, above=0, metavar="S", help="time for running batches, or for listening to an engine"
    )
    max_context_tokens: int = _option(
        2**15, metavar="N", help="largest context of a measured batch, over all its requests"
    )
    quiet: bool = _option(default=False, is_switch=True, help="no progress bar")

    def __post_init__(self) -> None:
        check(self, ProfileOptions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    parser.set_defaults(**{PASSED_ON: []})
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
    add_options(parser, ProfileOptions)


def run(args: argparse.Namespace) -> int:
    """Profile; return the exit code."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=args.quiet)
    check_writable(args, files_of(read_options(args, ProfileOptions)))  # before minutes are spent
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
        _refuse(args, "--from", but=("device",), seconds=is_file and args.seconds != ProfileOptions().seconds)
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
    check_writable(args, {"FILE": Path(path)})
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
    given |= {"report": args.report, "revision": args.revision, "": args.passed_on}  # behind `--`
    given["max_context_tokens"] = args.max_context_tokens != ProfileOptions().max_context_tokens
    for name, is_given in given.items():
        if is_given:
            flag = "--" + name.strip("_").replace("_", "-")
            raise ConfigError(f"{flag} has no effect on {what}, which measures no steps here; leave it out")


def measured_engine(args: argparse.Namespace, model: ModelFiles) -> EngineConfig:
    """Return the engine to measure; --tensor-parallel-size is that of another engine, of --from."""
    passed_on = tuple(args.passed_on)
    return read_options(args, EngineConfig, model=model, tensor_parallel_size=1, vllm_arguments=passed_on)


def measured_loader(config: EngineConfig) -> ModelLoader:
    """Return what loads it, with room for the drafts that are measured where the model keeps states."""
    from onbeat.engine.backends.base import CheckpointBackend
    from onbeat.engine.profiling.batches import MAX_DRAFTS
    from onbeat.engine.start import prepare

    loader = prepare(config)
    if not (isinstance(loader.backend, CheckpointBackend) and loader.backend.model.state_numbers):
        return loader
    drafts = SpeculativeConfig(method="grammar", num_speculative_tokens=MAX_DRAFTS)
    return replace(prepare(replace(config, speculative=drafts)), proposer=None)


def _measure(args: argparse.Namespace, console: Console) -> ProfileResult:
    from onbeat.engine.profiling.profiler import FULL, profile_model

    loader = measured_loader(measured_engine(args, find_model(args)))
    loaded = loader.load(lambda text: console.print(text, markup=False))
    settings = replace(FULL, seconds=args.seconds, max_context_tokens=args.max_context_tokens)
    with progress_bar(console, refresh_per_second=1) as bar:
        task = bar.add_task("measuring steps, %", total=100, note="")
        result = profile_model(loaded, settings, lambda share: bar.update(task, completed=100 * share))
        bar.update(task, completed=100, description="measured and fitted")
    _say_what_was_cut(loaded, settings, result, console)
    return result


def _say_what_was_cut(
    loaded: LoadedModel, settings: ProfileSettings, result: ProfileResult, console: Console
) -> None:
    from onbeat.engine.profiling.batches import BatchLimits
    from onbeat.engine.profiling.profiler import MIN_RUNS

    in_cache = loaded.limits.num_blocks * loaded.limits.block_size
    measured = BatchLimits.of_scheduler(
        loaded.limits,
        max_context_tokens=settings.max_context_tokens,
        device_type=loaded.backend.device.device.type,
    )
    if in_cache > settings.max_context_tokens or measured.max_num_seqs < loaded.limits.max_num_seqs:
        console.print(
            f"batches had up to {measured.max_num_seqs} requests of {loaded.limits.max_num_seqs} and "
            f"{settings.max_context_tokens:,} tokens of context, and the KV cache holds {in_cache:,} "
            "(--max-context-tokens and --kv-cache-memory-bytes measure further)",
            markup=False,
        )
    if result.runs_per_batch < MIN_RUNS:
        console.print(
            f"each batch ran {result.runs_per_batch:.1f} times only, which leaves disturbances in: the "
            "machine is slow or busy; give --seconds more",
            markup=False,
        )


def _finish(args: argparse.Namespace, result: ProfileResult) -> int:
    path = save_profile(result.profile, args.output)
    report = args.report or path.with_suffix(".html")
    shown = profile_result(result, [f"profile: {path}", f"plot: {report}"])
    write_page(shown, report)
    show(shown, result_console())
    return 0
