"""vLLM's flags that ask for nothing here: a command line from one of its guides starts this server too.

Each is taken with a line that says why it changes nothing. A value that would ask for something is refused,
and so are the flags of what onbeat lacks; both with the reason.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from onbeat.cli.args import JSON

_Values = Mapping[str, tuple[str | None, str]]
NO_MEDIA = "no-media"


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag that this server can do without."""

    flags: str
    """Parted by spaces."""
    why: str
    """Why it changes nothing, or what does its work."""
    takes: int | str | None = None
    """As `nargs` of argparse: 0 for a switch, None for one value, `?` for one that may be missing."""
    values: Sequence[str] = ()
    """The values that ask for nothing; empty where all do. `no-media`: limits of 0, as JSON or `image=0`."""
    refusal: str = ""
    """What to say of the `--no-` form of a switch; without, it is taken."""
    json: bool = False
    """Whether a configuration file may give a mapping."""

    def asks_for_nothing(self, value: str) -> bool:
        """Whether a value is one of those that change nothing."""
        if self.values == NO_MEDIA:
            return _limits_nothing(value)
        return not self.values or value in self.values


def _limits_nothing(text: str) -> bool:
    """Return whether limits of parts that are no text, JSON or vLLM's older `image=0`, allow none."""
    try:
        limits = json.loads(text)
    except ValueError:
        limits = dict(part.partition("=")[::2] for part in text.split(","))
    return isinstance(limits, dict) and all(limit in (0, "0") for limit in limits.values())


@cache
def foreign_flags() -> tuple[tuple[ForeignFlag, ...], Mapping[str, str], Mapping[str, _Values]]:
    """Return what the package's table says of vLLM's flags.

    Returns
    -------
    Those that are ignored; why onbeat lacks others -> their names; flag of onbeat -> vLLM's words for
    its values, with what each stands for (None is the default) and what to say.
    """
    table = yaml.load(files("onbeat.cli").joinpath("vllm_flags.yaml").read_bytes(), yaml.CSafeLoader)
    return tuple(ForeignFlag(**entry) for entry in table["ignored"]), table["missing"], table["values"]


_LOG_FLAGS = {
    "--enable-log-requests": True,
    "--disable-log-requests": False,
    "--disable-uvicorn-access-log": False,
}
"""vLLM's names for `--log-requests`, and what they set it to."""


def take_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Let a command take them. Call it when all of its own flags are declared.

    Parameters
    ----------
    parser : of the command; `ignored` of what it parses is the list of lines to print, one a flag.
    """
    ignored: list[str] = []
    parser.set_defaults(ignored=ignored)
    taken, missing, renamed = foreign_flags()
    for flag in taken:
        _add(parser, flag, ignored)
    for why, names in missing.items():
        for name in names.split():
            parser.add_argument(name, action=_Refuse, nargs="*", const=why, help=argparse.SUPPRESS)
            if name.startswith("--"):
                parser.add_argument(
                    _off(name), action="store_const", dest="ignored", const=ignored, help=argparse.SUPPRESS
                )
    for name, values in renamed.items():
        action = parser._option_string_actions[name]
        action.type = _renamed(name, values, action.type, ignored)
    for name, is_on in _LOG_FLAGS.items():
        for spelling, value in ((name, is_on), (_off(name), not is_on)):
            parser.add_argument(
                spelling, dest="log_requests", action="store_const", const=value, help=argparse.SUPPRESS
            )


def _add(parser: argparse.ArgumentParser, flag: ForeignFlag, ignored: list[str]) -> None:
    names = flag.flags.split()
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": "ignored", "help": argparse.SUPPRESS}
    options |= {"action": _Ignore, "flag": flag, "lines": ignored}
    parser.add_argument(*names, nargs=flag.takes, metavar=JSON if flag.json else None, **options)
    if flag.takes == 0:
        parser.add_argument(*map(_off, names), nargs=0, **options)


def _off(name: str) -> str:
    return f"--no-{name.removeprefix('--')}"


class _Ignore(argparse.Action):
    """Writes down that a flag changes nothing."""

    def __init__(self, *args: Any, flag: ForeignFlag, lines: list[str], **options: Any) -> None:
        super().__init__(*args, **options)
        self._flag = flag
        self._lines = lines

    def __call__(self, _parser: Any, _namespace: Any, values: Any, option_string: str | None = None) -> None:
        flag, name = self._flag, option_string or self.option_strings[0]
        if isinstance(values, str) and not flag.asks_for_nothing(values):
            takes = "" if flag.values == NO_MEDIA else f"it takes {' or '.join(flag.values)}, "
            raise argparse.ArgumentError(self, f"{flag.why}; {takes}not {values!r}")
        if not name.startswith("--no-"):
            self._lines.append(f"ignored: {name} ({flag.why})")
        elif flag.refusal:
            raise argparse.ArgumentError(self, flag.refusal)


class _Refuse(argparse.Action):
    """Says why there is no such flag."""

    def __call__(self, *_: object) -> None:
        raise argparse.ArgumentError(self, f"{self.const}; leave it out")


def _renamed(flag: str, values: _Values, convert: Any, lines: list[str]) -> Callable[[str], Any]:
    """Return the type of a flag that also takes vLLM's words for some of its values."""

    def read(text: str) -> Any:
        if text not in values:
            return convert(text) if callable(convert) else text
        stands_for, why = values[text]
        lines.append(f"ignored: {flag} {text} ({why})")
        return stands_for

    return read
