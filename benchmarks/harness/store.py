"""Results, one JSON line for each run; later slices of the study skip what is there."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol

from onbeat.planner.parallel import Pool, TaskContext

FOREVER = 1e18
ANY_VERSION = "*"
"""Tag of what no version of what is studied changes."""
STUDY_VERSION = 1
"""Counts up with changes to loads or scoring that make earlier results incomparable."""
_UNNAMED = frozenset({"start", "coefficients"})
"""Fields on which the result does not depend."""


class Run(Protocol):
    """A dataclass that says what is run."""

    def run(self) -> dict[str, Any]:
        """Return what came of it."""
        ...


@dataclass(frozen=True, slots=True)
class Line:
    """What came of one run."""

    kind: str
    """Name of the run's class."""
    names: dict[str, Any]
    found: dict[str, Any]
    tag: str
    seconds: float
    version: int = STUDY_VERSION


def names_of(run: Any) -> dict[str, Any]:
    """Return the fields that tell a run from others."""
    named = {each.name: getattr(run, each.name) for each in fields(run) if each.name not in _UNNAMED}
    return {
        name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for name, value in named.items()
    }


class Results:
    """A file of lines, to which slices append (one at a time).

    Parameters
    ----------
    path : of the lines.
    tag : version of what is studied; lines of others are passed over, but for those of `ANY_VERSION`.
    """

    def __init__(self, path: Path, tag: str) -> None:
        self._path = path
        self._tag = tag
        self._lines: dict[tuple[str, str], Line] = {}
        """By what was run and the version; of equal ones the last."""
        self._offset = 0
        """Of what was not read yet."""
        self.refresh()

    def refresh(self) -> None:
        """Take in what other processes have appended."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
            new = new[: new.rfind(b"\n") + 1]  # a line may be half written
            self._offset += len(new)
            self._take(new)

    def lines(self) -> list[Line]:
        """Return the lines that count."""
        return [line for line in self._lines.values() if line.tag in (self._tag, ANY_VERSION)]

    @property
    def seconds(self) -> float:
        """Seconds of one core that the lines took."""
        return sum(line.seconds for line in self.lines())

    def get(self, run: Any) -> Mapping[str, Any] | None:
        """Return what came of a run; None where it is still to do."""
        key = _key(type(run).__name__, names_of(run))
        line = self._lines.get((key, self._tag)) or self._lines.get((key, ANY_VERSION))
        return None if line is None else line.found

    def missing(self, runs: Iterable[Any]) -> list[Any]:
        """Return the runs that are still to do."""
        return [run for run in runs if self.get(run) is None]

    def append(self, run: Any, found: dict[str, Any], seconds: float, *, tag: str | None = None) -> None:
        """Write down what came of a run.

        Parameters
        ----------
        tag : its version; None is that of all.
        """
        own = self._tag if tag is None else tag
        line = Line(type(run).__name__, names_of(run), found, own, round(seconds, 2))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_text(line))
        self._note(line)

    def _take(self, text: bytes) -> None:
        for each in text.decode().splitlines():
            self._note(Line(**json.loads(each)))

    def _note(self, line: Line) -> None:
        if line.version == STUDY_VERSION:
            self._lines[_key(line.kind, line.names), line.tag] = line


def _text(line: Line) -> str:
    return json.dumps(asdict(line), separators=(",", ":")) + "\n"


def _key(kind: str, names: Mapping[str, Any]) -> str:
    return json.dumps([kind, names], sort_keys=True)


@dataclass(frozen=True, slots=True)
class _Task:
    what: Any
    deadline: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class _Done:
    """What came of a run; nothing where the slice ended first."""

    found: dict[str, Any] | None
    seconds: float = 0.0


def deadline_in(minutes: float | None) -> float:
    """Return when a slice ends, seconds since 1970."""
    return time.time() + minutes * 60 if minutes else FOREVER


def run_missing(runs: Iterable[Any], results: Results, *, jobs: int, deadline: float) -> None:
    """Do the runs that are still to do, until the slice ends."""
    left: Sequence[Any] = results.missing(runs)
    if not left or time.time() > deadline:
        return
    print(f"{len(left)} runs", flush=True)

    def keep(index: int, done: _Done) -> None:
        if done.found is not None:
            results.append(left[index], done.found, done.seconds)
            print(f"{left[index]}: {done.found} [{done.seconds:.1f} s]", flush=True)

    with Pool(jobs) as pool:
        pool.run(_do, [_Task(each, deadline) for each in left], on_result=keep)


def _do(task: _Task, context: TaskContext) -> _Done:
    if context.is_stopped() or time.time() > task.deadline:
        return _Done(None)
    started = time.process_time()
    found = task.what.run()
    return _Done(found, time.process_time() - started)
