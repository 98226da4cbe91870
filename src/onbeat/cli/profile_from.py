"""`onbeat profile --from SOURCE`: a step-time profile of the steps of another engine."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from onbeat.cli.engine_args import model_name
from onbeat.cli.options import milliseconds
from onbeat.cli.outputs import result_console
from onbeat.cli.step_socket import is_address, record_steps
from onbeat.core.errors import ConfigError
from onbeat.core.options import changed, check, option
from onbeat.perfmodel import profile as profiles
from onbeat.perfmodel.device_spec import CPU, Parallelism, find_device
from onbeat.perfmodel.engines import ENGINES, find_engine
from onbeat.perfmodel.fitted import FitTarget, KindErrors, StreamFit, fit_stream
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.precision import BYTES, precision_by_weights
from onbeat.perfmodel.step_log import StepOrigin, StepStream, StepTimes, step_times
from onbeat.report.result import Column, Lines, Result, Section, Table, show
from onbeat.report.units import exact_percent
from onbeat.simulator.replay.model import read_steps

_recorded = partial(option, group="steps of another engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class FromOptions:
    """Whose steps are read. What is None is as the source says."""

    source: str | None = _recorded(
        None,
        flag="--from",
        metavar="SOURCE",
        help="fit recorded steps in place of measuring; FILE: steps of any engine (FILE.csv: a table of "
        "them); tcp://HOST:PORT: an engine that sends forward-pass metrics, for --seconds",
    )
    weights: str | None = _recorded(
        None,
        choices=tuple(BYTES),
        help="weight format of the recorded engine (default: as recorded, else bf16)",
    )
    tensor_parallel: int | None = _recorded(
        None,
        flag="--tensor-parallel-size",
        aliases=("--tp",),
        at_least=1,
        metavar="N",
        help="devices that share each layer of the recorded engine (default: 1)",
    )
    engine: str | None = _recorded(
        None, metavar="NAME", help="the recorded engine, such as vllm, sglang (default: as recorded)"
    )
    engine_version: str | None = _recorded(
        None, metavar="VERSION", help="version of that engine (default: as recorded)"
    )
    steps_ahead: int | None = _recorded(
        None,
        at_least=0,
        at_most=1,
        metavar="N",
        help="1 if that engine plans steps ahead (default: by --engine)",
    )
    request_overhead: float | None = _recorded(
        None,
        flag="--request-overhead-ms",
        unit="ms",
        parse=milliseconds,
        at_least=0,
        metavar="MS",
        help="server time of each first token beside steps (default: 0)",
    )

    def __post_init__(self) -> None:
        check(self, FromOptions)
        given = list(changed(self))
        if given and self.source is None:
            raise ConfigError(
                f"{given[0].flag} describes recorded steps; give --from SOURCE too, or leave it out"
            )


def run_from(args: argparse.Namespace, options: FromOptions, console: Console) -> int:
    """Fit recorded steps, write the profile and show how good it is."""
    stream = _read(args, options, console)
    timed = step_times(stream.steps)
    model, device = _named(args, options, stream.origin)
    key, target = _target(model, device, options, stream.origin)
    found = fit_stream(target, timed.steps)
    profile = _profile(key, target, options, stream, timed, found)
    path = save_profile(profile, args.output)
    show(_result(profile, stream, timed, found), result_console())
    print(f"profile: {path}")
    print(f"use it: --step-time fitted --profile {path} --model {model} --device {device}")
    return 0


def save_profile(profile: profiles.Profile, output: Path | None) -> Path:
    """Write a profile to a file, by default where `onbeat serve` finds it; return the file.

    Raises
    ------
    ConfigError : it cannot be written.
    """
    path = output or profiles.profile_path(profiles.profiles_dir(), profile.key)
    try:
        profiles.write_profile(path, profile)
    except OSError as error:
        raise ConfigError(f"cannot write the profile {path}: {error.strerror}; give --output FILE") from error
    return path


def record(source: str, path: Path, *, seconds: float, console: Console) -> int:
    """Record the steps of a running engine to a file."""
    if not is_address(source):
        raise ConfigError(f"cannot record from {source!r}; give tcp://HOST:PORT or ipc://PATH of an engine")
    with console.status(f"listening to {source}") as status:
        num_steps = record_steps(
            source, path, seconds=seconds, on_step=lambda num: status.update(f"{num:,} steps")
        )
    console.print(f"{num_steps:,} steps of {source}: {path}", markup=False)
    return 0


def _read(args: argparse.Namespace, options: FromOptions, console: Console) -> StepStream:
    assert options.source is not None
    if not is_address(options.source):
        return read_steps(Path(options.source))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        record(options.source, path, seconds=args.seconds, console=console)
        return read_steps(path)


def _named(args: argparse.Namespace, options: FromOptions, origin: StepOrigin) -> tuple[str, str]:
    """Return the model and the device, as flags or the source name them."""
    is_named = args.model or args.model_positional
    model = model_name(args) if is_named else origin.model
    device = origin.device if args.device == "auto" else args.device
    for name, value, form in (("model", model, "--model NAME"), ("device", device, "--device ID")):
        if value is None:
            raise ConfigError(f"{options.source} does not name the {name} of its steps; give {form}")
    assert model is not None
    assert device is not None
    return model, device


def _target(
    model: str, device: str, options: FromOptions, origin: StepOrigin
) -> tuple[profiles.ProfileKey, FitTarget]:
    spec, where = find_model_spec(model), find_device(device)
    precision = precision_by_weights(options.weights or origin.dtype or "bf16")
    parallelism = Parallelism(tensor=options.tensor_parallel or 1)
    key = profiles.ProfileKey(
        model=spec.name,
        device=where.id,
        device_name=where.name,
        precision=precision,
        parallelism=parallelism,
        backend=options.engine or origin.engine or "unknown",
        engine_version=options.engine_version or origin.engine_version,
    )
    return key, FitTarget(model=spec, device=where, precision=precision, parallelism=parallelism)


def _profile(
    key: profiles.ProfileKey,
    target: FitTarget,
    options: FromOptions,
    stream: StepStream,
    timed: StepTimes,
    found: StreamFit,
) -> profiles.Profile:
    limits = None
    if key.device == CPU:  # which has no data sheet: another start would measure others
        limits = profiles.MachineLimits(
            memory_bandwidth=target.device.memory_bandwidth,
            peak_flops=dict(target.device.peak_flops),
            product_rates=target.device.product_rates,
        )
    return profiles.Profile(
        key=key,
        steps=found.steps,
        fitted=found.fitted,
        server=profiles.ServerTerms(
            steps_ahead=_steps_ahead(key, options),
            request_seconds=options.request_overhead or 0.0,
        ),
        limits=limits,
        engine={"source": str(options.source), "num_recorded": len(stream.steps), "times": timed.basis},
    )


def _steps_ahead(key: profiles.ProfileKey, options: FromOptions) -> int:
    if options.steps_ahead is not None:
        return options.steps_ahead
    return find_engine(key.backend).steps_ahead if key.backend in ENGINES else 0


def _result(profile: profiles.Profile, stream: StepStream, timed: StepTimes, found: StreamFit) -> Result:
    key, fitted, server = profile.key, profile.fitted, profile.server
    version = f" {key.engine_version}" if key.engine_version else ""
    idle = f", {stream.num_heartbeats:,} heartbeats" if stream.num_heartbeats else ""
    lost = f", {stream.num_lost:,} steps lost" if stream.num_lost else ""
    about = [
        f"{key.model} ({key.precision.weights}) on {key.parallelism.num_devices} x {key.device_name}, "
        f"{key.backend}{version}: {len(stream.steps):,} steps{idle}{lost}",
        f"step times: {timed.basis}",
    ]
    if found.num_exceptions:
        about.append(f"left out of the fit: {found.num_exceptions:,} steps, 3 times off what is usual")
    beside = (
        f"beside steps: {1e3 * server.request_seconds:.1f} ms for each request; {server.steps_ahead} steps "
        "planned ahead"
    )
    table = error_table(f"Fitted by {fitted.method}: error on held-back steps", found.errors)
    lines = Lines([beside, f"steps seen: {fitted.shape_range.describe()}"])
    return Result(kind="profile", title=about[0], sections=[Section("", [Lines(about), table, lines])])


def error_table(title: str, errors: Sequence[KindErrors]) -> Table:
    """Return errors by kind of step."""
    columns = (
        *(Column("kind", "steps", str), Column("num_steps", "number")),
        *(Column("p50", "median error", exact_percent), Column("p90", "P90", exact_percent)),
        Column("bias", "bias", "{:+.1%}".format),
    )
    return Table(title, columns, [asdict(each) for each in errors], key="errors")
