"""The `onbeat` command: finds the sub-command, and turns errors into one line and an exit code."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import NamedTuple

from onbeat.cli.args import BAD_INPUT, FAILED, INFEASIBLE, INTERRUPTED, Parser, parse, print_error
from onbeat.core.errors import ConfigError, DoesNotFit, OnbeatError, RequestRejected
from onbeat.output import unblocked_output
from onbeat.version import __version__


class Command(NamedTuple):
    """What `--help` says of a sub-command, and the module with its `add_arguments` and `run`."""

    module: str
    help: str


COMMANDS = {
    "serve": Command("onbeat.cli.serve", "serve a model behind an OpenAI-compatible API"),
    "top": Command("onbeat.cli.top", "watch a running server: queues, classes, steps and plans"),
    "bench": Command("onbeat.cli.bench", "load any OpenAI-compatible server and report its latency"),
    "simulate": Command("onbeat.cli.simulate", "run the scheduler on virtual hardware under a virtual clock"),
    "profile": Command(
        "onbeat.cli.profile", "measure a model's step times on this machine, and fit what predicts them"
    ),
    "capacity": Command(
        "onbeat.cli.capacity", "find the highest request rate that keeps an objective, without the hardware"
    ),
    "plan": Command(
        "onbeat.cli.plan", "find the cheapest fleet of GPUs that keeps an objective, without the hardware"
    ),
    "replay": Command(
        "onbeat.cli.replay", "repeat a recorded run's decisions, and compare its latencies with a simulation"
    ),
    "vllm": Command("onbeat.cli.vllm", "serve with vLLM under onbeat's scheduler, or record such a server"),
    "models": Command("onbeat.cli.models", "list the models that onbeat knows by name, or fetch one"),
}

SEARCHES = frozenset({"capacity", "plan"})
"""Commands whose answer may be that nothing of what was named will do."""


def build_parser(argv: Collection[str] = tuple(COMMANDS)) -> Parser:
    """Return the parser of the program.

    Parameters
    ----------
    argv : the command line, or names of sub-commands. Only those that it names get their flags: the modules
        of all take a second to import.
    """
    parser = Parser(prog="onbeat", description="Serve large language models to a latency objective.")
    parser.add_argument("--version", action="version", version=f"onbeat {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, (module_name, help_text) in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        if name in argv:
            module = _load(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 done, 1 failed, 2 bad input, 3 infeasible or 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    with ExitStack() as stack:
        try:
            args = parse(build_parser(argv), argv)
            if args.command == "serve":  # what others print is what they are run for, and may wait
                args.output = stack.enter_context(ExitStack())
                args.output.enter_context(unblocked_output())
            code = int(args.run(args))
            print(end="", flush=True)  # the exit would complain of a reader that has had enough
        except OnbeatError as error:
            if isinstance(error, DoesNotFit) and args.command in SEARCHES:
                print(f"INFEASIBLE: {error}", flush=True)
                return INFEASIBLE
            print_error(str(error))
            return BAD_INPUT if isinstance(error, (ConfigError, RequestRejected)) else FAILED
        except KeyboardInterrupt:
            print("onbeat: interrupted", file=sys.stderr)
            return INTERRUPTED
        except OSError as error:
            if error.errno not in {errno.EPIPE, errno.ENOSPC}:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the exit would fail on it again
            if error.errno == errno.EPIPE:
                return 0
            print_error(f"cannot write on: {error.strerror}; make room, or write to another place")
            return FAILED
        else:
            return code


def _load(name: str) -> ModuleType:
    return importlib.import_module(name)


if __name__ == "__main__":
    sys.exit(main())
