"""How the KV of layers with a sliding window is kept: the one declaration, for engines and simulations.

Layers with a window read the last tokens only. They go in groups of as many as attend to everything, each
with block tables of its own, and give back what their windows have passed (Zhang et al., "Jenga", SOSP 2025).
"""

from __future__ import annotations

from typing import NamedTuple

_LEAST_SHARE = 8
"""Of a model whose layers all have windows, one of so many keeps the KV of all tokens, as if it had none."""

_WINDOWS_SHARE = 8
"""Of a KV cache, one request's windows hold one part of so many, where nobody says how large steps are."""


class KVGroups(NamedTuple):
    """How a model's layers share KV blocks, each of which belongs to one group."""

    size: int
    """Numbers of a token that one block has room for."""
    num_windowed: int
    """Groups whose windows give KV back, beside the first, which keeps all."""
    num_layers: int
    """Layers with a window in one group."""

    @classmethod
    def of(cls, full: int, sliding: int, layer: int) -> KVGroups:
        """Return the groups of a model.

        A block has room for all layers that attend to everything. As many with a window go in a group as fit
        there; one more, with blocks as large, where the room that they leave is too much. What no group fills
        is memory for nothing: at most a seventh of all, or there are no groups.

        Parameters
        ----------
        full, sliding : numbers that layers which attend to everything, and those with a window, keep of a
            token.
        layer : that one of the latter keeps.
        """
        num_sliding = sliding // layer
        fewest = full // layer if full else -(-num_sliding // _LEAST_SHARE)
        for num_layers in range(max(fewest, 1), max(fewest, -(-full // layer)) + 1):
            size, num_windowed = max(full, num_layers * layer), -(-num_sliding // num_layers) - (not full)
            if 7 * (full + sliding) >= 6 * size * (1 + num_windowed):
                return cls(size, num_windowed, num_layers)
        return cls(full + sliding, 0, num_sliding)

    def windows(self, window: int | None, longest: int) -> dict[str, int]:
        """Return the fields of `SchedulerConfig` that say so; none where nothing would be given back.

        Parameters
        ----------
        window : tokens that the layers with one read.
        longest : tokens of the longest request.
        """
        if not self.num_windowed or window is None or window >= longest:
            return {}
        return {"num_tables": 1 + self.num_windowed, "window_length": window}


class KVWindows(NamedTuple):
    """What a request holds beside the blocks of its first table; nothing where no windows give KV back."""

    num_groups: int = 0
    most_blocks: int = 0
    """Blocks of tokens that it holds at most in each of the groups."""

    @classmethod
    def of(cls, num_tables: int, num_tokens: int, block_size: int) -> KVWindows:
        """Return what a request holds whose windows, and the tokens of a step, have so many tokens."""
        return cls(num_tables - 1, num_tokens // block_size + 2) if num_tables > 1 else cls()

    @staticmethod
    def step_beside(num_tables: int, num_tokens: int, num_blocks: int, block_size: int, longest: int) -> int:
        """Return the tokens of a step that go with a KV cache: a window holds those of a step beside its own.

        Parameters
        ----------
        num_tables : two or more.
        num_tokens : of a window.
        num_blocks : of each table.
        longest : blocks of tokens of the longest request that is asked for; 0 where none is.
        """
        num_pages = num_blocks * num_tables
        most = min(num_pages // _WINDOWS_SHARE, num_pages - longest) // (num_tables - 1)
        return (most - 2) * block_size - num_tokens

    def num_blocks(self, num_token_blocks: int, num_requests: int = 1) -> int:
        """Return the blocks of all tables that requests of so many blocks of tokens, in sum, hold."""
        return num_token_blocks + min(num_token_blocks, self.most_blocks * num_requests) * self.num_groups

    def num_token_blocks(self, num_blocks: int) -> int:
        """Return the most blocks of tokens of a request that holds so many blocks of all tables."""
        # Behind a window's blocks, only the layers that attend to everything hold more.
        return max(num_blocks // (self.num_groups + 1), num_blocks - self.most_blocks * self.num_groups)
