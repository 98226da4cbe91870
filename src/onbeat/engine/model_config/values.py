"""Take typed values out of a file's key-value table; errors name the key, the value and the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from onbeat.core.errors import ConfigError, ModelLoadError, NeedsVllm, quoted
from onbeat.files import packaged
from onbeat.typed import Count, Positive, Size, Table, take

_MAX_LAYERS = 4096


class _KnownKeys(Table):
    gguf_names: dict[str, str]
    neutral: dict[str, tuple[Any, ...]]
    gguf_neutral: dict[str, tuple[Any, ...]]
    defaults: dict[str, dict[str, Any]]


KEYS = packaged(_KnownKeys, "onbeat.engine", "config_keys.yaml")


@dataclass(frozen=True, slots=True)
class Values:
    """A read-only table of what a model file says of itself.

    Parameters
    ----------
    table : key to plain value; a value of None counts as absent.
    source : what the table is, for messages ("config.json").
    prefix : put before every key (GGUF keys start with the architecture).
    keys : what the table calls some of them.
    """

    table: Mapping[str, Any]
    _: KW_ONLY
    source: str
    prefix: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)

    def __contains__(self, key: str) -> bool:
        return self.raw(key) is not None

    def over(self, defaults: Mapping[str, Any]) -> Values:
        """Return the table with values where it has no such key, not even for null."""
        return Values({**defaults, **self.table}, source=self.source)

    def raw(self, key: str) -> Any:
        """Return the value as it stands, or None."""
        return self.table.get(self._name(key))

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number."""
        return int(self._take(Size, key, default))

    def count(self, key: str, default: int) -> int:
        """Return a whole number that may be 0."""
        return int(self._take(Count, key, default))

    def num_layers(self, key: str) -> int:
        """Return the depth of a model, within reason: a damaged value must not cost all memory."""
        return int(self._take(Annotated[int, Meta(ge=1, le=_MAX_LAYERS)], key, None))

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        return float(self._take(Positive, key, default))

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of positive numbers."""
        return tuple(self._take(list[Positive], key, None))

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false."""
        return bool(self._take(bool, key, default))

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return one token id or a list of them as a tuple; empty where there is none."""
        found = self._take(Count | list[Count], key, [])
        return tuple(found) if isinstance(found, list) else (found,)

    def refuse_unless(self, key: str, *neutral: Any) -> None:
        """Raise where a value is set that changes the output in a way onbeat does not compute."""
        value = self.raw(key)
        if value is not None and value not in neutral:
            wanted = " or ".join(["absent", *(repr(choice) for choice in neutral)])
            raise NeedsVllm(
                f"{self.source} sets {self._name(key)} to {quoted(value)}, which onbeat does not support "
                f"(it must be {wanted})"
            )

    def wrong(self, key: str, value: Any, wanted: str) -> ModelLoadError:
        """Return the error for a value of the wrong kind."""
        return ModelLoadError(f"{self.source}: {self._name(key)} is {value!r}; it must be {wanted}")

    def _name(self, key: str) -> str:
        return self.prefix + self.keys.get(key, key)

    def _take(self, kind: Any, key: str, default: Any) -> Any:
        try:
            value = take(kind, self.table, self._name(key), self.source)
        except ConfigError as error:
            raise ModelLoadError(str(error)) from error
        if value is None and default is None:
            raise ModelLoadError(
                f"{self.source} lacks {self._name(key)}; the model cannot be built without it"
            )
        return default if value is None else value
