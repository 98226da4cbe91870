"""The `onbeat` command: finds the sub-command, and turns errors into one line and an exit code."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Collection, Sequence
from contextlib import ExitStack

from onbeat.cli.args import BAD_INPUT, FAILED, INFEASIBLE, INTERRUPTED, Parser, parse, print_error
from onbeat.core.errors import ConfigError, DoesNotFit, OnbeatError, RequestRejected
from onbeat.output import unblocked_output
from onbeat.version import __version__

COMMANDS = {
    "serve": "serve a model behind an OpenAI-compatible API",
    "top": "watch a running server: queues, classes, steps and plans",
    "bench": "load any OpenAI-compatible server and report its latency",
    "simulate": "run the scheduler on virtual hardware under a virtual clock",
    "profile": "measure a model's step times on this machine, and fit what predicts them",
    "capacity": "find the highest request rate that keeps an objective, without the hardware",
    "plan": "find the cheapest fleet of GPUs that keeps an objective, without the hardware",
    "replay": "repeat a recorded run's decisions, and compare its latencies with a simulation",
    "vllm": "serve with vLLM under onbeat's scheduler, or record such a server",
    "models": "list the models that onbeat knows by name, or fetch one",
}
"""What `--help` says of each sub-command. The module of that name has its `add_arguments` and `run`."""

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
    for name, help_text in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        if name in argv:
            module = importlib.import_module(f"onbeat.cli.{name}")
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
                for number in (signal.SIGUSR1, signal.SIGUSR2):
                    signal.signal(number, signal.SIG_IGN)  # in all that it starts, too
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


if __name__ == "__main__":
    sys.exit(main())
