"""Ranks as threads of this process: they exchange over gloo all the same, and no process has to start."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from onbeat.engine.parallel.group import RankGroup
from onbeat.engine.parallel.shards import Shard

T = TypeVar("T")


def run_ranks(size: int, work: Callable[[RankGroup], T], *, timeout: float = 20.0) -> list[T]:
    """Run `work` on every rank of a new group; return the results by rank, or raise what one raised."""

    def run(rank: int, meeting_file: Path) -> T:
        return work(RankGroup(Shard(rank, size), meeting_file, timeout))

    with TemporaryDirectory() as folder, ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank, Path(folder) / "meeting") for rank in range(size)]
        return [future.result() for future in futures]
