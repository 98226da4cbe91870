"""Tiny models that are split among ranks in threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import torch

from onbeat.engine.forward import ForwardPass
from tests.cpu.engine.forwards import MakeForward
from tests.cpu.engine.tiny_models import StateCheckpoint, hf_tiny_model
from tests.cpu.parallel.split import MakeSplit, split_forward


@pytest.fixture
def make_split() -> Iterator[MakeSplit]:
    """Makes what makes a forward pass of a family's tiny model, split among so many ranks."""
    with ExitStack() as stack:

        def prepare(name: str, size: int) -> MakeForward:
            checkpoint = StateCheckpoint(hf_tiny_model(name, torch.float32))

            def make(*, num_blocks: int, block_size: int) -> ForwardPass:
                split = split_forward(
                    checkpoint, size, dtype=torch.float32, num_blocks=num_blocks, block_size=block_size
                )
                return stack.enter_context(closing(split))

            return make

        yield prepare
