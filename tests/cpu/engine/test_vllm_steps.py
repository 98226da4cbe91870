"""What vLLM's workers are told: each step names what they know, and all that left is forgotten."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import EngineDead
from onbeat.core.step import ModelRunnerOutput, SchedulerOutput
from onbeat.engine.core import EngineCore
from onbeat.engine.device import CPU, DeviceConfig
from onbeat.engine.dtypes import DTYPES
from onbeat.engine.executor import ThreadExecutor
from onbeat.engine.vllm.faults import reason
from onbeat.engine.vllm.runner import Translator, VllmRunner
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SpeculationConfig
from tests.fake_step_time import LinearStepTime
from tests.pure.scheduler.driver import make_config, make_request

TOKEN = 7
"""What every row samples."""


class Workers:
    """Stands in for vLLM: keeps what its workers keep, and checks each step against it."""

    most_blocks = 256 // 16

    def __init__(self, *, is_second_runner: bool, num_slots: int, num_drafts: int = 0) -> None:
        self.is_second_runner = is_second_runner
        self.num_slots = num_slots
        self.num_drafts = num_drafts
        self.has_stages = True
        self.known: dict[str, SimpleNamespace] = {}
        self.last: set[str] = set()

    def no_cached_requests(self) -> Any:
        return SimpleNamespace(
            req_ids=[],
            new_block_ids=[],
            num_computed_tokens=[],
            num_output_tokens=[],
            resumed_req_ids=set(),
            all_token_ids={},
            new_token_ids=[],
        )

    def blocks(self, block_ids: Any, slot: int | None, *, is_new: bool = True) -> tuple[list[int], ...]:
        return (list(block_ids), [] if slot is None or not is_new else [slot])

    def new_request(self, request: Any, outputs: Any, blocks: Any, num_computed: int) -> Any:
        return SimpleNamespace(
            request=request, outputs=list(outputs), blocks=blocks, num_computed=num_computed
        )

    def step(
        self, new: Any, cached: Any, num_tokens: Any, finished: set[str], preempted: set[str], drafts: Any
    ) -> Any:
        assert not finished & preempted
        for name in finished | (preempted if self.is_second_runner else set()):
            del self.known[name]
        for each in new:
            name = each.request.request_id
            assert name not in self.known
            self.known[name] = SimpleNamespace(blocks=each.blocks, request=each.request)
        for index, name in enumerate(cached.req_ids):
            state, blocks = self.known[name], cached.new_block_ids[index]
            if name in cached.resumed_req_ids:
                assert not self.is_second_runner
                assert name not in self.last
                state.blocks = blocks
            elif blocks is not None:
                for held, more in zip(state.blocks, blocks, strict=True):
                    held.extend(more)
            if self.has_stages:
                start, prompt = cached.num_computed_tokens[index], list(state.request.prompt_token_ids)
                end = start + num_tokens[name]
                wanted = (prompt + [TOKEN] * end)[start:end] if end > len(prompt) else []
                assert cached.new_token_ids[index] == wanted, "of a prompt they have all"
            if name not in self.last:
                num_outputs = cached.num_output_tokens[index]
                assert len(cached.all_token_ids[name]) == len(state.request.prompt_token_ids) + num_outputs
        slots = [self.known[name].blocks[1] for name in num_tokens]
        if self.num_slots:
            assert all(len(each) == 1 for each in slots)
            assert len({each[0] for each in slots}) == len(slots)
        self.last = set(num_tokens)
        self.drafts = drafts
        return num_tokens


def run(step: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput([[TOKEN] for row in step.rows if row.samples])


@pytest.mark.parametrize("is_second_runner", [False, True])
@pytest.mark.parametrize("num_slots", [0, 8])
@given(data=st.data())
def test_workers_know_what_a_step_names(is_second_runner: bool, num_slots: int, data: Any) -> None:
    """In a KV cache that is too small for all, with requests that are aborted wherever they stand."""
    scheduler = Scheduler(make_config("slo", num_blocks=18), LinearStepTime())
    workers = Workers(is_second_runner=is_second_runner, num_slots=num_slots)
    translator = Translator(workers)  # type: ignore[arg-type]
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=12))
    for index, (prompt, output) in enumerate(lengths):
        scheduler.add(make_request(str(index), prompt, output), 0.0)
    aborts = data.draw(st.dictionaries(st.integers(0, 60), st.integers(0, 11), max_size=6))
    now = 0.0
    for number in range(2000):
        if number in aborts:
            scheduler.abort([str(aborts[number])])
        step = scheduler.schedule(now)
        if step is None:
            break
        translator.change(step)
        told = translator.step(step)
        assert list(told) == [row.request_id for row in step.rows]
        for row in step.rows:
            blocks = workers.known[row.request_id].blocks[0]
            assert len(blocks) * 16 >= row.num_computed_tokens + row.num_new_tokens
        now += 0.01
        output = run(step)
        for row, ids in zip([row for row in step.rows if row.samples], output.sampled_token_ids, strict=True):
            translator.told[row.request_id].row.output_token_ids += ids
        scheduler.update(step, output, now)
    assert not scheduler.num_unfinished
    # What ended with the last step is told with the next one, as onbeat's own engines hear of it.
    scheduler.add(make_request("last", 4, 1), now)
    step = scheduler.schedule(now)
    assert step is not None
    translator.change(step)
    translator.step(step)
    assert set(workers.known) == {"last"} == set(translator.told)


NUM_DRAFTS = 3


def continuation(tokens: list[int]) -> int:
    """Return the token that the model chooses."""
    return (7 * tokens[-1] + len(tokens)) % 101


class Verifier(Workers):
    """Workers that run steps: they keep tokens and KV slots, and make drafts of which some are right.

    Parameters
    ----------
    rng : which drafts are right, and how many there are.
    """

    overlaps, version, graphs, has_failed = False, "0", None, False

    def __init__(self, rng: random.Random) -> None:
        super().__init__(is_second_runner=False, num_slots=0, num_drafts=NUM_DRAFTS)
        self.has_stages = False
        self.rng = rng
        self.slots: dict[int, int] = {}
        """KV slot -> the token that it holds."""
        self.made: dict[str, list[int]] = {}
        self.num_accepted = self.num_rejected = 0

    def begin(self, step: Any) -> bool:
        self.planned = step
        return bool(step)

    def step(self, new: Any, cached: Any, num_tokens: Any, *others: Any) -> Any:
        super().step(new, cached, num_tokens, *others)
        starts = {each.request.request_id: each.num_computed for each in new}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for each in new:
            self.known[each.request.request_id].tokens = [*each.request.prompt_token_ids, *each.outputs]
        return SimpleNamespace(
            rows=[(name, starts[name], num) for name, num in num_tokens.items()], finished_req_ids=set()
        )

    def sample(self, grammar: Any) -> Any:
        assert grammar is None
        sampled = [self._run(*row) for row in self.planned.rows]
        names = [name for name, *_ in self.planned.rows]
        theirs = SimpleNamespace(
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            num_nans_in_logits=None,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
        )
        return SimpleNamespace(result=lambda: theirs)

    def take_drafts(self) -> dict[str, list[int]]:
        return self.made

    def _slot(self, name: str, position: int) -> int:
        blocks = self.known[name].blocks[0]
        return int(blocks[position // 16]) * 16 + position % 16

    def _run(self, name: str, start: int, num: int) -> list[int]:
        tokens, drafts = self.known[name].tokens, self.drafts.get(name, [])
        line = tokens + drafts
        for position in range(start):
            assert self.slots[self._slot(name, position)] == line[position], "KV that was computed is there"
        for position in range(start, start + num):
            self.slots[self._slot(name, position)] = line[position]
        self.made[name] = []
        if start + num < len(line):
            assert not drafts
            return []
        assert start + num == len(line)
        got = [continuation(tokens)]
        for draft in drafts:
            if draft != got[-1]:
                break
            got.append(continuation(tokens + got))
        self.num_accepted += len(got) - 1
        self.num_rejected += len(drafts) - len(got) + 1
        tokens += got
        guess = list(tokens)
        for _ in range(self.rng.randrange(NUM_DRAFTS + 1)):
            guess.append(continuation(guess) if self.rng.random() < 0.8 else 100)
        self.made[name] = guess[len(tokens) :]
        for position in range(len(tokens) - 1, min(len(tokens) - 1 + NUM_DRAFTS, 256)):
            # Who makes drafts writes KV of its own behind the tokens, into slots that are nobody else's.
            self.slots[self._slot(name, position)] = -1
        return got


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_change_no_token(depth: int, seed: int) -> None:
    """With preemptions, and KV slots for drafts that are behind the tokens of a request and its alone."""
    rng = random.Random(seed)
    speculation = SpeculationConfig(
        num_speculative_tokens=NUM_DRAFTS, draft_length="fixed", num_lookahead_tokens=NUM_DRAFTS
    )
    limits = make_config("slo", num_blocks=18, speculation=speculation)
    workers, scheduler = Verifier(rng), Scheduler(limits, LinearStepTime())
    device = DeviceConfig(CPU, DTYPES["float32"], 1)
    runner = VllmRunner(limits, workers, None, device)  # type: ignore[arg-type]
    engine = EngineCore(scheduler, ThreadExecutor(runner), max_in_flight_steps=depth)
    prompts = {}
    for index in range(12):
        sizes = (rng.randrange(1, 60), rng.randrange(1, 40)) if index else (220, 36)  # as long as may be
        request = make_request(str(index), *sizes)
        prompts[str(index)] = request
        engine.add(request)
    got: dict[str, list[int]] = {name: [] for name in prompts}
    counted = [0, 0]
    for _ in range(3000):
        if not engine.has_work:
            break
        made = engine.step()
        for output in () if made is None else made.outputs:
            assert output.error is None
            got[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                counted[0] += output.num_drafted_tokens
                counted[1] += output.num_accepted_tokens
    scheduler.check_invariants()
    for name, request in prompts.items():
        tokens = list(request.prompt_token_ids)
        for _ in range(request.sampling.max_tokens):
            tokens.append(continuation(tokens))
        assert got[name] == tokens[len(request.prompt_token_ids) :], name
    assert scheduler.table.num_preemptions > 0
    assert workers.num_accepted > 0 < workers.num_rejected
    assert counted[0] == workers.num_accepted + workers.num_rejected
    assert counted[1] <= workers.num_accepted  # what is accepted behind a request's end is none of its tokens


class FailingWorkers(Workers):
    """Fails where it is told to."""

    overlaps = False
    version = "0"
    has_failed = False
    graphs = None

    def __init__(self, fails_in: str, error: Exception) -> None:
        super().__init__(is_second_runner=False, num_slots=0)
        self.has_stages = False
        self._fails_in, self._error = fails_in, error

    def step(self, *args: Any) -> Any:
        num_tokens = super().step(*args)
        return SimpleNamespace(finished_req_ids=args[3], num_tokens=num_tokens)

    def begin(self, step: Any) -> bool:
        self._fail("begin")
        return bool(step.num_tokens)

    def sample(self, grammar: Any) -> Any:
        return SimpleNamespace(result=lambda: self._fail("result"))

    def _fail(self, where: str) -> None:
        if where == self._fails_in:
            raise self._error


@pytest.mark.parametrize("fails_in", ["begin", "result"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("a kernel failed\nand more"), "a kernel failed"),
        (MemoryError(), "max-num-batched-tokens"),
    ],
)
def test_a_failed_step_ends_the_engine(fails_in: str, error: Exception, words: str) -> None:
    """vLLM's workers stay in the middle of it: whoever watches the engine starts it again, as our own."""
    runner = make_runner(FailingWorkers(fails_in, error))
    core = EngineCore(Scheduler(runner.limits, LinearStepTime()), ThreadExecutor(runner))
    core.add(make_request("a", 4, 4))
    with pytest.raises(EngineDead, match=words):
        core.step()
    core.shutdown()


