"""Settings that are declared once: a field of a dataclass carries its default, its help and what it may be.

Flags, keys of configuration files, help texts and checks are made from the declaration. Where a dataclass
holds another one (`part`), its settings go by their own names all the same: `make` and `change` find them.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from functools import cache
from itertools import chain
from operator import ge, gt, le, lt
from types import NoneType, UnionType

from onbeat.core.errors import ConfigError, quoted
from onbeat.core.hints import likely_meant


class Dataclass(typing.Protocol):
    """What every dataclass is to a type checker."""

    __dataclass_fields__: typing.ClassVar[dict[str, typing.Any]]


T = typing.TypeVar("T", bound=Dataclass)

_OPTION, _PART = "option", "part"
_BOUNDS = {"at_least": ge, "at_most": le, "above": gt, "below": lt}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What a command line must know of a setting beside its name, type and default."""

    help: str
    """Its documentation, in code and in `--help`."""
    group: str
    """Title of its group in `--help`."""
    flag: str = ""
    """Long flag where it is not the name of the field."""
    aliases: tuple[str, ...] = ()
    metavar: str | None = None
    choices: tuple[str, ...] | Callable[[], Iterable[str]] = ()
    """Names that a command line offers, or `TABLE.keys` of a table that may be added to; whoever uses the
    setting looks them up there. Those of a `Literal` and of an `Enum` are known by themselves."""
    parse: Callable[[str], typing.Any] | None = None
    """From the text of the command line to the value, where the type alone does not say it."""
    unit: typing.Literal["ms", "gbps"] | None = None
    """Of the command line; inside these are seconds and bytes per second."""
    at_least: float | None = None
    """Like the next three, what holds of its value, or of each of several."""
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    """Infinity: any finite number."""
    is_switch: bool = False
    """Of a boolean: a flag that turns it on, without one that turns it off."""
    many: typing.Literal["+", "*", "append", ","] = "+"
    """Of a list: whether its values follow one flag, one at least or none too, have a flag each, or are one
    word with commas."""


def option(default: typing.Any = MISSING, *, help: str, group: str, **about: typing.Any) -> typing.Any:
    """Return a dataclass field that is a setting; `about` holds the other fields of `Option`."""
    return field(default=default, metadata={_OPTION: Option(help=help, group=group, **about)})


def part(kind: type[typing.Any]) -> typing.Any:
    """Return a dataclass field for settings that are declared in a dataclass of their own."""
    return field(default_factory=kind, metadata={_PART: kind})


class Setting(typing.NamedTuple):
    """One declared setting."""

    name: str
    """Of the field."""
    option: Option
    default: typing.Any
    """`MISSING` where one must be given."""
    kinds: tuple[typing.Any, ...]
    """The types of its values, None and literal words aside."""
    words: tuple[str, ...]
    """Words that it may be, beside values of its types."""

    @property
    def flag(self) -> str:
        """Return the long flag, such as `--max-num-seqs`."""
        return self.option.flag or "--" + self.name.replace("_", "-")

    @property
    def key(self) -> str:
        """Return the flag as a word, such as `max_num_seqs`."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def enum(self) -> type[Enum] | None:
        """Return the type of its values where it is an enumeration."""
        kind = self.kinds[0] if self.kinds else None
        return kind if isinstance(kind, type) and issubclass(kind, Enum) else None

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the names that it may have; empty where any value of its types will do."""
        if self.enum is not None:
            return tuple(str(member.value) for member in self.enum)
        names = self.option.choices
        return (tuple(names()) if callable(names) else names) or (() if self.kinds else self.words)

    def shown(self, value: typing.Any) -> typing.Any:
        """Return a value in the unit of the command line."""
        if self.option.unit is None or value is None:
            return value
        return {"ms": value * 1e3, "gbps": value * 8 / 1e9}[self.option.unit]

    def inside(self, value: typing.Any) -> typing.Any:
        """Return a value of the command line in the unit and the type that the setting has inside."""
        if value is None:
            return () if self.has_commas else None
        if self.option.unit is not None:
            return {"ms": value / 1e3, "gbps": value * 1e9 / 8}[self.option.unit]
        if self.is_list:
            return tuple(value)
        return value if self.enum is None else self.enum(value)

    @property
    def is_list(self) -> bool:
        """Whether it has several values."""
        return bool(self.kinds) and getattr(self.kinds[0], "__origin__", None) is tuple

    @property
    def has_commas(self) -> bool:
        """Whether these are one word of the command line."""
        return self.option.many == ","

    @property
    def is_open(self) -> bool:
        """Whether there is something to choose: a table with one entry offers nothing."""
        return not callable(self.option.choices) or len(self.choices) > 1


def settings_of(kind: type[typing.Any]) -> tuple[Setting, ...]:
    """Return the settings of a dataclass and of its parts, in the order of their declarations."""
    return _settings_of(kind)  # type: ignore[arg-type] # every class can be hashed


@cache
def _settings_of(kind: type[typing.Any]) -> tuple[Setting, ...]:
    hints = typing.get_type_hints(kind)
    found: list[Setting] = []
    for each in fields(kind):
        if _PART in each.metadata:
            found += settings_of(each.metadata[_PART])
        elif _OPTION in each.metadata:
            found.append(
                Setting(each.name, each.metadata[_OPTION], each.default, *_kinds_and_words(hints[each.name]))
            )
    return tuple(found)


