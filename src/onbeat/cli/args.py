"""A strict argument parser: one-line errors with a near match, `--config FILE`, dashes or underscores."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from onbeat.core.errors import ConfigError, quoted
from onbeat.core.hints import likely_meant
from onbeat.files import packaged, read

T = TypeVar("T")

FAILED, BAD_INPUT, INFEASIBLE, INTERRUPTED = 1, 2, 3, 130
"""Exit codes that several commands share."""
FOR_OTHERS = ("plan",)
"""Mappings of a configuration file that are not for the command: a plan's promise."""
JSON = "JSON"
"""Metavar of flags whose value is a JSON object: a configuration file may give them a mapping."""

PASSED_ON = "passed_on"
"""Default that commands set which pass on what stands behind `--`, as it is. In a configuration file the
group `vllm` has its flags."""


class Parser(argparse.ArgumentParser):
    """`ArgumentParser` without abbreviations, whose errors are one line on stderr and exit code 2."""

    def __init__(self, **options: Any) -> None:
        defaults: dict[str, Any] = {"allow_abbrev": False, "formatter_class": HelpFormatter}
        super().__init__(**(defaults | options))

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        found = super()._get_option_tuples(option_string)  # takes `-c` for the beginning of `-cc`, too
        return [each for each in found if option_string.startswith(each[1])]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, unknown_value_message(value, action.choices))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        # By identity: a default of 0 equals False, and is one to show.
        if default is None or default is False or default == argparse.SUPPRESS:
            return action.help
        if isinstance(default, (list, tuple)):
            return action.help
        return super()._get_help_string(action)


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Let a command take its flags from a YAML file too."""
    parser.add_argument(
        "--config", metavar="FILE.yaml", help="file whose keys are long flags; the command line wins over it"
    )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line strictly.

    Raises
    ------
    SystemExit : with code 2 and one line on stderr, for anything that is not understood.
    """
    own, passed_on = list(argv), None
    if "--" in own and find_command(parser, own).get_default(PASSED_ON) is not None:
        own, passed_on = own[: own.index("--")], own[own.index("--") + 1 :]
    arguments = [normalise(argument) for argument in own]
    command = find_command(parser, arguments)
    arguments = _with_repeated_flags(insert_config_file(arguments, command), command)
    namespace, unknown = parser.parse_known_args(arguments)
    if passed_on is not None:
        setattr(namespace, PASSED_ON, [*getattr(namespace, PASSED_ON), *passed_on])
    if unknown:
        command.error(unknown_argument_message(command, unknown[0]))
    return namespace


def _with_repeated_flags(arguments: list[str], command: argparse.ArgumentParser) -> list[str]:
    """Write `--flag a b` as `--flag a --flag b`, where `b` cannot be what the command is about.

    It cannot where the command is about nothing, or has been told already: in its first word, or by a flag.
    """
    repeatable, start = repeatable_flags(command), len(command.prog.split()) - 1
    abouts = [action for action in command._actions if not action.option_strings]
    is_told = arguments[start : start + 1] and not arguments[start].startswith("-")
    flags = {argument.partition("=")[0] for argument in arguments[start:]}
    if abouts and not is_told and f"--{str(abouts[0].metavar).lower()}" not in flags:
        return arguments
    expanded: list[str] = []
    flag = ""
    for argument in arguments:
        if argument.startswith("-"):
            flag = argument if argument in repeatable else ""
        elif flag and expanded[-1] != flag:
            expanded.append(flag)
        expanded.append(argument)
    return expanded


