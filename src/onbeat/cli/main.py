"""The `onbeat` command: finds the sub-command, and turns errors into one line and an exit code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from onbeat import __version__
from onbeat.cli.args import Parser, parse, print_error
from onbeat.core.errors import ConfigError, OnbeatError, RequestRejected

COMMANDS = {
    "serve": "onbeat.cli.serve",
    "top": "onbeat.cli.top",
    "bench": "onbeat.cli.bench",
    "simulate": "onbeat.cli.simulate",
    "profile": "onbeat.cli.profile",
    "capacity": "onbeat.cli.capacity",
    "plan": "onbeat.cli.plan",
    "replay": "onbeat.cli.replay",
    "models": "onbeat.cli.models",
}

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INFEASIBLE = 3
EXIT_INTERRUPTED = 130


def build_parser() -> Parser:
    """Return the parser with every sub-command."""
    parser = Parser(prog="onbeat", description="Serve large language models to a latency objective.")
    parser.add_argument("--version", action="version", version=f"onbeat {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, module_name in COMMANDS.items():
        module = _load(module_name)
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 done, 1 failed, 2 bad input, 3 infeasible or 130 interrupted."""
    try:
        args = parse(build_parser(), sys.argv[1:] if argv is None else argv)
        return int(args.run(args))
    except OnbeatError as error:
        print_error(str(error))
        return EXIT_BAD_INPUT if isinstance(error, (ConfigError, RequestRejected)) else EXIT_FAILED
    except KeyboardInterrupt:
        print("onbeat: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return 0


def _load(name: str) -> ModuleType:
    return importlib.import_module(name)


if __name__ == "__main__":
    sys.exit(main())