def _kinds_and_words(hint: typing.Any) -> tuple[tuple[typing.Any, ...], tuple[str, ...]]:
    if typing.get_origin(hint) is typing.Literal:
        return (), typing.get_args(hint)
    if typing.get_origin(hint) not in (typing.Union, UnionType):
        return () if hint is NoneType else (hint,), ()
    parts = [_kinds_and_words(each) for each in typing.get_args(hint)]
    kinds, words = zip(*parts, strict=True)
    return tuple(chain(*kinds)), tuple(chain(*words))


def make(kind: type[T], /, **values: typing.Any) -> T:
    """Return a dataclass of settings from values by their names, those of its parts included.

    Raises
    ------
    ConfigError : an unknown name, or a value that the dataclass refuses.
    """
    own, parts = _sorted(kind, values)
    return kind(**own, **{name: make(part_kind, **given) for name, (part_kind, given) in parts.items()})


def meant(kind: type[typing.Any], **values: typing.Any) -> dict[str, typing.Any]:
    """Return values by the names of settings, where texts are what they mean on a command line.

    So it is `shed="reject"` and `autoscale="1..4"` for who writes Python.

    Raises
    ------
    ConfigError : a text that means nothing.
    """
    for each in settings_of(kind):
        if isinstance(text := values.get(each.name), str):
            if each.enum is not None and text in each.choices:
                values[each.name] = each.enum(text)
            elif each.option.parse is not None and each.option.unit is None and text not in each.words:
                values[each.name] = each.option.parse(text)
    return values


def change(settings: T, /, **values: typing.Any) -> T:
    """Return the settings with some of them replaced, those of its parts included.

    Raises
    ------
    ConfigError : see `make`.
    """
    own, parts = _sorted(type(settings), values)
    changed = {name: change(getattr(settings, name), **given) for name, (_, given) in parts.items()}
    return replace(settings, **own, **changed)


def values_of(settings: typing.Any) -> dict[Setting, typing.Any]:
    """Return the settings with their values, those of its parts included."""
    declared = {each.name: each for each in settings_of(type(settings))}
    found: dict[Setting, typing.Any] = {}
    for each in fields(settings):
        if _PART in each.metadata:
            found |= values_of(getattr(settings, each.name))
        elif each.name in declared:
            found[declared[each.name]] = getattr(settings, each.name)
    return found


def changed(settings: typing.Any) -> dict[Setting, typing.Any]:
    """Return the settings that are not at their defaults with their values, those of its parts included."""
    return {each: value for each, value in values_of(settings).items() if value != each.default}


def check(settings: typing.Any, kind: type[typing.Any]) -> None:
    """Check the settings that a dataclass declares itself against their choices and their bounds.

    Raises
    ------
    ConfigError : names the setting, its value and what it may be.
    """
    own = {each.name for each in fields(kind)}
    for each in settings_of(kind):
        value = getattr(settings, each.name) if each.name in own else None  # a part has checked its own
        if value is None or value in each.words:
            continue
        is_checked_later = isinstance(each.option.choices, tuple) and bool(each.option.choices)
        if each.choices and not is_checked_later and value not in each.choices:
            raise ConfigError(f"unknown {each.key} {quoted(value)}; choose one of {', '.join(each.choices)}")
        for one in value if isinstance(value, tuple) else (value,):
            _check_bounds(each, one)


def _check_bounds(setting: Setting, value: typing.Any) -> None:
    for name, holds in _BOUNDS.items():
        limit = getattr(setting.option, name)
        if limit is not None and not holds(value, limit):
            told = "finite" if limit == float("inf") else f"{name.replace('_', ' ')} {limit}"
            raise ConfigError(f"{setting.key} is {setting.shown(value)}; it must be {told}")


def _sorted(
    kind: type[typing.Any], values: dict[str, typing.Any]
) -> tuple[dict[str, typing.Any], dict[str, tuple[type[typing.Any], dict[str, typing.Any]]]]:
    """Return the values of a dataclass's own fields, and by part those of its settings."""
    owners: dict[str, tuple[str, type[typing.Any]] | None] = {each.name: None for each in fields(kind)}
    for each in fields(kind):
        if (inner := each.metadata.get(_PART)) is not None:
            names = {name.name for name in fields(inner)} | {name.name for name in settings_of(inner)}
            owners |= dict.fromkeys(names, (each.name, inner))
    own: dict[str, typing.Any] = {}
    parts: dict[str, tuple[type[typing.Any], dict[str, typing.Any]]] = {}
    for name, value in values.items():
        if name not in owners:
            near = likely_meant(name, owners)
            hint = f"did you mean {near}?" if near else f"known are {', '.join(owners)}"
            raise ConfigError(f"{kind.__name__} has no setting {name!r}; {hint}")
        if (owner := owners[name]) is None:
            own[name] = value
        else:
            parts.setdefault(owner[0], (owner[1], {}))[1][name] = value
    return own, parts