def normalise(argument: str) -> str:
    """Spell a long flag with dashes: `--max_model_len=8` is `--max-model-len=8`."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value


def repeatable_flags(parser: argparse.ArgumentParser) -> frozenset[str]:
    """Return the flags of a command that are given again for each further value."""
    # argparse has no public name for the kind of action
    kinds = {flag: type(action).__name__ for flag, action in parser._option_string_actions.items()}
    return frozenset(flag for flag, kind in kinds.items() if kind == "_AppendAction")


def insert_config_file(arguments: list[str], command: argparse.ArgumentParser) -> list[str]:
    """Replace `--config FILE` by the flags in the file, put before the others so that those win.

    Raises
    ------
    ConfigError : the file cannot be used, or two are given.
    """
    found = [index for index, argument in enumerate(arguments) if argument.partition("=")[0] == "--config"]
    if not found:
        return arguments
    if len(found) > 1:
        raise ConfigError("--config is given more than once; put all flags in one file")
    index = found[0]
    _, equals, path = arguments[index].partition("=")
    if not equals and index + 1 == len(arguments):
        return arguments  # argparse says that the value is missing
    path = path if equals else arguments[index + 1]
    rest = arguments[:index] + arguments[index + (1 if equals else 2) :]
    words = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
    given = {word.partition("=")[0] for word in rest}
    return rest[:words] + read_config_flags(Path(path), command, given) + rest[words:]


def read_config_flags(path: Path, command: argparse.ArgumentParser, given: Collection[str]) -> list[str]:
    """Turn a YAML mapping into flags.

    Parameters
    ----------
    command : has the flags: some take a mapping, which is written as JSON, some a value each time.
    given : flags of the command line. Of those that add up it has the only values.

    Raises
    ------
    ConfigError : the file cannot be read, is no mapping of flags, or gives one a value that no flag takes.
    """
    content = read(Any, path, "the configuration file")
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a mapping of flags to values, such as 'max-model-len: 4096'")
    flags: list[str] = []
    taking_json = [flag for flag, action in command._option_string_actions.items() if action.metavar == JSON]
    repeatable = repeatable_flags(command)
    if command.get_default(PASSED_ON) is not None and isinstance(content.get("vllm"), dict):
        command.set_defaults(**{PASSED_ON: _as_written(content.pop("vllm"), f"{path}: 'vllm'")})
    for key, value in _ungrouped(content, command):
        flag = "--" + str(key).replace("_", "-")
        if flag == "--config":
            raise ConfigError(f"{path}: a configuration file cannot name another ({key!r})")
        if flag in repeatable and flag in given:
            continue
        _check_kind(f"{path}: {key!r}", value, command._option_string_actions.get(flag))
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list) and not any(isinstance(item, (list, dict)) for item in value):
            is_repeated = flag in repeatable
            flags += [f"{flag}={item}" for item in value] if is_repeated else [flag, *map(str, value)]
        elif isinstance(value, dict) and flag in taking_json:
            flags.append(f"{flag}={_as_json(value, f'{path}: {key!r}')}")
        elif isinstance(value, (list, dict)) or value is None:
            takes = "a mapping or its JSON" if flag in taking_json else "a plain value or a list of them"
            raise ConfigError(f"{path}: {key!r} is {quoted(value)}; this flag takes {takes}")
        else:
            flags.append(f"{flag}={value}")
    return flags


def _check_kind(what: str, value: object, action: argparse.Action | None) -> None:
    """Raise ConfigError where a value from a file is of a kind that its flag cannot take."""
    takes = ""
    if action is None or action.metavar == JSON:
        return
    if action.nargs == 0 and not isinstance(value, bool):
        takes = "true or false"
    elif action.nargs is None and isinstance(value, bool):
        takes = "a word or number; quote what YAML reads as true or false, such as 'off'"
    elif action.nargs is None and isinstance(value, list) and type(action).__name__ != "_AppendAction":
        takes = "one value, not a list"
    if takes:
        raise ConfigError(f"{what} is {quoted(value)}; this flag takes {takes}")


def _ungrouped(content: Mapping[Any, Any], command: argparse.ArgumentParser) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and values of a file, those of its groups as well: `fleet: {replicas: 2}`."""
    for name, value in content.items():
        flag = "--" + str(name).replace("_", "-")
        if not isinstance(value, dict) or flag in command._option_string_actions:
            yield name, value
        elif name not in FOR_OTHERS:
            yield from value.items()


