"""Keeps garbage collection from stopping a process that has to be on time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled_memory() -> Iterator[None]:
    """Keep what exists now out of garbage collection while the block runs.

    A full round looks at everything that was ever imported and loaded, which stops a client for over 10 ms
    and an engine that has torch in it for over 100.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
