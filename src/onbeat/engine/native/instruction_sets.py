"""Which instruction set computes a model: the one that takes least time for its steps, timed once and kept.

A processor that has several is not always quickest with the newest. Which one is depends on the model's
shapes and number formats, on the threads, and on what wide registers cost the processor.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onbeat.core.errors import ConfigError, OnbeatError
from onbeat.engine.input_batch import AttentionBatch, StepInputs
from onbeat.engine.native.forward import NativeForward, NativeModel
from onbeat.engine.native.packing import NativeWeights
from onbeat.files import read
from onbeat.typed import Positive, Table

DECODES = (1, 8, 32)
PROMPT_TOKENS = 512
_FEWEST_PROMPT_TOKENS = 128
_PROMPT_PRODUCTS = 2**32
"""Of weights and tokens, at most, that a prompt is timed with, unless it would be of fewer tokens."""
_DECODE_BYTES = 32 << 20
"""Of weights that decodes are timed with, where the model has as many: more than caches of the second level
keep, for in the model's own steps they come from further away."""
_LEAST_BYTES = 4 << 20
"""Of a model's weights; in steps of a smaller one other things take longer than products."""
_CONTEXT_TOKENS = 64
_LEAST_GAIN = 0.1
"""By so much another set must be quicker than the first: less is chance, and replicas shall agree."""
_REPEATS = 2
"""Of each kind of step, beside the first one, which brings threads and memory to life."""
_CONFIRMATIONS = 10
"""Repeats where a set seems quicker than the first: on a busy machine it may be none."""


class StepKind(NamedTuple):
    """A step that sets are timed with: of the first layers of a model, without logits."""

    num_rows: int
    row_tokens: int
    """New tokens of each row: 1 of a decode."""
    num_layers: int


Timer = Callable[[str, StepKind], float]
"""Runs a step on an instruction set; returns the seconds that it took."""
SetTimes = Mapping[str, Sequence[float]]
"""Seconds of each kind of step by instruction set; of one that was given up, of fewer kinds. The first set is
the one that others are compared with."""


class SetChoice(NamedTuple):
    """An instruction set, and why it was taken."""

    instruction_set: str
    reason: str


def choose_instruction_set(model: NativeModel, *, processor: str, directory: Path) -> SetChoice:
    """Return the quickest set for a model, as timed before on such a machine, or now.

    Parameters
    ----------
    model : what runs.
    processor : its name.
    directory : where times are kept.
    """
    names = model.library.instruction_sets
    if len(names) == 1:
        return SetChoice(names[0], "the only one here")
    if model.weights.num_bytes < _LEAST_BYTES:
        return SetChoice(names[0], "the newest; the model is too small to time others")
    kinds = step_kinds(model.weights)

    def measure() -> SetTimes:
        with closing(InstructionSetTimer(model, kinds)) as timer:
            return time_with_care(names, kinds, timer.run)

    return settle_set(names, SetTimesFile(directory, _key(model, processor, kinds)), measure)


def _key(model: NativeModel, processor: str, kinds: Sequence[StepKind]) -> dict[str, Any]:
    """Return all that times depend on."""
    library, config, weights, options = model
    return {
        "library": hashlib.sha256(library.path.read_bytes()).hexdigest(),
        "processor": processor,
        "variants": library.instruction_sets,
        "steps": kinds,
        "threads": options.num_threads,
        "dtype": str(options.dtype),
        "activation_quantization": options.activation_quantization,
        "batch_invariant": options.batch_invariant,
        "block_size": options.block_size,
        "model": asdict(config),
        "layouts": [str(matrix.layout) for matrix in weights.layers[0].matrices],
    }


