"""What is about to go wrong on a replica that a move would mend, by its last report."""

from __future__ import annotations

from onbeat.core.fleet import ReplicaLimits, ReplicaLoad

LOOK_AHEAD = 1.0
"""Seconds for which streams are to have blocks: without, one is about to be preempted."""
_STILL_STEPS = 4
"""Steps for which a stream stands still while it moves."""
_GUESSED_STEPS = 16
"""That are looked ahead where nobody predicts how long they take."""


def trouble(load: ReplicaLoad, limits: ReplicaLimits, *, num_more: int = 0) -> str:
    """Return what is predicted to go wrong on a replica; nothing where all is well.

    `memory`: its streams will need more blocks within `LOOK_AHEAD` than are free, so that one is preempted.
    `queue`: the first of those that wait gets no blocks. `steps`: they take longer than the tightest TBT.

    Parameters
    ----------
    num_more : streams that are still to come.
    """
    if load.num_free_blocks < _growth(load, limits, num_more):
        return "memory"
    if load.num_wanted_blocks > 0:
        return "queue"
    step = load.decode_step(num_more)
    if step is not None and load.num_decodes + num_more > 1 and step > load.tightest_tbt:
        return "steps"
    return ""


def has_spare_capacity(load: ReplicaLoad, limits: ReplicaLimits, *, num_blocks: int, num_more: int) -> bool:
    """Return whether a replica can take one more stream and still be in no trouble.

    One that has nothing else to do can: a stream is nowhere better off than by itself.

    Parameters
    ----------
    num_blocks : of this one, and of those that are on their way.
    num_more : streams, likewise.
    """
    free = load.num_free_blocks - num_blocks
    if load.num_running == load.num_waiting == 0 and num_more == 1:
        return free >= 0
    is_calm = not trouble(load, limits, num_more=num_more) and load.num_waiting == 0
    return is_calm and free >= 2 * _growth(load, limits, num_more)


def is_worth_it(load: ReplicaLoad, num_tokens: int, *, num_steps: int = 0) -> bool:
    """Return whether a move costs less than what it mends: to wait, and to compute a stream's tokens again.

    Parameters
    ----------
    load : of the source.
    num_tokens : of the stream.
    num_steps : for which it would wait for blocks.
    """
    costs, step = load.costs, load.decode_step()
    if costs is None or step is None:
        return True
    return _STILL_STEPS * step < num_steps * step + costs.seconds(num_tokens, 0)


def _growth(load: ReplicaLoad, limits: ReplicaLimits, num_more: int) -> float:
    """Return the blocks that its streams and so many more will need beyond those that they have."""
    step = load.decode_step(num_more)
    num_steps = _GUESSED_STEPS if step is None else LOOK_AHEAD / max(step, 1e-4)
    return (load.num_decodes + num_more) * num_steps / limits.block_size
