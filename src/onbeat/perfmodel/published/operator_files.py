"""Which CSV files make up an operator profile."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from onbeat.core.errors import ConfigError
from onbeat.files import read_yaml

_SUFFIXES = (".csv", ".csv.gz")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFiles:
    """The files; of communication only those that the parallelism needs."""

    mlp: Path
    attention: Path
    all_reduce: Path | None = None
    send_recv: Path | None = None


_NAMES = tuple(field.name for field in fields(OperatorFiles))


def find_operator_files(path: Path) -> OperatorFiles:
    """Return the files of a profile.

    Parameters
    ----------
    path : a directory in which one `.csv` or `.csv.gz` has each of `mlp`, `attention`, `all_reduce` and
        `send_recv` in its name; or a YAML file that maps these words to files, relative to itself.

    Raises
    ------
    ConfigError : the path is neither, or a file is missing, not named, or one of several.
    """
    if path.is_dir():
        found = {name: _only_file(path, name) for name in _NAMES}
    elif path.suffix in (".yaml", ".yml") and path.is_file():
        found = _named_files(path)
    else:
        raise ConfigError(
            f"{path} is neither a directory with operator profiles nor a YAML file (.yaml) that names them"
        )
    mlp, attention = found.get("mlp"), found.get("attention")
    if mlp is None or attention is None:
        raise ConfigError(
            f"{path} has no {'attention' if mlp else 'mlp'} profile; an operator profile needs both"
        )
    return OperatorFiles(
        mlp=mlp, attention=attention, all_reduce=found.get("all_reduce"), send_recv=found.get("send_recv")
    )


def _only_file(directory: Path, word: str) -> Path | None:
    matches = sorted(
        file for file in directory.iterdir() if word in file.name and file.name.endswith(_SUFFIXES)
    )
    if len(matches) > 1:
        names = ", ".join(file.name for file in matches)
        raise ConfigError(
            f"{directory} has {len(matches)} {word} profiles ({names}); name the one that is meant in a YAML "
            f"file with keys {', '.join(_NAMES)} and give that"
        )
    return matches[0] if matches else None


def _named_files(path: Path) -> dict[str, Path | None]:
    content = read_yaml(path)
    if not isinstance(content, dict) or not all(isinstance(value, str) for value in content.values()):
        raise ConfigError(f"{path} must map {', '.join(_NAMES)} to file names")
    if unknown := sorted(str(name) for name in content.keys() - set(_NAMES)):
        raise ConfigError(f"{path} has the unknown key {', '.join(unknown)}; known are {', '.join(_NAMES)}")
    return {name: path.parent / file for name, file in content.items()}
