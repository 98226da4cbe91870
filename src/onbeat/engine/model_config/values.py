"""Take typed values out of a file's key-value table; errors name the key, the value and the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onbeat.core.errors import ModelLoadError

_MAX_LAYERS = 4096


class Values:
    """A read-only table of what a model file says of itself.

    Parameters
    ----------
    table : key to plain value; a value of None counts as absent.
    source : what the table is, for messages ("config.json").
    prefix : put before every key (GGUF keys start with the architecture).
    """

    def __init__(self, table: Mapping[str, Any], *, source: str, prefix: str = "") -> None:
        self._table = table
        self._source = source
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self._table.get(self._prefix + key) is not None

    def names(self, key: str) -> bool:
        """Whether the key stands in the table at all, be its value null."""
        return self._prefix + key in self._table

    def raw(self, key: str) -> Any:
        """Return the value as it stands, or None."""
        return self._table.get(self._prefix + key)

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, value, "a positive whole number")
        return value

    def num_layers(self, key: str) -> int:
        """Return the depth of a model, within reason: a damaged value must not cost all memory."""
        value = self.size(key)
        if value > _MAX_LAYERS:
            raise self.wrong(key, value, f"at most {_MAX_LAYERS}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of positive numbers."""
        value = self._required(key, None)
        if not isinstance(value, list):
            raise self.wrong(key, value, "a list of numbers")
        return tuple(Values({key: item}, source=self._source).number(key) for item in value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return one token id or a list of them as a tuple; empty where there is none."""
        value = self.raw(key)
        ids = [] if value is None else value if isinstance(value, Sequence) else [value]
        if isinstance(value, str) or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.wrong(key, value, "a token id or a list of them")
        return tuple(ids)

    def refuse_unless(self, key: str, *neutral: Any) -> None:
        """Raise where a value is set that changes the output in a way onbeat does not compute."""
        value = self.raw(key)
        if value is not None and value not in neutral:
            wanted = " or ".join(["absent", *(repr(choice) for choice in neutral)])
            cure = "; serve a GGUF file of the model instead" * key.startswith(("quantiz", "compression"))
            raise ModelLoadError(
                f"{self._source} sets {self._prefix + key} to {value!r}, which onbeat does not support "
                f"(it must be {wanted}){cure}"
            )

    def wrong(self, key: str, value: Any, wanted: str) -> ModelLoadError:
        """Return the error for a value of the wrong kind."""
        return ModelLoadError(f"{self._source}: {self._prefix + key} is {value!r}; it must be {wanted}")

    def _required(self, key: str, default: Any) -> Any:
        value = self.raw(key)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(
                f"{self._source} lacks {self._prefix + key}; the model cannot be built without it"
            )
        return value
