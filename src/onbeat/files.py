"""Files that users give: text, CSV and YAML, plain or gzip, and the words in which their faults are told."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from onbeat.core.errors import ConfigError

_GZIP_MAGIC = b"\x1f\x8b"


def read_text(path: Path, what: str = "") -> str:
    """Return a text file's content, unpacked if it is gzip.

    Parameters
    ----------
    what : the file is, for the error: `the prices in`.

    Raises
    ------
    ConfigError : the file is missing, unreadable, a broken gzip, or not UTF-8.
    """
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text (byte {error.start}); is it the right file?"
        raise _unreadable(path, what, reason) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        reason = f"the gzip file is damaged ({error}); fetch it again"
        raise _unreadable(path, what, reason) from error
    except OSError as error:
        raise _unreadable(path, what, error.strerror or str(error)) from error


def read_yaml(path: Path, what: str = "", *, hint: str = "") -> Any:
    """Return the content of a YAML file; no tags that would make objects are taken.

    Parameters
    ----------
    what, hint : what the file is, and what else to say where it cannot be read.

    Raises
    ------
    ConfigError : it cannot be read.
    """
    try:
        return yaml.safe_load(read_text(path, what))
    except yaml.YAMLError as error:
        raise _unreadable(path, what, " ".join(str(error).split()) + hint) from error
    except ConfigError as error:
        raise ConfigError(f"{error}{hint}") from error


def read_csv(
    path: Path,
    what: str = "",
    *,
    columns: Sequence[str] = (),
    together: Sequence[str] = (),
    rows: str = "rows",
    hint: str = "",
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a CSV file with a header, each with the number of its line; see `csv_rows`.

    Raises
    ------
    ConfigError : as `read_text` and `csv_rows`.
    """
    text = read_text(path, what)
    return csv_rows(path, text, columns=columns, together=together, rows=rows, hint=hint)


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
