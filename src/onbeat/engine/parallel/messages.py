"""What the first rank's process and those of the others say to each other outside of a step's exchanges.

Pickled, over a socket pair that only the two processes have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onbeat.engine.attention.base import IntArray
from onbeat.engine.device import DeviceConfig
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.input_batch import StepInputs
from onbeat.engine.parallel.shards import Shard


@dataclass(frozen=True, slots=True)
class RankJob:
    """What a rank loads: the first message to its process."""

    config: EngineConfig
    device: DeviceConfig
    """Type and threads of this rank."""
    shard: Shard
    meeting_file: Path
    """Where the ranks find each other (`RankGroup`)."""
    num_blocks: int
    """KV blocks; all ranks have the same."""
    block_size: int


@dataclass(frozen=True, slots=True)
class Scrub:
    """Make these KV blocks finite."""

    block_ids: IntArray


@dataclass(frozen=True, slots=True)
class Started:
    """The process has read its job and goes to the meeting."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rank waits for its first step."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank's last words."""

    message: str
    is_consequence: bool
    """Whether it failed only because another rank did."""


ToRank = StepInputs | Scrub
FromRank = Started | Loaded | Failed


def inputs_for_ranks(inputs: StepInputs, block_size: int) -> StepInputs:
    """Return a step's input without what only sampling needs, and with the used part of the block tables."""
    attention = inputs.attention
    num_blocks = -(-int(attention.context_lens_R.max()) // block_size)
    return StepInputs(
        inputs.token_ids_T,
        inputs.positions_T,
        attention=replace(
            attention,
            slots_R=np.arange(len(attention.slots_R)),
            block_tables_SB=attention.block_tables_SB[attention.slots_R, :num_blocks],
            admissions_S=None,
        ),
        sampling_tokens=inputs.sampling_tokens,
    )
