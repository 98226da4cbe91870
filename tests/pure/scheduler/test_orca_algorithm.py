"""Policy orca runs the very batches of Orca's algorithm 1 (Yu et al., OSDI 2022), written down here again."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.pure.scheduler.driver import Driver, make_config, make_request

BLOCK = 16
MAX_BATCH = 4
UNLIMITED = 4 * 256


@dataclass
class PooledRequest:
    """An entry of the algorithm's request pool."""

    request_id: str
    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_run: int = 0
    """Iterations that it was in."""

    @property
    def max_tokens(self) -> int:
        """K/V slots for its whole life, in whole blocks (Orca's slots are single tokens)."""
        return -(-(self.num_prompt_tokens + self.num_output_tokens) // BLOCK) * BLOCK


class AlgorithmOne:
    """`select` and `schedule` of the paper with one worker, so that no request is still running."""

    def __init__(self, num_slots: int) -> None:
        self.pool: list[PooledRequest] = []
        self.num_reserved = 0
        self.num_slots = num_slots

    def select(self) -> list[PooledRequest]:
        batch: list[PooledRequest] = []
        for request in sorted(self.pool, key=lambda request: request.arrival):
            if len(batch) == MAX_BATCH:
                break
            if request.num_run == 0:
                reserved = self.num_reserved + request.max_tokens
                if reserved > self.num_slots:
                    break
                self.num_reserved = reserved
            batch.append(request)
        return batch

    def iterate(self) -> list[str]:
        batch = self.select()
        for request in batch:
            request.num_run += 1
            if request.num_run == request.num_output_tokens:
                self.num_reserved -= request.max_tokens
                self.pool.remove(request)
        return [request.request_id for request in batch]


LOADS = st.lists(
    st.tuples(st.integers(1, 150), st.integers(1, 60), st.integers(0, 15)), min_size=1, max_size=15
)
"""(prompt tokens, output tokens, steps since the request before)"""


@examples(150)
@given(load=LOADS, num_blocks=st.integers(16, 40))
def test_batches_are_those_of_the_algorithm(load, num_blocks):
    config = make_config(
        "orca", num_blocks=num_blocks, max_num_seqs=MAX_BATCH, max_num_batched_tokens=UNLIMITED
    )
    driver, paper = Driver(config), AlgorithmOne(num_blocks * BLOCK)
    coming, arrival = [], 0
    for index, (num_prompt, num_output, gap) in enumerate(load):
        arrival += gap
        coming.append(PooledRequest(f"r{index}", arrival, num_prompt, num_output))
    requests = list(coming)
    while coming or paper.pool:
        while coming and coming[0].arrival <= driver.now:
            request = coming.pop(0)
            paper.pool.append(request)
            driver.add(
                make_request(
                    request.request_id,
                    request.num_prompt_tokens,
                    request.num_output_tokens,
                    arrival=request.arrival,
                )
            )
        expected = paper.iterate()
        num_steps = len(driver.log)
        driver.step()
        rows = driver.log[-1].rows if len(driver.log) > num_steps else ()
        assert {row.request_id for row in rows} == set(expected)
        assert driver.scheduler.kv.pool.num_used_blocks * BLOCK == paper.num_reserved
    assert paper.num_reserved == 0
    assert driver.scheduler.kv.pool.num_used_blocks == 0
    assert driver.scheduler.table.num_preemptions == 0
    assert all(request.num_run == request.num_output_tokens for request in requests)


@examples(100)
@given(load=LOADS, num_blocks=st.integers(16, 40), depth=st.integers(1, 3))
def test_an_earlier_request_has_run_at_least_as_many_iterations(load, num_blocks, depth):
    """Iteration-level first come, first served: section 4.2's property, with steps in flight too."""
    driver = Driver(make_config("orca", num_blocks=num_blocks), depth=depth)
    num_left = {f"r{index}": num_output for index, (_, num_output, _) in enumerate(load)}
    num_run = dict.fromkeys(num_left, 0)
    coming, arrival = [], 0
    for request_id, (num_prompt, num_output, gap) in zip(num_left, load, strict=True):
        arrival += gap
        coming.append(make_request(request_id, num_prompt, num_output, arrival=arrival))
    while coming or driver.scheduler.num_unfinished:
        while coming and coming[0].arrival <= driver.now:
            driver.add(coming.pop(0))
        num_steps = len(driver.log)
        driver.step()
        for step in driver.log[num_steps:]:
            for row in step.rows:
                num_run[row.request_id] += 1
        unfinished = [run for request_id, run in num_run.items() if run < num_left[request_id]]
        assert unfinished == sorted(unfinished, reverse=True)


def test_reservation_stops_at_the_first_that_does_not_fit():
    """Two of 10 blocks and one of 1: the last would fit beside the first, but is not taken out of turn."""
    config = make_config("orca", num_blocks=16)
    driver = Driver(config)
    for request_id, num_prompt, max_tokens in (("a", 100, 60), ("b", 100, 60), ("c", 8, 8)):
        driver.add(make_request(request_id, num_prompt, max_tokens))
    driver.step()
    assert [row.request_id for row in driver.log[0].rows] == ["a"]
    assert driver.scheduler.kv.pool.num_used_blocks == 10
    while "a" not in driver.finished:
        driver.step()
        assert driver.scheduler.kv.pool.num_used_blocks in (0, 10)
    driver.step()
    assert [row.request_id for row in driver.log[-1].rows] == ["b", "c"]
    assert driver.scheduler.kv.pool.num_used_blocks == 11
    driver.run()
    assert driver.scheduler.kv.pool.num_used_blocks == 0