def step_kinds(weights: NativeWeights) -> list[StepKind]:
    """Return decodes of few to many requests in some layers, and a prompt in one."""
    first = weights.layers[0].matrices
    layer_bytes = sum(matrix.num_bytes for matrix in first)
    num_layers = min(max(-(-_DECODE_BYTES // layer_bytes), 1), len(weights.layers))
    num_weights = sum(matrix.num_outputs * matrix.num_inputs for matrix in first)
    prompt = min(max(_PROMPT_PRODUCTS // num_weights, _FEWEST_PROMPT_TOKENS), PROMPT_TOKENS)
    return [*(StepKind(num_rows, 1, num_layers) for num_rows in DECODES), StepKind(1, prompt, 1)]


class InstructionSetTimer:
    """The first layers of a model on each instruction set, each with threads and a KV cache of its own.

    Parameters
    ----------
    model : what runs.
    kinds : the steps that will be timed.
    """

    def __init__(self, model: NativeModel, kinds: Sequence[StepKind]) -> None:
        self._model = model
        self._block_size = block_size = model.options.block_size
        blocks = max(kind.num_rows * _row_blocks(kind, block_size) for kind in kinds)
        self._options = replace(
            model.options, num_blocks=blocks, num_tables=1, num_slots=max(kind.num_rows for kind in kinds)
        )
        self._forwards: dict[tuple[str, int], NativeForward] = {}

    def run(self, name: str, kind: StepKind) -> float:
        """Run a step on a set; return its seconds."""
        key = name, kind.num_layers
        if key not in self._forwards:
            options = replace(self._options, instruction_set=name)
            first = self._model.first_layers(kind.num_layers)
            self._forwards[key] = NativeForward(first._replace(options=options))
        return self._forwards[key].time(_step_inputs(kind, self._block_size, self._model.config.vocab_size))

    def close(self) -> None:
        """Let threads and memory go."""
        for forward in self._forwards.values():
            forward.close()


def _row_blocks(kind: StepKind, block_size: int) -> int:
    return -(-max(kind.row_tokens, _CONTEXT_TOKENS) // block_size)


def _step_inputs(kind: StepKind, block_size: int, vocab_size: int) -> StepInputs:
    """Rows at the end of their contexts, each in blocks of its own."""
    num_rows, num_tokens = kind.num_rows, kind.num_rows * kind.row_tokens
    context = max(kind.row_tokens, _CONTEXT_TOKENS)
    num_blocks = _row_blocks(kind, block_size)
    positions_RT = np.tile(np.arange(context - kind.row_tokens, context), (num_rows, 1))
    first_slots_R = np.arange(num_rows) * num_blocks * block_size
    return StepInputs(
        token_ids_T=np.arange(num_tokens) % vocab_size,
        positions_T=positions_RT.ravel(),
        attention=AttentionBatch(
            query_lens_R=np.full(num_rows, kind.row_tokens),
            context_lens_R=np.full(num_rows, context),
            slots_R=np.arange(num_rows),
            block_tables_SB=np.arange(num_rows * num_blocks, dtype=np.int32).reshape(num_rows, num_blocks),
            slot_mapping_T=(first_slots_R[:, None] + positions_RT).ravel(),
        ),
    )


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
        again = time_sets([names[0], chosen], kinds, run, gives_up=False, repeats=_CONFIRMATIONS)
        times |= {name: list(map(min, times[name], seconds)) for name, seconds in again.items()}
    return times


def choose_set(times: SetTimes) -> SetChoice:
    """Take the set with the best score; the first one unless another is quicker by `_LEAST_GAIN`."""
    first, *others = times
    scores = _scores(times)
    num_kinds = len(times[first])
    complete = [name for name in others if len(times[name]) == num_kinds]
    quickest = min(complete, key=lambda name: scores[name], default=first)
    chosen = quickest if scores[quickest] <= 1 - _LEAST_GAIN else first
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


class _Kept(Table):
    key: dict[str, Any]
    seconds: dict[str, list[Positive]]


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
            kept = read(_Kept, self.path)
        except ConfigError:
            return None
        times = kept.seconds
        most = len(next(iter(times.values()), ()))
        is_whole = kept.key == self._key and all(0 < len(own) <= most for own in times.values())
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


def settle_set(names: Sequence[str], file: SetTimesFile, measure: Callable[[], SetTimes]) -> SetChoice:
    """Choose by the times that were kept, else by new ones. Whatever goes wrong, the first set can run.

    Parameters
    ----------
    names : what is timed; the first is what others are compared with.
    file : where times are kept.
    measure : times them.
    """
    times: SetTimes | None = file.read()
    source, caveat = f"as timed before ({file.path})", ""
    if times is None or list(times) != list(names):
        source = "as timed now"
        try:
            measured = measure()
        except (OnbeatError, OSError, MemoryError) as error:
            return SetChoice(names[0], f"the newest, for the sets could not be timed ({error})")
        try:
            times = file.keep(measured)
        except OSError as error:
            times, caveat = measured, f"; this cannot be kept for the next start ({error})"
    chosen, compared = choose_set(times)
    return SetChoice(chosen, f"{source}: {compared}{caveat}")
