"""The sampling settings of each slot, as arrays: a step gathers its rows' by index.

Legend: S request slots, N rows that sample.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onbeat.engine.cuda.packing import StepWords
from onbeat.engine.input_batch import IntArray, StepInputs
from onbeat.engine.random_stream import uniforms
from onbeat.engine.sampling_row import SamplingRow
from onbeat.engine.torch.kernels import DrawParams


class SlotSettings:
    """What is known of the rows in the slots; a row that is new to its slot is looked at once.

    Parameters
    ----------
    num_slots : request slots.
    """

    def __init__(self, num_slots: int) -> None:
        self._rows: list[SamplingRow | None] = [None] * num_slots
        self._temperatures_S = np.zeros(num_slots)
        self._top_ks_S = np.zeros(num_slots, np.int32)
        self._top_ps_S = np.ones(num_slots)
        self._min_ps_S = np.zeros(num_slots)
        self._stream_starts_S = np.zeros(num_slots, np.uint64)
        self._num_prompt_tokens_S = np.zeros(num_slots, np.int64)

    def write(
        self, inputs: StepInputs, parts: StepWords, places: IntArray, drawn_N: NDArray[np.bool_]
    ) -> bool:
        """Write how the step's tokens are chosen; return whether any of them is random.

        Parameters
        ----------
        parts : what the device reads; of tokens that are not in `places`, nothing is drawn.
        places : where each token that is sampled is among those of `parts`.
        drawn_N : of these, which are drawn if their row is random; the others are the most likely ones.
        """
        slots_N, positions_N = inputs.sampling_slots, inputs.sampling_positions
        known = self._rows
        for slot, row in zip(slots_N.tolist(), inputs.sampling_rows, strict=True):
            if known[slot] is not row:
                self._learn(slot, row)
        if inputs.waves is not None:
            waves_N, rows_N = inputs.waves
            slots_N, positions_N = slots_N[rows_N], positions_N[rows_N] + waves_N
        temperatures_N = self._temperatures_S[slots_N] * drawn_N
        if not temperatures_N.any():
            return False
        for part, nothing, wanted_N in (
            (parts.temperatures_N, 0.0, temperatures_N),
            (parts.top_ks_N, 0, self._top_ks_S[slots_N]),
            (parts.top_ps_N, 1.0, self._top_ps_S[slots_N]),
            (parts.min_ps_N, 0.0, self._min_ps_S[slots_N]),
        ):
            part[:] = nothing
            part[places] = wanted_N
        parts.numbers_N[:] = 0.0
        self.write_numbers(parts, places, slots_N, positions_N)
        return True

    def write_numbers(
        self, parts: StepWords, places: IntArray, slots_N: IntArray, positions_N: IntArray
    ) -> None:
        """Write the numbers that tokens are drawn by: all that changes from step to step of the same rows."""
        indices_N = positions_N - self._num_prompt_tokens_S[slots_N]
        parts.numbers_N[places] = uniforms(self._stream_starts_S[slots_N], indices_N)

    def _learn(self, slot: int, row: SamplingRow) -> None:
        params = row.params
        self._rows[slot] = row
        self._temperatures_S[slot] = 0.0 if row.is_greedy else params.temperature
        self._top_ks_S[slot] = min(params.top_k, np.iinfo(np.int32).max)
        self._top_ps_S[slot] = params.top_p
        self._min_ps_S[slot] = params.min_p
        self._stream_starts_S[slot] = row.stream_start
        self._num_prompt_tokens_S[slot] = len(row.prompt_token_ids)


def draw_params(parts: StepWords) -> DrawParams:
    """Return the settings as the device has them."""
    return DrawParams(
        temperatures_R=parts.temperatures_N,
        top_ks_R=parts.top_ks_N,
        top_ps_R=parts.top_ps_N,
        min_ps_R=parts.min_ps_N,
        numbers_R=parts.numbers_N,
    )