def _as_written(flags: Mapping[Any, Any], what: str) -> list[str]:
    """Return flags as they are written on a command line."""
    words: list[str] = []
    for key, value in flags.items():
        name = str(key).replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        else:
            words.append(f"--{name}={_as_json(value, what) if isinstance(value, dict) else value}")
    return words


def _as_json(mapping: dict[Any, Any], what: str) -> str:
    try:
        return json.dumps(mapping)
    except TypeError as error:  # YAML knows dates and sets
        raise ConfigError(
            f"{what} is {quoted(mapping)}; its values must be texts, numbers or booleans"
        ) from error


def find_command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the innermost sub-command that the arguments name."""
    for action in parser._subparsers._group_actions if parser._subparsers else ():
        choices: dict[str, argparse.ArgumentParser] = dict(action.choices or {})
        for index, argument in enumerate(arguments):
            if argument in choices:
                return find_command(choices[argument], arguments[index + 1 :])
    return parser


def unknown_argument_message(parser: argparse.ArgumentParser, argument: str) -> str:
    """Say what was not understood, and what was probably meant."""
    flag = argument.partition("=")[0]
    if not flag.startswith("-"):
        return f"unexpected argument {argument!r}"
    flags = parser._option_string_actions
    shown = [name[2:] for name in flags if name.startswith("--") and flags[name].help != argparse.SUPPRESS]
    near = packaged(dict[str, str], "onbeat.cli", "other_names.yaml").get(flag.lstrip("-"))
    near = near if near in shown else likely_meant(flag.lstrip("-"), shown)
    return f"unknown flag {flag}" + (f"; did you mean --{near}?" if near else "")


def unknown_value_message(value: object, known: Iterable[object]) -> str:
    """Say which values there are, and which was probably meant."""
    names = [str(name) for name in known]
    near = likely_meant(str(value).lower(), names)
    return f"invalid choice: {value!r}; " + (
        f"did you mean {near}?" if near else f"choose one of {', '.join(names)}"
    )


def checked(convert: Callable[[str], T], what: str) -> Callable[[str], T]:
    """Give an argparse type a readable error: 'expected WHAT, got VALUE'."""

    def read(text: str) -> T:
        try:
            return convert(text)
        except (ValueError, OverflowError) as error:
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}") from error

    return read


def _whole(least: int, text: str) -> int:
    value = _count(text)
    if value < least:
        raise ValueError(text)
    return value


natural = checked(partial(_whole, 0), "a whole number of at least 0")
positive = checked(partial(_whole, 1), "a whole number of at least 1")
"""Argparse types."""

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _count(text: str) -> int:
    text = text.strip()
    for suffix in ("iB", "B"):
        text = text.removesuffix(suffix) if text[-len(suffix) - 1 : -len(suffix)] in _SUFFIXES else text
    if text[-1:] in _SUFFIXES:
        return int(float(text[:-1]) * _SUFFIXES[text[-1]])
    return int(text)


count = checked(_count, "a whole number such as 4096, 32k (32,000) or 4G (4 x 2^30)")
"""Argparse type: an integer, with vLLM's suffixes (k, m, g decimal; K, M, G, T binary)."""


def server_root(url: str) -> str:
    """Return a server's address from what a person gives for it: a host and port, or one of its URLs.

    Raises
    ------
    ConfigError : it is no address.
    """
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is no address of a server; give one such as http://127.0.0.1:8000")
    return full.rstrip("/").removesuffix("/state").removesuffix("/metrics").removesuffix("/v1").rstrip("/")


def print_error(message: str) -> None:
    """Say what is wrong in one line on stderr."""
    print(f"onbeat: error: {' '.join(message.split())}", file=sys.stderr)
