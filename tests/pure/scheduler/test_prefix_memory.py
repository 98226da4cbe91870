"""Which replica holds which blocks, as a router remembers it."""

from __future__ import annotations

import tracemalloc

import pytest

from onbeat.scheduler.cluster.routing import PrefixMemory


def held(memory: PrefixMemory, blocks) -> dict[int, int]:
    """Return how many of some blocks each replica holds."""
    holders = memory.look_up(blocks)
    return {replica: holders.num_held(replica) for replica in holders.longest_first()}


class TestPrefixes:
    def test_the_longest_prefix_of_each_is_found(self):
        memory = PrefixMemory()
        for replica in range(3):
            memory.join(replica, 100)
        memory.send(0, (1, 2, 3, 4))
        memory.send(2, (1, 2))
        assert held(memory, (1, 2, 3, 9)) == {0: 3, 2: 2}
        assert held(memory, (9, 1)) == {}
        memory.forget(0)
        assert held(memory, (1, 2, 3)) == {2: 2}

    def test_what_a_replica_has_no_room_for_is_evicted_last_block_first(self):
        memory = PrefixMemory()
        memory.join(0, 9)
        memory.send(0, tuple(range(6)))
        memory.send(0, tuple(range(100, 106)))
        assert held(memory, tuple(range(6))) == {0: 3}
        assert held(memory, tuple(range(100, 106))) == {0: 6}

    def test_a_block_that_one_replica_holds_takes_as_much_however_many_replicas_there_are(self):
        """By far the most blocks are the ends of prompts, which nobody shares."""
        taken = []
        for replica in (0, 10_000):
            memory = PrefixMemory()
            memory.join(replica, 1000)
            blocks = tuple(range(1000))
            tracemalloc.start()
            memory.send(replica, blocks)
            taken.append(tracemalloc.get_traced_memory()[0])
            tracemalloc.stop()
        assert taken[1] == pytest.approx(taken[0], rel=0.05)
