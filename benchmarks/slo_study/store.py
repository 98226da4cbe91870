"""Results, one JSON line for each (cell, policy, seed, rate); runs skip what is there."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from slo_study.cells import Cell, is_blind
from slo_study.criteria import Curve, rate_at
from slo_study.trial import Score

Subject = tuple[Cell, str, int]
"""(cell, policy, seed): what has a capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One run as one cell's objectives score it."""

    cell: Cell
    policy: str
    seed: int
    index: int
    """Of the rate (`rate_at`)."""
    score: Score
    seconds: float = 0.0
    """Of the processor, shared among the cells that the run was scored for."""
    tag: str = ""
    """Version of a policy that plans with objectives; static ones are older than any."""

    @property
    def subject(self) -> Subject:
        return self.cell, self.policy, self.seed

    def as_json(self) -> str:
        """Return a line of a file; what is at its default is left out."""
        score = {name: value for name, value in asdict(self.score).items() if value != _DEFAULTS.get(name)}
        own: dict[str, Any] = asdict(self.cell) | {
            "policy": self.policy,
            "seed": self.seed,
            "rate": round(rate_at(self.index), 4),
            "index": self.index,
            "seconds": round(self.seconds, 2),
        }
        return json.dumps(own | ({"tag": self.tag} if self.tag else {}) | score, separators=(",", ":"))

    @staticmethod
    def of_json(text: str) -> Line:
        """Return what `as_json` wrote."""
        found = json.loads(text)
        return Line(
            cell=Cell(found["set_up"], found["workload"], found["slo"], found["mode"]),
            policy=found["policy"],
            seed=found["seed"],
            index=found["index"],
            score=Score(**{each.name: found[each.name] for each in fields(Score) if each.name in found}),
            seconds=found["seconds"],
            tag=found.get("tag", ""),
        )


_DEFAULTS = {
    each.name: each.default if each.default is not MISSING else each.default_factory()  # type: ignore[misc]
    for each in fields(Score)
    if each.default is not MISSING or each.default_factory is not MISSING
}


class Store:
    """A file of lines to which runs append, and the packed one beside it that is kept.

    Parameters
    ----------
    path : of the lines; the packed ones have `.gz` behind it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._packed = path.with_name(path.name + ".gz")
        self._found: dict[Any, Line] = {}
        self._offset = -1
        """Of what was not read yet of the plain file; -1 before anything was."""

    def read(self, tag: str | None = None) -> list[Line]:
        """Return all lines; of equal ones the last. Another read takes in only what is new.

        Parameters
        ----------
        tag : leave out other versions of policies that plan with objectives; None takes all.
        """
        if self._offset < 0:
            self._offset = 0
            if self._packed.exists():
                self._take(gzip.decompress(self._packed.read_bytes()))
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
            new = new[: new.rfind(b"\n") + 1]  # a line may be half written
            self._offset += len(new)
            self._take(new)
        return [line for line in self._found.values() if tag is None or line.tag in ("", tag)]

    def _take(self, text: bytes) -> None:
        for each in text.decode().splitlines():
            line = Line.of_json(each)
            self._found[line.subject, line.index, line.tag] = line

    def append(self, lines: Iterable[Line]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(line.as_json() + "\n" for line in lines)

    def pack(self) -> Path:
        """Put all lines into the packed file."""
        text = "".join(line.as_json() + "\n" for line in self.read())
        self._packed.write_bytes(gzip.compress(text.encode(), mtime=0))
        self.path.unlink(missing_ok=True)
        self._offset = 0
        return self._packed


def curves(lines: Iterable[Line]) -> dict[Subject, Curve]:
    """Return what is known of each (cell, policy, seed)."""
    found: dict[Subject, Curve] = {}
    for line in lines:
        found.setdefault(line.subject, Curve())[line.index] = line.score
    return found


def tag_of(policy: str, tag: str) -> str:
    """Return the version that a policy's lines carry."""
    return "" if is_blind(policy) else tag
