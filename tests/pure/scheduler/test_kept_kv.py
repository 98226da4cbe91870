"""KV that is kept for a request to come: bounded in memory and time, and never in anybody's way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onbeat.scheduler.replica.kv import BlockPool
from tests.pure.scheduler.driver import Driver, make_config, make_request


def ended(
    pool: BlockPool, name: int, num_blocks: int, kept_until: float = 0.0, tenant: str = ""
) -> list[int]:
    """Let a request fill blocks and end; return these."""
    block_ids = pool.allocate(num_blocks)
    for place, block_id in enumerate(block_ids):
        pool.register(block_id, name * 1000 + place)
    pool.release(block_ids, kept_until, tenant)
    pool.check_invariants()
    return block_ids


def held(pool: BlockPool, name: int, num_blocks: int) -> int:
    return sum(pool.id_of_hash.get(name * 1000 + place) is not None for place in range(num_blocks))


def test_kept_blocks_outlast_others_that_were_used_later() -> None:
    pool = BlockPool(20)
    ended(pool, 1, 5, kept_until=9.0)
    for name in range(2, 9):
        ended(pool, name, 6)
    assert held(pool, 1, 5) == 5
    pool.kept.expire(9.0)
    assert len(pool.kept.until) == 0
    for name in range(9, 13):
        ended(pool, name, 6)
    assert held(pool, 1, 5) == 0


def test_they_are_free_space_all_the_same_and_a_tail_goes_before_its_head() -> None:
    pool = BlockPool(20)
    kept = ended(pool, 1, 6, kept_until=9.0)
    assert (pool.num_free_blocks, len(pool.kept.until)) == (20, 6)
    assert pool.num_idle(kept) == 6
    pool.allocate(18)
    assert [pool.id_of_hash.get(1000 + place) is not None for place in range(6)] == [True] * 2 + [False] * 4
    pool.check_invariants()


def test_what_is_used_again_is_kept_no_more() -> None:
    pool = BlockPool(20)
    kept = ended(pool, 1, 5, kept_until=9.0)
    pool.hold(kept)
    assert (len(pool.kept.until), pool.num_used_blocks) == (0, 5)
    pool.kept.expire(99.0)
    pool.release(kept)
    pool.check_invariants()
    assert len(pool.kept.until) == 0


def test_ten_thousand_calls_that_nobody_follows_keep_within_the_bound_and_leave_nothing() -> None:
    pool = BlockPool(1000)
    for name in range(10_000):
        ended_at = 0.01 * name
        pool.kept.expire(ended_at)
        block_ids = pool.allocate(7)
        for place, block_id in enumerate(block_ids):
            pool.register(block_id, name * 1000 + place)
        pool.release(block_ids, ended_at + 60.0)
        assert len(pool.kept.until) <= pool.kept.most == 300
        assert len(pool.kept.ends) <= 2 * pool.kept.most
    pool.kept.expire(1e9)
    assert (len(pool.kept.until), pool.kept.ends, pool.num_used_blocks) == (0, [], 0)
    pool.check_invariants()


def test_tenants_share_what_may_be_kept() -> None:
    pool = BlockPool(200)
    for name in range(20):
        ended(pool, name, 6, kept_until=900.0, tenant="greedy")
    assert len(pool.kept.until) == pool.kept.most == 60
    for name in range(20, 23):
        ended(pool, name, 6, kept_until=9.0, tenant="other")
    assert {tenant: len(ids) for tenant, ids in pool.kept.of_tenant.items()} == {"greedy": 42, "other": 18}
    for name in range(23, 60):
        ended(pool, name, 6, kept_until=9.0, tenant="other")
        ended(pool, 100 + name, 3, kept_until=9.0, tenant=f"small {name % 2}")
    assert max(map(len, pool.kept.of_tenant.values())) <= 21
    assert len(pool.kept.of_tenant) == 4
    pool.kept.expire(9.0)
    assert set(pool.kept.of_tenant) == {"greedy"}
    pool.kept.expire(900.0)
    assert (pool.kept.of_tenant, len(pool.kept.until)) == ({}, 0)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9), st.integers(0, 12)), max_size=40))
def test_no_block_is_lost(calls: list[tuple[int, int, int]]) -> None:
    pool = BlockPool(30)
    for now, (name, size, kept_for) in enumerate(calls):
        pool.kept.expire(float(now))
        known = [pool.id_of_hash.get(name * 1000 + place) for place in range(size)]
        cached = [each for each in known[: [*known, None].index(None)] if each is not None]
        pool.hold(cached)
        block_ids = cached + pool.allocate(size - len(cached))
        for place, block_id in enumerate(block_ids):
            pool.register(block_id, name * 1000 + place)
        pool.check_invariants()
        pool.release(block_ids, now + kept_for if kept_for else 0.0, str(name % 3))
        pool.check_invariants()
    assert pool.num_used_blocks == 0


def test_a_call_finds_what_the_call_before_it_left_though_others_came_between() -> None:
    def cached(kept_for: float) -> int:
        driver = Driver(make_config(num_blocks=24))
        driver.add(make_request("a", 64, 2, salt="job", kept_for=kept_for))
        driver.run()
        for number in range(4):
            driver.add(make_request(f"other {number}", 200, 2, arrival=driver.now))
            driver.run()
        driver.add(make_request("b", 100, 2, salt="job", arrival=driver.now))
        driver.run()
        driver.scheduler.check_invariants()
        return driver.scheduler.table.num_prefix_hits

    assert (cached(0.0), cached(1e6), cached(1e-6)) == (0, 64, 0)
