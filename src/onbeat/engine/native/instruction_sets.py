"""Which instruction set computes a model: the one that takes least time for its steps, timed once and kept.

A processor that has several is not always quickest with the newest. Which one is depends on the model's
shapes and number formats, on the threads, and on what wide registers cost the processor.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onbeat.core.errors import OnbeatError

LEAST_GAIN = 0.1
"""By so much another set must be quicker than the first: less is chance, and replicas shall agree."""
_REPEATS = 2
"""Of each kind of step, beside the first one, which brings threads and memory to life."""
CONFIRMATIONS = 10
"""Repeats where a set seems quicker than the first: on a busy machine it may be none."""


class StepKind(NamedTuple):
    """A step that sets are timed with: of the first layers of a model, without logits."""

    num_rows: int
    row_tokens: int
    """New tokens of each row: 1 of a decode."""
    num_layers: int

    @property
    def num_tokens(self) -> int:
        """Rows of its products."""
        return self.num_rows * self.row_tokens

    @property
    def title(self) -> str:
        """For people."""
        layers = f"{self.num_layers} layer" + ("" if self.num_layers == 1 else "s")
        if self.row_tokens > 1:
            return f"a prompt of {self.row_tokens} tokens in {layers}"
        return f"{self.num_rows} decode" + ("" if self.num_rows == 1 else "s") + f" in {layers}"


Timer = Callable[[str, StepKind], float]
"""Runs a step on an instruction set; returns the seconds that it took."""
SetTimes = Mapping[str, Sequence[float]]
"""Seconds of each kind of step by instruction set; of one that was given up, of fewer kinds. The first set is
the one that others are compared with."""


class SetChoice(NamedTuple):
    """An instruction set, and why it was taken."""

    instruction_set: str
    reason: str


def time_sets(
    names: Sequence[str],
    kinds: Sequence[StepKind],
    run: Timer,
    *,
    gives_up: bool = True,
    repeats: int = _REPEATS,
) -> dict[str, list[float]]:
    """Time steps on instruction sets, turn by turn, so that a disturbance meets all of them alike.

    A set's score is the mean, over the kinds of steps, of its time over that of the first set.

    Parameters
    ----------
    names : instruction sets; the first is the reference.
    kinds : steps, short ones first.
    run : times one.
    gives_up : whether a set is timed no further when its score can no longer be better than the first's.
    repeats : of each kind of step, of which the shortest counts.
    """
    first, remaining = names[0], list(names)
    times: dict[str, list[float]] = {name: [] for name in names}
    scores = dict.fromkeys(names, 0.0)

    def is_of_use(name: str, score: float) -> bool:
        return not gives_up or name == first or score < 1

    for kind in kinds:
        best = {name: run(name, kind) for name in remaining}
        shares = {name: seconds / best[first] / len(kinds) for name, seconds in best.items()}
        # The first step of a kind takes longer than the next ones, hardly twice as long.
        repeated = [name for name in remaining if is_of_use(name, scores[name] + shares[name] / 2)]
        for _ in range(repeats):
            for name in repeated:
                best[name] = min(best[name], run(name, kind))
        for name, seconds in best.items():
            times[name].append(seconds)
            scores[name] += seconds / best[first] / len(kinds)
        remaining = [name for name in repeated if is_of_use(name, scores[name])]
    return times


def time_with_care(names: Sequence[str], kinds: Sequence[StepKind], run: Timer) -> dict[str, list[float]]:
    """Time sets, and once more, longer, the one that seems to be quicker than the first, and the first."""
    times = time_sets(names, kinds, run)
    chosen = choose_set(times).instruction_set
    if chosen != names[0]:
        again = time_sets([names[0], chosen], kinds, run, gives_up=False, repeats=CONFIRMATIONS)
        times |= {name: list(map(min, times[name], seconds)) for name, seconds in again.items()}
    return times


def choose_set(times: SetTimes) -> SetChoice:
    """Take the set with the best score; the first one unless another is quicker by `LEAST_GAIN`."""
    first, *others = times
    scores = _scores(times)
    num_kinds = len(times[first])
    complete = [name for name in others if len(times[name]) == num_kinds]
    quickest = min(complete, key=lambda name: scores[name], default=first)
    chosen = quickest if scores[quickest] <= 1 - LEAST_GAIN else first
    compared = [
        f"{name} {scores[name] / scores[chosen]:.2f}x its time"
        + ("" if len(times[name]) == num_kinds else " or more")
        for name in times
        if name != chosen
    ]
    return SetChoice(chosen, ", ".join(compared))


def _scores(times: SetTimes) -> dict[str, float]:
    """Return the mean of each set's time over the first set's, over the kinds that it was timed with."""
    reference = next(iter(times.values()))
    return {
        name: sum(own / first for own, first in zip(seconds, reference, strict=False)) / len(seconds)
        for name, seconds in times.items()
    }


class SetTimesFile:
    """Where the times of a machine, a build and a model are kept.

    Parameters
    ----------
    directory : of all such files.
    key : everything that times depend on.
    """

    def __init__(self, directory: Path, key: Mapping[str, Any]) -> None:
        self._key = json.loads(json.dumps(key))
        digest = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()[:16]
        self.path = directory / f"{digest}.json"

    def read(self) -> dict[str, list[float]] | None:
        """Return what was kept; None where there is nothing that can be used."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            times = {str(name): [float(value) for value in own] for name, own in content["seconds"].items()}
            is_whole = content["key"] == self._key and all(
                own and min(own) > 0 and len(own) <= len(next(iter(times.values()))) for own in times.values()
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        return times if times and is_whole else None

    def keep(self, times: SetTimes) -> dict[str, list[float]]:
        """Write times unless another process was first, so that replicas agree; return what the file now has.

        Raises
        ------
        OSError : the file cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.partial")
        content = {"key": self._key, "seconds": {name: list(own) for name, own in times.items()}}
        try:
            partial.write_text(json.dumps(content) + "\n", encoding="utf-8")
            if (found := self.read()) is not None:
                return found
            partial.replace(self.path)
        finally:
            partial.unlink(missing_ok=True)
        return {name: list(own) for name, own in times.items()}


class Settled(NamedTuple):
    """Times, and where they are from."""

    times: SetTimes | None
    """None where there are none."""
    source: str
    """For people; without times, why."""
    caveat: str = ""
    """What else is to be said."""


def settle_times(names: Sequence[str], file: SetTimesFile, measure: Callable[[], SetTimes]) -> Settled:
    """Return the times that were kept, else new ones.

    Parameters
    ----------
    names : what is timed; the first is what others are compared with.
    file : where times are kept.
    measure : times them.
    """
    kept = file.read()
    if kept is not None and list(kept) == list(names):
        return Settled(kept, f"as timed before ({file.path})")
    try:
        times = measure()
    except (OnbeatError, OSError, MemoryError) as error:
        return Settled(None, f"could not be timed ({error})")
    try:
        return Settled(file.keep(times), "as timed now")
    except OSError as error:
        return Settled(times, "as timed now", f"; this cannot be kept for the next start ({error})")


def settle_set(names: Sequence[str], file: SetTimesFile, measure: Callable[[], SetTimes]) -> SetChoice:
    """Choose by times; see `settle_times`. Whatever goes wrong, the first set can run."""
    times, source, caveat = settle_times(names, file, measure)
    if times is None:
        return SetChoice(names[0], f"the newest, for the sets {source}")
    chosen, compared = choose_set(times)
    return SetChoice(chosen, f"{source}: {compared}{caveat}")
