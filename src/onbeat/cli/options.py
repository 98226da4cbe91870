"""Flags made from declared settings (`core.options`), and the settings read back from parsed flags."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection
from dataclasses import MISSING
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_args

from onbeat.cli.args import checked, count, unknown_value_message
from onbeat.core.options import Dataclass, Setting, make, settings_of

T = TypeVar("T", bound=Dataclass)

number = checked(float, "a number")
"""Argparse type: any float."""


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


milliseconds = checked(_finite, "milliseconds, such as 500")
"""Argparse type: milliseconds, as they are typed."""


def add_options(
    parser: argparse.ArgumentParser,
    kind: type[Any],
    *,
    only: Collection[str] | None = None,
) -> None:
    """Add the flags of the settings that a dataclass declares, each to its group.

    Parameters
    ----------
    only : fields to add; None adds all.
    """
    for setting in settings_of(kind):
        if setting.is_open and (only is None or setting.name in only):
            find_group(parser, setting.option.group).add_argument(
                setting.flag, *setting.option.aliases, **_arguments(setting)
            )


def find_group(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """Return the group of a title; make it where there is none."""
    for group in parser._action_groups:
        if group.title == title:
            return group
    return parser.add_argument_group(title)


def read_options(args: argparse.Namespace, kind: type[T], **others: Any) -> T:
    """Build a dataclass from the flags of its settings; those that the command lacks keep their defaults.

    Parameters
    ----------
    others : fields that are no flags, or that are read elsewhere.

    Raises
    ------
    ConfigError : a value that the dataclass refuses.
    """
    given = {
        setting.name: setting.inside(getattr(args, setting.key))
        for setting in settings_of(kind)
        if hasattr(args, setting.key)
    }
    return make(kind, **(given | others))


def read_value(setting: Setting, text: str) -> Any:
    """Return the value that a text means, as the setting's flag reads it.

    Raises
    ------
    argparse.ArgumentTypeError : it means none.
    """
    value = _converter(setting)(text)
    if setting.choices and value not in setting.choices:
        raise argparse.ArgumentTypeError(unknown_value_message(value, setting.choices))
    return setting.inside(value)


def _arguments(setting: Setting) -> dict[str, Any]:
    """Return what `add_argument` takes beside the flag."""
    option, default = setting.option, setting.default
    arguments: dict[str, Any] = {"help": option.help.replace("%", "%%")}
    if option.is_switch:
        return arguments | {"action": "store_true"}
    if setting.kinds == (bool,):
        return arguments | {"action": argparse.BooleanOptionalAction, "default": default}
    if setting.has_commas:
        default = ",".join(map(str, default)) or None
    elif setting.is_list:
        arguments |= {"action": "append"} if option.many == "append" else {"nargs": option.many}
        default = list(default)
    elif isinstance(default, Enum):
        default = default.value
    arguments |= {"required": True} if default is MISSING else {"default": default}
    arguments |= {"choices": setting.choices} if setting.choices else {"metavar": option.metavar}
    return arguments | {"type": _converter(setting)}


def _converter(setting: Setting) -> Callable[[str], Any]:
    convert = _converter_of_one(setting)
    if not setting.has_commas:
        return convert
    return lambda text: [convert(word.strip()) for word in text.split(",")]


def _converter_of_one(setting: Setting) -> Callable[[str], Any]:
    if setting.option.parse is not None:
        return checked(setting.option.parse, setting.option.metavar or setting.name.upper())
    if setting.choices:
        return str
    kind = get_args(setting.kinds[0])[0] if setting.is_list else setting.kinds[0]
    converters: dict[Any, Callable[[str], Any]] = {int: count, float: number, Path: Path, str: str}
    convert = converters[kind]
    if setting.option.unit == "ms":
        convert = milliseconds
    if not setting.words:
        return convert
    return lambda text: text if text in setting.words else convert(text)
