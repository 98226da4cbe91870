"""What planning asks about KV memory, whoever manages it: our own manager, or another engine's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from onbeat.scheduler.replica.request_state import RequestState


class PoolView(Protocol):
    """Blocks: how many there are, and which of them are free or shared."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that requests could be given now."""
        ...

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """Count the blocks that a request with this prefix would take out of the free space."""
        ...

    def exclusive_ids(self, block_ids: Iterable[Any]) -> list[int]:
        """Return the blocks that preempting a request would free.

        Parameters
        ----------
        block_ids : `RequestState.block_ids`.
        """
        ...


class KVView(Protocol):
    """KV memory as a `StepPlan` sees it. Nothing here changes it."""

    @property
    def pool(self) -> PoolView:
        """Its blocks."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens a block holds."""
        ...

    num_tables: int  # blocks that one more block of tokens takes

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that hold so many tokens."""
        ...

    def match(self, state: RequestState) -> list[int]:
        """Return the longest cached prefix of a waiting request, as block ids."""
        ...
