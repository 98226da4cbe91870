"""What the ranks of a group say to each other within a step: sums and concatenations, over gloo."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onbeat.core.errors import OnbeatError
from onbeat.engine.parallel.shards import Shard

TIMEOUT_SECONDS = 120.0
"""How long a rank waits for the others in one exchange: far more than a layer of the longest step takes."""


class RanksUnreachable(OnbeatError):
    """An exchange failed: another rank has ended or hangs."""


class RankGroup:
    """A rank's connections to the others.

    Made of a process group of its own, not of `init_process_group`: torch has only one of that in a process,
    and it may be the caller's. All connections go over the loopback interface, and the ranks meet through a
    file: no port is open to other machines.

    Parameters
    ----------
    shard : this rank's place.
    meeting_file : where the ranks find each other: a new path in a directory that is private to this user.
    timeout : seconds that an exchange may take.

    Raises
    ------
    RanksUnreachable : the others did not come in time.
    """

    def __init__(self, shard: Shard, meeting_file: Path, timeout: float = TIMEOUT_SECONDS) -> None:
        self.shard = shard
        store: Any = dist.FileStore(str(meeting_file), shard.size)  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=timeout))
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout)
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        self._gloo: Any = _or_unreachable(lambda: gloo(store, shard.rank, shard.size, options))

    def sum_up(self, partial: Tensor) -> Tensor:
        """Add up the ranks' tensors, the same on every rank to the last bit.

        Parameters
        ----------
        partial : contiguous; overwritten where it is of the type that is added in.

        Notes
        -----
        bfloat16 is added in float32 and rounded once, so that the result depends little on the group's size.
        """
        total = partial.float() if partial.dtype == torch.bfloat16 else partial
        _or_unreachable(lambda: self._gloo.allreduce([total]).wait())
        return total.to(partial.dtype)

    def gather(self, part: Tensor) -> list[Tensor]:
        """Return the ranks' tensors, which are contiguous and of one shape; only the first rank gets them."""
        parts = [torch.empty_like(part) for _ in range(self.shard.size)] if self.shard.is_first else []
        options = dist.GatherOptions()
        options.rootRank = 0
        _or_unreachable(lambda: self._gloo.gather([parts] if parts else [], [part], options).wait())
        return parts


def _or_unreachable(exchange: Callable[[], Any]) -> Any:
    try:
        return exchange()
    except RuntimeError as error:  # torch's DistError and its kin are RuntimeErrors
        raise RanksUnreachable(f"an exchange with the other ranks failed: {error}") from error
