"""Steps that are launched while others run give the tokens of steps that are waited for one by one."""

from __future__ import annotations

import functools
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from onbeat.core.request import Request, SamplingParams
from onbeat.core.step import AdmittedRequest, BatchShape, ScheduledRequest, SchedulerOutput
from onbeat.engine.core import EngineCore
from onbeat.engine.cuda.forward import CudaForward, CudaOptions, kernel_sizes
from onbeat.engine.cuda.graphs import EagerGraphs
from onbeat.engine.cuda.stream import DeviceStream
from onbeat.engine.executor import PendingStep, ThreadExecutor
from onbeat.engine.forward import ForwardPass
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.profiling.batches import BatchRow, MeasuredBatch
from onbeat.engine.profiling.measure import StepTimer
from onbeat.engine.sampler import Sampler
from onbeat.engine.torch.forward import TorchForward
from onbeat.engine.torch.weights import TorchWeights, load_weights
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig
from tests.cpu.engine.cuda.fake_stream import FakeStream
from tests.cpu.engine.reference_kernels import ReferenceKernels
from tests.cpu.engine.tiny_models import StateCheckpoint, hf_tiny_model, random_prompt, tiny_model
from tests.pure.scheduler.driver import make_config

CPU = torch.device("cpu")
VOCAB_SIZE = 211
MAX_NUM_SEQS, MAX_MODEL_LEN, NUM_BLOCKS = 6, 160, 60
SETTINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=1.5, top_k=20, seed=4),
    SamplingParams(temperature=1.0, top_p=0.9, seed=5),
    SamplingParams(temperature=1.0, min_p=0.05, seed=6),
)
SERIAL_SETTINGS = (
    SamplingParams(temperature=0.0, num_logprobs=2),
    SamplingParams(temperature=0.9, repetition_penalty=1.3, seed=7),
    SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=(1, 2, 3)),
)


def requests_of(settings: Sequence[SamplingParams], max_tokens: int) -> list[Request]:
    """Return a request of each kind."""
    return [
        Request(
            request_id=f"r{index}",
            prompt_token_ids=tuple(random_prompt(9 + index)),
            sampling=replace(each, max_tokens=max_tokens),
        )
        for index, each in enumerate(settings)
    ]


@functools.cache
def weights() -> TorchWeights:
    return load_weights(StateCheckpoint(hf_tiny_model("llama3", torch.float64)), torch.float64, CPU)


def on_fake_device(stream: DeviceStream) -> CudaForward:
    options = CudaOptions(
        num_blocks=NUM_BLOCKS,
        block_size=16,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=64,
    )
    kernels = ReferenceKernels(kernel_sizes(weights(), options))
    return CudaForward(weights(), kernels, EagerGraphs(), options, stream=stream)


def on_reference() -> TorchForward:
    return TorchForward(tiny_model("llama3").weights, num_blocks=NUM_BLOCKS, block_size=16)


def make_runner(forward: ForwardPass) -> ModelRunner:
    limits = make_config(num_blocks=NUM_BLOCKS, max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN)
    return ModelRunner(limits, forward, Sampler(VOCAB_SIZE))


@dataclass
class Live:
    request: Request
    max_tokens: int
    num_tokens: int
    """Those that are not known yet included."""
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)


