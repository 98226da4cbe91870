"""A metric is declared once: on the field that counts, or on the property that computes it.

`/metrics`, `GET /state`, its description and the tables of docs/metrics.md are loops over these
declarations. A name is that in `GET /state`; `/metrics` has `onbeat_` before it. It ends with its unit:
`_seconds`, `_bytes`, `_ratio` (a share, 1 is all), and that of a counter with `_total`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from typing import Any, Generic, Literal, TypeVar

from onbeat.metrics.histogram import Histogram

Kind = Literal["counter", "gauge", "histogram", "info"]
Labels = tuple[tuple[str, str], ...]
"""Names and values, of the parts that counts are in."""
VLLM = "vllm:"
"""How metrics begin that only vLLM has a name for."""
_METRIC, _PART = "metric", "part"
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Metric:
    """What one metric is. `info` tells words as labels, and is always 1."""

    name: str
    text: str
    kind: Kind
    labels: tuple[str, ...] = ()

    @property
    def is_own(self) -> bool:
        """Whether it has a name that is not vLLM's."""
        return not self.name.startswith(VLLM)


def counter(name: str, text: str, *labels: str, known: Iterable[str] = ()) -> Any:
    """Declare a field that only rises; with labels it is a `Counter` by their values.

    Parameters
    ----------
    known : values of the only label that are shown before they happen.
    """
    own = {_METRIC: Metric(name, text, "counter", labels)}
    if labels:
        return field(default_factory=partial(Counter, dict.fromkeys(known, 0)), metadata=own)
    return field(default=0, metadata=own)


def gauge(name: str, text: str, *labels: str, default: float | None = 0) -> Any:
    """Declare a field that rises and falls; with labels it is a mapping. None is not shown."""
    own = {_METRIC: Metric(name, text, "gauge", labels)}
    return field(default_factory=dict, metadata=own) if labels else field(default=default, metadata=own)


def histogram(name: str, text: str, bounds: Sequence[float], *labels: str) -> Any:
    """Declare a field that counts values by size; with labels it is a mapping."""
    own = {_METRIC: Metric(name, text, "histogram", labels)}
    return field(default_factory=dict if labels else partial(Histogram, bounds), metadata=own)


def info(name: str, text: str, *labels: str) -> Any:
    """Declare a field that maps labels to words."""
    return field(default_factory=dict, metadata={_METRIC: Metric(name, text, "info", labels)})


def part(kind: type, label: str = "") -> Any:
    """Declare a field with counts of their own, or by a label's value a mapping of such."""
    return field(default_factory=dict if label else kind, metadata={_PART: (kind, label)})


class Shown(Generic[ValueT]):
    """A property that is a metric, or has some.

    Parameters
    ----------
    compute : returns its value.
    metadata : as a field has it that is declared.
    """

    def __init__(self, compute: Callable[[Any], ValueT], metadata: Mapping[str, Any]) -> None:
        self._compute, self.metadata, self.__doc__ = compute, metadata, compute.__doc__

    def __get__(self, counts: object, kind: type) -> ValueT:
        return self._compute(counts)


def shown(name: str, *labels: str) -> Callable[[Callable[[Any], ValueT]], Shown[ValueT]]:
    """Make a property of a method, a counter or a gauge: its text is the first line of its docstring."""

    def note(compute: Callable[[Any], ValueT]) -> Shown[ValueT]:
        text = (compute.__doc__ or "").partition("\n")[0].removesuffix(".")
        text = text if text[1:2].isupper() else text[:1].lower() + text[1:]
        kind: Kind = "counter" if name.endswith("_total") else "gauge"
        return Shown(compute, {_METRIC: Metric(name, text, kind, labels)})

    return note


def shown_parts(kind: type, label: str) -> Callable[[Callable[[Any], ValueT]], Shown[ValueT]]:
    """Make a property of a method that returns a mapping, by a label's value, of counts of their own."""
    return lambda compute: Shown(compute, {_PART: (kind, label)})


def samples(counts: object, outer: Labels = ()) -> Iterator[tuple[Metric, Labels, Any]]:
    """Yield each metric of counts and of their parts, the labels of the parts, and the value.

    A value with labels of its own is a mapping from their values, one or a tuple of several. None is left
    out.
    """
    own: Any = type(counts)
    for attribute, metric, (_, label) in _members(own):
        value = getattr(counts, attribute)
        if value is None:
            continue
        if metric is not None:
            yield metric, outer, value
        elif label:
            for key, each in value.items():
                yield from samples(each, (*outer, (label, key)))
        else:
            yield from samples(value, outer)


def declared(kind: type, outer: tuple[str, ...] = ()) -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """Yield each metric that counts of a kind and their parts may have, and all its labels."""
    for _, metric, (inner, label) in _members(kind):
        if metric is not None:
            yield metric, (*outer, *metric.labels)
        elif inner is not None:
            yield from declared(inner, (*outer, label) if label else outer)


def by_label(metric: Metric, value: Any) -> Iterable[tuple[tuple[str, ...], Any]]:
    """Return the values of a metric's own labels, and the value of each; None is left out."""
    if metric.kind == "info":
        return [(tuple(value.values()), 1)]
    if not metric.labels:
        return [((), value)]
    return [
        (key if isinstance(key, tuple) else (str(key),), own) for key, own in value.items() if own is not None
    ]


@cache
def _members(kind: type) -> tuple[tuple[str, Metric | None, tuple[type | None, str]], ...]:
    """Return the attributes that are metrics or have them: name, metric, kind of the part and its label."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    if is_dataclass(kind):
        found += [(each.name, each.metadata) for each in fields(kind)]
    found += [(name, each.metadata) for name, each in vars(kind).items() if isinstance(each, Shown)]
    return tuple(
        (name, own.get(_METRIC), own.get(_PART, (None, "")))
        for name, own in found
        if _METRIC in own or _PART in own
    )
