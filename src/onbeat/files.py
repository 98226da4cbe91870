"""Files that users give: JSON, YAML, CSV and text, plain or gzip; `read` makes them values of a type.

Files that users get, and where those are that can be had again.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml

from onbeat.core.errors import ConfigError
from onbeat.typed import NotJSON, convert, decode

T = TypeVar("T")

GZIP_MAGIC = b"\x1f\x8b"
_YAML = (".yaml", ".yml")
_MOST_OF_A_DEVICE = 2**20


def read(kind: type[T], path: Path, what: str = "", *, hint: str = "") -> T:
    """Return what a YAML or JSON file holds, as a value of a type.

    Parameters
    ----------
    kind : a `Table`, a dataclass, or another type that msgspec knows.
    what, hint : what the file is (`the prices in`), and what else to say where it cannot be read.

    Raises
    ------
    ConfigError : it cannot be read, or a value is missing, unknown or wrong; names file, field and value.
    """
    text = read_text(path, what, hint=hint)
    is_json = path.suffix == ".json" or (path.suffix not in _YAML and text.lstrip()[:1] in ("{", "["))
    try:
        text = _without_endless(text)
        content = json.loads(text) if is_json else yaml.load(text, _Loader)
    except RecursionError as error:
        raise _unreadable(path, what, "it is nested too deeply" + hint) from error
    except json.JSONDecodeError as error:
        raise _unreadable(path, what, f"not valid JSON ({error})" + hint) from error
    except (yaml.YAMLError, ValueError) as error:  # a ValueError is of a date or a number that is none
        said = str(error).replace('"<unicode string>", ', "")  # PyYAML's name of a text
        raise _unreadable(path, what, " ".join(said.split()) + hint) from error
    return convert(kind, content, str(path), hint=hint)


def packaged(kind: type[T], package: str, *names: str) -> T:
    """Return what a file under `data` of a package holds, as a value of a type."""
    path = Path(str(resources.files(package).joinpath("data", *names)))
    return convert(kind, yaml.load(path.read_text("utf-8"), _PackagedLoader), str(path))


def read_lines(
    kind: type[T], path: Path, what: str = "", *, hint: str = "", may_be_cut: bool = False
) -> Iterator[tuple[int, T]]:
    """Yield the JSON values of a file that has one a line, each with the number of its line, from 1.

    Parameters
    ----------
    kind, what, hint : as for `read`.
    may_be_cut : whether a last line without its end may be left out: whoever wrote it was killed.

    Raises
    ------
    ConfigError : as for `read`; names the line.
    """
    return json_lines(kind, path, read_text(path, what, hint=hint), hint=hint, may_be_cut=may_be_cut)


def json_lines(
    kind: type[T], path: Path, text: str, *, hint: str = "", may_be_cut: bool = False
) -> Iterator[tuple[int, T]]:
    """Yield the JSON values of a text; see `read_lines`.

    Parameters
    ----------
    path : of the file, for errors.
    """
    last = 0 if text.endswith("\n") or not may_be_cut else text.count("\n") + 1
    for number, line in enumerate(text.split("\n"), start=1):
        if not line or line.isspace():
            continue
        try:
            found = decode(kind, line, f"{path}, line {number}", hint=hint)
        except NotJSON:
            if number == last > 1:
                return
            raise
        yield number, found


def read_text(path: Path, what: str = "", *, hint: str = "") -> str:
    """Return a text file's content, unpacked if it is gzip.

    Parameters
    ----------
    what, hint : as for `read`.

    Raises
    ------
    ConfigError : the file is missing, unreadable, a broken gzip, or not UTF-8.
    """
    content = read_bytes(path, what, hint=hint)
    try:
        if content.startswith(GZIP_MAGIC):
            content = gzip.decompress(content)
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text (byte {error.start}); is it the right file?"
        raise _unreadable(path, what, reason + hint) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        reason = f"the gzip file is damaged ({error}); fetch it again"
        raise _unreadable(path, what, reason + hint) from error


def write(path: Path, content: str | bytes | Iterable[bytes], *, append: bool = False) -> None:
    """Write a file, in parts if these are given, or add to its end; its folder is made where there is none.

    Raises
    ------
    ConfigError : it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab" if append else "wb") as file:
            content = content.encode() if isinstance(content, str) else content
            file.writelines([content] if isinstance(content, bytes) else content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def cache_dir() -> Path:
    """Return where everything is that can be had again: `$XDG_CACHE_HOME/onbeat`, or under `~/.cache`."""
    # The XDG specification: a relative path is invalid and must be ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "onbeat"


def read_bytes(path: Path, what: str = "", *, hint: str = "") -> bytes:
    """Return a file's content as it is.

    Raises
    ------
    ConfigError : the file cannot be read, or is a device that does not end.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)):
                return file.read()
            content = file.read(_MOST_OF_A_DEVICE + 1)
    except (OSError, ValueError) as error:  # a ValueError says that no path has such characters
        reason = getattr(error, "strerror", None) or str(error)
        raise _unreadable(path, what, reason + hint) from error
    if len(content) > _MOST_OF_A_DEVICE:
        raise _unreadable(path, what, "it is a device without an end; give a file")
    return content


def parse_object(text: str, what: str, hint: str = "") -> dict[str, Any]:
    """Read a JSON object that was given on a command line.

    Raises
    ------
    ConfigError : it is none; the message begins with `what` and ends with `hint`.
    """
    return decode(dict[str, Any], text, what, hint=hint)


class _Loader(yaml.SafeLoader):
    """One for which 1e-5, without a point, is a number as in YAML 1.2, and a date is a text as in JSON.

    A key that is given twice is an error, as in YAML 1.2: PyYAML would take the last and say nothing.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002 -- PyYAML's
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        names = Counter(key.value for key in keys)
        if again := next((key for key in reversed(keys) if names[key.value] > 1), None):
            raise yaml.MarkedYAMLError(
                problem=f"{again.value!r} is given twice", problem_mark=again.start_mark
            )
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if not pair[0].endswith("timestamp")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


class _PackagedLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads likewise in a seventh of the time. Deep nesting might end the process: only for our own files."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def _without_endless(content: str) -> str:
    """Return content; raise ValueError for a number that is beyond those that can be counted with."""
    if found := re.search(r"\d{300}", content):
        raise ValueError(f"the number {found[0][:20]}... has 300 digits or more")
    return content


def csv_rows(
    path: Path,
    text: str,
    *,
    columns: Sequence[str] = (),
    together: Sequence[str] = (),
    rows: str = "rows",
    hint: str = "",
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a CSV text with a header, each with the number of its line.

    Parameters
    ----------
    path : of the file, for errors.
    columns : that must be there; their order does not matter, and further ones are passed on.
    together : columns of which all must be there if one is.
    rows : what they are: `steps`.
    hint : a sentence for whoever lacks a column.

    Raises
    ------
    ConfigError : a missing column, a row of another width, quotes that do not end, or no rows.
    """
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True, strict=True)
    num_rows = 0
    try:
        header = [name.strip() for name in reader.fieldnames or ()]
        wanted = (*columns, *together) if any(name in header for name in together) else columns
        if missing := [name for name in wanted if name not in header]:
            told = f"{path} lacks the column {', '.join(missing)}; it has {', '.join(header) or 'no header'}"
            raise ConfigError(f"{told}. {hint}" if hint else told)
        reader.fieldnames = header
        for cells in reader:
            if None in cells or None in cells.values():
                raise ConfigError(
                    f"{path}, line {reader.line_num}: the header names {len(header)} columns, this line has "
                    "another number; is the file cut short?"
                )
            num_rows += 1
            yield reader.line_num, cells
    except csv.Error as error:
        raise ConfigError(f"{path}, after line {reader.line_num}: {error}") from error
    if not num_rows:
        raise ConfigError(f"{path} has a header but no {rows}")


def _unreadable(path: Path, what: str, reason: str) -> ConfigError:
    return ConfigError(f"cannot read {f'{what} {path}'.lstrip()}: {reason}")