class Plan:
    """Makes up steps that do not depend on tokens: requests come, go on, end and are dropped at any time."""

    def __init__(self, seed: int, settings: tuple[SamplingParams, ...]) -> None:
        self.chance = random.Random(seed)
        self.settings = settings
        self.live: dict[str, Live] = {}
        self.free = list(range(NUM_BLOCKS))
        self.chance.shuffle(self.free)
        self.count = 0

    def steps(self, num_steps: int) -> list[SchedulerOutput]:
        return [self._step(step_id) for step_id in range(num_steps)]

    def _step(self, step_id: int) -> SchedulerOutput:
        released = [
            key
            for key, live in self.live.items()
            if live.num_tokens - len(live.request.prompt_token_ids) >= live.max_tokens
            or self.chance.random() < 0.03
        ]
        for key in released:
            self.free += self.live.pop(key).blocks
            self.chance.shuffle(self.free)
        admitted, rows = [], []
        if len(self.live) < MAX_NUM_SEQS and self.chance.random() < 0.5:
            admitted.append(self._admit())
        for key, live in self.live.items():
            if self.chance.random() < 0.1:
                continue
            num_new = min(live.num_tokens - live.num_computed, self.chance.choice((1, 7, 30)))
            samples = live.num_computed + num_new == live.num_tokens
            rows.append(ScheduledRequest(key, live.num_computed, num_new, self._grow(live, num_new), samples))
            live.num_computed += num_new
            live.num_tokens += samples
        self.chance.shuffle(rows)
        return SchedulerOutput(step_id, tuple(rows), tuple(admitted), tuple(released), BatchShape())

    def _admit(self) -> AdmittedRequest:
        prompt = tuple(random_prompt(self.chance.randrange(1, 50)))
        sampling = self.chance.choice(self.settings)
        request = Request(request_id=f"r{self.count}", prompt_token_ids=prompt, sampling=sampling)
        self.count += 1
        self.live[request.request_id] = Live(request, self.chance.randrange(1, 30), len(prompt))
        return AdmittedRequest(request, (), ())

    def _grow(self, live: Live, num_new: int) -> tuple[int, ...]:
        missing = -(-(live.num_computed + num_new) // 16) - len(live.blocks)
        new = tuple(self.free.pop() for _ in range(missing))
        live.blocks += new
        return new


def run(runner: ModelRunner, steps: list[SchedulerOutput], depth: int) -> dict[str, list[int]]:
    """Run planned steps, so many under way at once; return each request's tokens."""
    tokens: dict[str, list[int]] = {}
    under_way: deque[tuple[SchedulerOutput, PendingStep]] = deque()

    def take() -> None:
        scheduled, pending = under_way.popleft()
        output = pending.result()
        assert not output.failed
        sampling = [row.request_id for row in scheduled.rows if row.samples]
        for key, ids in zip(sampling, output.sampled_token_ids, strict=True):
            tokens.setdefault(key, []).extend(ids)

    for scheduled in steps:
        if len(under_way) == depth:
            take()
        under_way.append((scheduled, runner.launch(scheduled)))
    while under_way:
        take()
    return tokens


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_those_of_steps_one_by_one(seed: int) -> None:
    steps = Plan(seed, SETTINGS).steps(60)
    stream = FakeStream()
    overlapped = run(make_runner(on_fake_device(stream)), steps, depth=2)
    assert stream.most_behind >= 2
    assert overlapped == run(make_runner(on_reference()), steps, depth=1)


@pytest.mark.parametrize("seed", range(8))
def test_steps_that_need_the_host_fit_in_between(seed: int) -> None:
    steps = Plan(seed, 4 * SETTINGS + SERIAL_SETTINGS).steps(60)
    stream = FakeStream()
    overlapped = run(make_runner(on_fake_device(stream)), steps, depth=2)
    assert stream.most_behind >= 2
    assert overlapped == run(make_runner(on_reference()), steps, depth=1)


def serve(forward: ForwardPass, depth: int, make: Callable[[int], SamplingParams]) -> list[list[int]]:
    limits = SchedulerConfig(
        policy="sarathi",
        num_blocks=NUM_BLOCKS // 3,  # so that requests are preempted
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=32,
    )
    scheduler = Scheduler(limits)
    core = EngineCore(scheduler, ThreadExecutor(make_runner(forward)), max_in_flight_steps=depth)
    tokens: dict[str, list[int]] = {}
    for index in range(10):
        sampling = replace(make(index), max_tokens=40)
        prompt = tuple(random_prompt(20 + 5 * index))
        tokens[f"r{index}"] = []
        core.add(Request(request_id=f"r{index}", prompt_token_ids=prompt, sampling=sampling))
    while core.has_work:
        message = core.step()
        for output in [] if message is None else message.outputs:
            assert output.error is None, output.error
            tokens[output.request_id] += output.new_token_ids
    core.shutdown()
    assert scheduler.table.num_preemptions
    return list(tokens.values())


def test_a_whole_engine_serves_the_same_tokens_in_two_threads() -> None:
    def sampling(index: int) -> SamplingParams:
        return (SETTINGS + SERIAL_SETTINGS)[index % 8]

    stream = FakeStream()
    overlapped = serve(on_fake_device(stream), 2, sampling)
    assert stream.most_behind >= 2
    assert overlapped == serve(on_reference(), 1, sampling)


class HeldStream(FakeStream):
    """Holds who queues more than a number of pieces of work, and does none until then."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 10**9
        self.may_queue = threading.Event()
        self.is_held = threading.Event()

    def run(self, work: Callable[[], object]) -> None:
        if self.num_queued >= self.most:
            self.is_held.set()
            self.may_queue.wait(30)
        super().run(work)

    def work_until(self, count: int) -> None:
        if self.most < 10**9:
            self.is_held.wait(30)
        super().work_until(count)


def test_a_steps_tokens_do_not_wait_until_the_next_one_is_queued() -> None:
    stream = HeldStream()
    runner = make_runner(on_fake_device(stream))
    stream.most = stream.num_queued + 1
    request = Request(request_id="r", prompt_token_ids=tuple(random_prompt(20)), sampling=SETTINGS[0])
    chunk = ScheduledRequest("r", 0, 20, (), samples=True)
    admitted = (AdmittedRequest(request, (), (3, 4)),)
    executor = ThreadExecutor(runner)
    first = executor.submit(SchedulerOutput(0, (chunk,), admitted, (), BatchShape()))
    second = executor.submit(SchedulerOutput(1, (decode("r", 20),), (), (), BatchShape()))
    assert len(first.result(30).sampled_token_ids[0]) == 1
    assert not second.done()
    stream.may_queue.set()
    assert len(second.result(30).sampled_token_ids[0]) == 1
    executor.shutdown()


def test_steps_are_timed_by_the_devices_clock() -> None:
    runner = make_runner(on_fake_device(FakeStream()))
    timer = StepTimer(runner, num_blocks=NUM_BLOCKS)
    times = [timer.time(MeasuredBatch(rows)) for rows in ((BatchRow(20, 1),) * 3, (BatchRow(0, 30),))]
    timer.close()
    assert times == [1.0, 1.0]


def plant_nan(forward: CudaForward, block: int) -> None:
    with torch.inference_mode():
        forward._state.kv[0].v_BKSH[block].fill_(torch.nan)


def decode(key: str, position: int) -> ScheduledRequest:
    return ScheduledRequest(key, position, 1, (), samples=True)


def test_a_row_that_fails_fails_alone_and_its_blocks_serve_again() -> None:
    forward = on_fake_device(FakeStream())
    runner = make_runner(forward)
    prompt = tuple(random_prompt(20))
    requests = {
        key: Request(request_id=key, prompt_token_ids=prompt, sampling=SETTINGS[0]) for key in ("bad", "good")
    }
    chunks = [ScheduledRequest(key, 0, 20, (), samples=True) for key in requests]
    admitted = (
        AdmittedRequest(requests["bad"], (), (3, 4)),
        AdmittedRequest(requests["good"], (), (7, 8)),
    )
    first = runner.launch(SchedulerOutput(0, tuple(chunks), admitted, (), BatchShape())).result()
    plant_nan(forward, block=3)
    both = tuple(decode(key, 20) for key in requests)
    failing = runner.launch(SchedulerOutput(1, both, (), (), BatchShape()))
    behind = runner.launch(
        SchedulerOutput(2, tuple(decode(key, 21) for key in requests), (), (), BatchShape())
    )
    output = failing.result()
    assert output.failed is not None
    assert list(output.failed) == ["bad"]
    assert "invalid logits" in output.failed["bad"]
    assert output.sampled_token_ids[0] == []
    assert len(output.sampled_token_ids[1]) == 1
    assert behind.result().failed is not None
    again = Request(request_id="again", prompt_token_ids=prompt, sampling=SETTINGS[0])
    row = ScheduledRequest("again", 0, 20, (), samples=True)
    after = SchedulerOutput(3, (row,), (AdmittedRequest(again, (), (3, 4)),), ("bad",), BatchShape())
    assert runner.launch(after).result().sampled_token_ids == [first.sampled_token_ids[1]]


def test_a_row_that_fails_after_its_request_left_leaves_clean_blocks() -> None:
    forward = on_fake_device(FakeStream())
    runner = make_runner(forward)
    prompt = tuple(random_prompt(20))
    request = Request(request_id="bad", prompt_token_ids=prompt, sampling=SETTINGS[0])
    chunk = ScheduledRequest("bad", 0, 20, (), samples=True)
    admitted = (AdmittedRequest(request, (), (3, 4)),)
    runner.launch(SchedulerOutput(0, (chunk,), admitted, (), BatchShape())).result()
    plant_nan(forward, block=3)
    failing = runner.launch(SchedulerOutput(1, (decode("bad", 20),), (), (), BatchShape()))
    runner.launch(SchedulerOutput(2, (), (), ("bad",), BatchShape())).result()
    assert failing.result().failed is not None
    runner.launch(SchedulerOutput(3, (), (), (), BatchShape()))
    forward._stream.mark().wait()
    assert all(part.isfinite().all() for layer in forward._state.kv for part in layer)
