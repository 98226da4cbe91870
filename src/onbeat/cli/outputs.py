"""Files that a command writes at its end: tried before the work, and none lost to the failure of another."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from onbeat.core.errors import ConfigError
from onbeat.core.options import check, option, values_of
from onbeat.engine.container import usable_cores

if TYPE_CHECKING:
    from onbeat.report.result import Result


class _Results(Console):
    def on_broken_pipe(self) -> None:
        """Print no more; the command goes on, and saves what it was told to save."""
        with suppress(SystemExit):
            super().on_broken_pipe()


def result_console(**options: Any) -> Console:
    """Return where results are printed; a file or a pipe has no width to respect."""
    console = _Results(**options)
    return console if console.is_terminal else _Results(width=160, **options)


def progress_bar(console: Console, *, is_quiet: bool = False, refresh_per_second: float = 4) -> Progress:
    """Return a bar of counted work for a terminal; each task has a `note`.

    Parameters
    ----------
    refresh_per_second : drawing takes time from what is measured.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
        disable=is_quiet,
        refresh_per_second=refresh_per_second,
    )


def is_given(value: Any) -> bool:
    """Whether a flag has a value; 0 is one."""
    return value is not None and value is not False and value != []


def shown_settings(args: argparse.Namespace, *, hidden: Collection[str] = ()) -> dict[str, Any]:
    """Return the flags that were given or have a value, by name, for the end of a report."""
    hidden = {"run", "command", *hidden}
    return {
        name: _plain(value)
        for name, value in sorted(vars(args).items())
        if name not in hidden and is_given(value)
        if isinstance(value, (str, int, float, list, Path))
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_plain, value))
    return value if isinstance(value, (str, int, float)) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """How often a study simulates each of its cases, and by how many processes."""

    repeats: int = option(
        3,
        metavar="N",
        group="study",
        at_least=1,
        at_most=1000,  # far more than an interval gains by: each has a load of its own in memory
        help="runs of each case, each with its own seed",
    )
    jobs: int | None = option(
        None, metavar="N", group="study", at_least=1, help="processes to use (default: one a core)"
    )

    def __post_init__(self) -> None:
        check(self, StudyOptions)

    @property
    def num_processes(self) -> int:
        """Processes to use, at least 1."""
        return self.jobs or usable_cores()


def files_of(settings: Any) -> dict[str, Path | None]:
    """Return the files that settings name, by their flags."""
    return {each.flag: value for each, value in values_of(settings).items() if isinstance(value, Path)}


def check_writable(args: argparse.Namespace, paths: Mapping[str, Path | None]) -> None:
    """Find out before the work whether its results can be saved.

    Missing directories are made, as they are when results are saved; files are left as they are.

    Parameters
    ----------
    args : of the command; files that its other flags name are inputs.
    paths : flag -> the file that it names; None is left out.

    Raises
    ------
    ConfigError : a file cannot be written or is an input, or two flags name the same one.
    """
    owners: dict[Path, str] = {}
    written = {"label", *(flag.lstrip("-").replace("-", "_") for flag in paths)}
    inputs = [value for name, value in vars(args).items() if name not in written]
    inputs = [each for each in inputs if isinstance(each, (str, Path)) and os.path.exists(each)]
    for flag, path in paths.items():
        if path is None:
            continue
        other = owners.setdefault(path.absolute(), flag)
        if other != flag:
            raise ConfigError(f"{other} and {flag} both name {path}; give each a file of its own")
        try:
            if path.exists() and any(map(path.samefile, inputs)):
                raise ConfigError(f"{flag} would overwrite {path}, which is an input; choose another file")
            _try(path)
        except OSError as error:
            raise ConfigError(
                f"{flag}: cannot write {path}: {error.strerror or error}; choose another file"
            ) from error


def _try(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    is_there = path.exists()
    if is_there and not (path.is_file() or path.is_dir()):
        return  # a pipe or a terminal: opening it may wait
    path.open("ab").close()
    if not is_there:
        path.unlink()


def deliver(
    result: Result,
    console: Console,
    *,
    json: Path | None = None,
    report: Path | None = None,
    others: Mapping[Path | None, Callable[[Path], None]] | None = None,
) -> None:
    """Show a result and save it.

    Parameters
    ----------
    console : names each file that was written.
    json, report : where its numbers and its page go; None goes nowhere.
    others : further files, as in `save_all`.

    Raises
    ------
    ConfigError : a file could not be written.
    """
    from onbeat.report.result import save, show, write_page

    show(result, result_console())
    save_all({json: partial(save, result), report: partial(write_page, result), **(others or {})}, console)


def save_all(writers: Mapping[Path | None, Callable[[Path], None]], console: Console) -> None:
    """Write files; where one fails, the others are written all the same.

    Parameters
    ----------
    writers : file -> what writes it; None is a file that nobody wants.
    console : names each file that was written, in one line however long it is.

    Raises
    ------
    ConfigError : the first that could not be written.
    """
    failure: ConfigError | None = None
    for path, write in writers.items():
        if path is None:
            continue
        try:
            write(path)
        except ConfigError as error:
            failure = failure or error
        else:
            console.print(f"saved {path}", highlight=False, markup=False, soft_wrap=True)
    if failure is not None:
        raise failure
