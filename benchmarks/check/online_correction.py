"""How well a learning step-time model follows a machine whose pace changes, as a Markdown table.

    python -m benchmarks.check.online_correction [RECORD ...]

Streams of steps are drawn: decodes whose number drifts, chunks in bursts, 5 % noise, and what the row says.
Each RECORD of `onbeat serve --record` that has a step-time model adds the steps that it holds, as they are,
and as they would be on a machine 5 and 20 times slower and faster. Before each step its mean and quantiles
are predicted; then the model is told what it took.

error        mean of |log(measured / predicted)|
over P95     share of steps that took longer than this quantile: 5 % is right; P99 likewise
close after  most steps after a change for good, until eight in a row are predicted within a quarter
P99 / mean   as predicted 100 steps after the change: 1.12 is right where there is noise alone
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.residual import ResidualModel
from onbeat.recording.reader import Recording
from onbeat.simulator.replay.history import read_history
from onbeat.simulator.replay.model import learning_model

NUM_STEPS = 4000
SEEDS = (0, 1, 2, 3)
CLOSE = math.log(1.25)
NUM_CLOSE = 8
Step = tuple[BatchShape, float]
Score = tuple[float, bool, bool, float]
"""log(measured / predicted), whether it took longer than P95 and than P99, and P99 / mean"""


def prior(shape: BatchShape) -> float:
    """Return what the model believes before it learns; seconds."""
    context = shape.decode_context_tokens + shape.chunk_cached_tokens
    return max(8e-3, 3e-5 * shape.num_new_tokens) + 1e-7 * context


def batches(rng: random.Random) -> Iterator[BatchShape]:
    """Yield what a server runs: decodes, whose number drifts, and now and then a burst of chunks."""
    num_decodes, burst = 8, 0
    while True:
        num_decodes = min(max(num_decodes + rng.choice((-1, 0, 0, 1)), 1), 64)
        if not burst and rng.random() < 0.05:
            burst = rng.choice((1, 3, 10))
        shape = BatchShape()
        for _ in range(num_decodes):
            shape.add(rng.randint(100, 1500), 1, samples=True)
        if burst:
            burst -= 1
            shape.add(rng.choice((0, 512)), rng.choice((256, 512)), samples=True)
        yield shape


@dataclass
class Machine:
    """How long steps take beside the prior."""

    spell: float = 1.0
    """Factor of the slow spells, which come once in 150 steps and last 5 to 60."""
    stall: float = 0.0
    """Seconds that one step in a hundred takes more."""
    chunks: float = 1.0
    """Factor of steps with chunks alone: the prior tells kinds of batches apart wrongly."""
    pace: Callable[[int], float] = lambda _: 1.0
    """Factor of all steps, by their number."""

    def steps(self, seed: int) -> Iterator[Step]:
        rng, left = random.Random(seed), 0
        for index, shape in zip(range(NUM_STEPS), batches(rng), strict=False):
            left = left - 1 if left > 0 else (rng.randint(5, 60) if rng.random() < 1 / 150 else 0)
            seconds = prior(shape) * rng.lognormvariate(0.0, 0.05) * self.pace(index)
            seconds *= (self.spell if left > 0 else 1.0) * (self.chunks if shape.num_chunks else 1.0)
            yield shape, seconds + (self.stall if rng.random() < 0.01 else 0.0)


def always(factor: float) -> Callable[[int], float]:
    return lambda _: factor


def changed(factor: float) -> Callable[[int], float]:
    return lambda index: factor if index >= NUM_STEPS // 2 else 1.0


MACHINES = {
    "noise alone": Machine(),
    "spells of 1.6 x": Machine(spell=1.6),
    "spells of 2.5 x": Machine(spell=2.5),
    "stalls of 0.1 s": Machine(stall=0.1),
    "spells of 2.5 x, stalls of 0.1 s": Machine(spell=2.5, stall=0.1),
    "stalls of 2 s": Machine(stall=2.0),
    "chunks 1.5 x dearer, spells of 1.6 x": Machine(chunks=1.5, spell=1.6),
    "chunks 2.5 x dearer": Machine(chunks=2.5),
    **{f"prior {x:g} x too fast": Machine(pace=always(x)) for x in (5, 20)},
    **{f"prior {x:g} x too slow": Machine(pace=always(1 / x)) for x in (5, 20)},
    **{f"pace x {x:g} half-way": Machine(pace=changed(x)) for x in (1.6, 2.5, 5, 20, 0.2, 0.05)},
}


def scored(model: StepTimeModel, steps: Iterable[Step]) -> list[Score]:
    """Return how well each step was predicted."""
    found: list[Score] = []
    for shape, seconds in steps:
        mean, usual, most = (model.step_time(shape, q) for q in (None, 0.95, 0.99))
        found.append((math.log(seconds / mean), seconds > usual, seconds > most, most / mean))
        model.observe(shape, seconds)
    return found


def row(name: str, runs: list[list[Score]], changes_at: int | None) -> str:
    """Return a line of the table."""
    every = [step for run in runs for step in run]
    error, *over = (sum(abs(step[part]) for step in every) / len(every) for part in range(3))
    line = f"| {name} | {len(every)} | {error:.3f} | {over[0]:.1%} | {over[1]:.1%} |"
    if changes_at is None:
        return f"{line} | |"
    most = max(run[changes_at + 100][3] for run in runs)
    return f"{line} {max(num_until_close(run[changes_at:]) for run in runs)} | {most:.2f} |"


def num_until_close(run: list[Score]) -> int:
    """Return the steps before the first eight in a row that were predicted within a quarter."""
    for index in range(len(run) - NUM_CLOSE + 1):
        if all(abs(step[0]) < CLOSE for step in run[index : index + NUM_CLOSE]):
            return index
    return len(run)


def recorded_steps(recording: Recording) -> list[Step]:
    """Return the steps of a record, timed as the scheduler timed them."""
    steps, last_end = [], -math.inf
    for step in read_history(recording).steps:
        steps.append((step.shape, step.end - max(step.planned, last_end)))
        last_end = step.end
    return steps


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path, nargs="*", metavar="RECORD")
    args = parser.parse_args()
    print("| steps | number | error | over P95 | over P99 | close after | P99 / mean |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    residual = ResidualModel.log_normal(0.17)
    for name, machine in MACHINES.items():
        runs = [scored(Predictor(prior, residual).with_learning(), machine.steps(seed)) for seed in SEEDS]
        changes_at = NUM_STEPS // 2 if "half" in name else (0 if "prior" in name else None)
        print(row(name, runs, changes_at))
    for path in args.records:
        recording = Recording(path)
        steps = recorded_steps(recording)
        for factor in (1.0, 5.0, 0.2, 20.0, 0.05):
            model = learning_model(recording.header)
            if model is None:
                raise SystemExit(f"{path} has no step-time model; serve with a step-time profile")
            scaled = [(shape, seconds * factor) for shape, seconds in steps]
            print(row(f"{path.name}, times x {factor:g}", [scored(model, scaled)], 0))


if __name__ == "__main__":
    main()