@pytest.mark.parametrize("fails_in", ["begin", "result"])
def test_a_step_whose_worker_has_died_says_so(fails_in: str) -> None:
    workers = FailingWorkers(fails_in, RuntimeError("cancelled"))
    runner = make_runner(workers)
    core = EngineCore(Scheduler(runner.limits, LinearStepTime()), ThreadExecutor(runner))
    workers.has_failed = True
    core.add(make_request("a", 4, 4))
    with pytest.raises(EngineDead, match="worker"):
        core.step()
    core.shutdown()


def test_a_dead_worker_ends_an_idle_engine() -> None:
    workers = FailingWorkers("", ValueError())
    runner = make_runner(workers)
    core = EngineCore(
        Scheduler(runner.limits, LinearStepTime()), ThreadExecutor(runner), idle_work=runner.touch_ahead
    )
    assert not core.do_idle_work()
    workers.has_failed = True
    with pytest.raises(EngineDead, match="worker"):
        core.do_idle_work()
    core.shutdown()


def make_runner(workers: FailingWorkers) -> VllmRunner:
    limits = make_config("slo")
    return VllmRunner(limits, workers, None, DeviceConfig(CPU, DTYPES["float32"], 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (KeyError("weights"), "KeyError 'weights'"),
        (ValueError("1 validation error\n  Value error, no such kind [type=x]"), "no such kind"),
        (ValueError("known: " + "Llama, " * 100), "known: Llama"),
    ],
)
def test_what_vllm_says_of_a_fault_is_one_line(raised: Exception, told: str) -> None:
    found = reason(raised)
    assert found.startswith(told)
    assert len(found) < 320
