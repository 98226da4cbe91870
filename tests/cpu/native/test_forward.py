"""Steps in the native engine: instruction sets, threads, shared blocks, sampling, NaN, malformed steps."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from onbeat.core.errors import ConfigError, EngineError
from onbeat.core.request import Request, SamplingParams
from onbeat.core.step import AdmittedRequest, BatchShape, ScheduledRequest, SchedulerOutput
from onbeat.engine.engine_config import Quantization
from onbeat.engine.input_batch import InputBatch, StepInputs
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.native.forward import NativeForward
from onbeat.engine.native.library import NativeLibrary
from onbeat.engine.sampler import Sampler
from tests.cpu.engine.forwards import MakeForward, on_native, on_torch
from tests.cpu.engine.stateful_models import STATEFUL
from tests.cpu.engine.step_driver import StepDriver
from tests.cpu.engine.tiny_models import ON_TORCH, StateCheckpoint, hf_tiny_model, random_prompt, tiny_model
from tests.many_cases import each_case
from tests.pure.scheduler.driver import make_config

GREEDY = SamplingParams(temperature=0.0)
LENGTHS = (1, 16, 33, 70, 150)


def checkpoint_of(name: str) -> StateCheckpoint:
    return StateCheckpoint(hf_tiny_model(name, torch.float32))


def first_logits(make_forward: MakeForward, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    """Logits after prompts that run in chunks, mixed, their last token alone: [prompts, vocabulary]."""
    driver = StepDriver(make_forward)
    for length in lengths:
        driver.add(random_prompt(length), 1)
    requests = driver.requests
    while unfinished := [key for key, live in requests.items() if not live.is_finished]:
        rows = {}
        for index, key in enumerate(unfinished):
            missing = requests[key].num_tokens - requests[key].num_computed_tokens
            rows[key] = max(missing - 1, 1) if missing < 40 else 25 + 16 * index
        driver.step(rows)
    return torch.stack([live.logits[0] for live in requests.values()])


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest of all rows."""
    expected = expected.double()
    return float(((actual.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@each_case("name", ON_TORCH | STATEFUL)
@each_case(("dtype", "error"), [(torch.float32, 3e-5), (torch.bfloat16, 0.03)])
def test_instruction_sets_agree(
    native_library: NativeLibrary, name: str, dtype: torch.dtype, error: float
) -> None:
    checkpoint = checkpoint_of(name)
    *better, portable = (
        first_logits(on_native(native_library, checkpoint, dtype=dtype, instruction_set=instruction_set))
        for instruction_set in native_library.instruction_sets
    )
    for instruction_set, logits in zip(native_library.instruction_sets, better, strict=False):
        assert relative_error(logits, portable) < error, instruction_set


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_case("name", ["llama3", "gemma3", "gpt-oss", "granite4", "qwen3.5-moe", "gemma4"])
def test_threads_change_nothing_but_rounding(
    native_library: NativeLibrary, name: str, dtype: torch.dtype
) -> None:
    checkpoint = checkpoint_of(name)
    one, *more = (
        first_logits(on_native(native_library, checkpoint, dtype=dtype, num_threads=num_threads))
        for num_threads in (1, 2, 3, 5)
    )
    for logits in more:
        assert relative_error(logits, one) < (1e-5 if dtype == torch.float32 else 0.01)


def test_weights_of_few_bits_come_near_the_plain_ones(native_library: NativeLibrary) -> None:
    exact = first_logits(on_torch(tiny_model("llama3", torch.float32).weights))
    bounds: dict[Quantization, float] = {"int8": 0.05, "int4": 0.4}
    for quantization, most in bounds.items():
        quantized = first_logits(
            on_native(native_library, checkpoint_of("llama3"), quantization=quantization)
        )
        assert relative_error(quantized, exact) < most


def test_activations_in_8_bits_are_the_same_everywhere(native_library: NativeLibrary) -> None:
    """`int8` holds on a processor without products of bytes too, where `auto` takes it for few rows only."""
    logits = {
        (instruction_set, way): first_logits(
            on_native(
                native_library,
                checkpoint_of("llama3"),
                quantization="int8",
                activation_quantization=way,
                instruction_set=instruction_set,
            )
        )
        for instruction_set in native_library.instruction_sets
        for way in ("auto", "int8")
    }
    for instruction_set in native_library.instruction_sets:
        int8, auto = logits[instruction_set, "int8"], logits[instruction_set, "auto"]
        assert torch.equal(int8, auto) == (instruction_set != "portable")
        # a value at the edge of two bytes may go either way, which the next layer's values follow
        assert relative_error(int8, logits["portable", "int8"]) < 0.01, instruction_set


def test_an_instruction_set_that_is_not_there_is_named(native_library: NativeLibrary) -> None:
    make = on_native(native_library, checkpoint_of("llama3"), instruction_set="avx9000")
    with pytest.raises(ConfigError, match="avx9000"):
        make(num_blocks=4, block_size=16)


def test_settings_say_what_runs(native_library: NativeLibrary) -> None:
    forward = on_native(native_library, checkpoint_of("llama3"))(num_blocks=4, block_size=16)
    assert forward.settings == {
        "backend": "native",
        "instruction_set": native_library.instruction_sets[0],
        "weights": "f32",
    }
    forward.close()


# ---- blocks ----


def make_runner(make_forward: MakeForward, **options: int) -> ModelRunner:
    sizes = {"num_blocks": 32, "block_size": 16, "max_num_seqs": 8, "max_model_len": 128, **options}
    forward = make_forward(num_blocks=sizes["num_blocks"], block_size=sizes["block_size"])
    return ModelRunner(make_config("sarathi", **sizes), forward, Sampler(forward.config.vocab_size))


def admit(
    name: str, prompt: list[int], blocks: tuple[int, ...], sampling: SamplingParams = GREEDY
) -> AdmittedRequest:
    request = Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling)
    return AdmittedRequest(request, (), blocks)


def step(
    rows: list[ScheduledRequest], admitted: tuple[AdmittedRequest, ...] = (), released: tuple[str, ...] = ()
) -> SchedulerOutput:
    return SchedulerOutput(0, tuple(rows), admitted, released, BatchShape())


def test_a_shared_prefix_is_read_from_the_other_requests_blocks(native_library: NativeLibrary) -> None:
    runner = make_runner(on_native(native_library, checkpoint_of("qwen3")))
    prompt = random_prompt(60)
    whole = [ScheduledRequest("first", 0, 60, (), samples=True)]
    expected = runner.execute(step(whole, (admit("first", prompt, (9, 4, 6, 2)),))).sampled_token_ids
    rest = [ScheduledRequest("second", 48, 12, (), samples=True)]
    hit = runner.execute(step(rest, (admit("second", prompt, (9, 4, 6, 11)),)))
    assert hit.sampled_token_ids == expected


@pytest.mark.parametrize("window_family", ["mistral-sliding", "gemma3"])
def test_blocks_before_the_window_may_hold_anything(
    native_library: NativeLibrary, window_family: str
) -> None:
    """All layers of the first family slide, so blocks that no token sees any more need not be kept."""
    checkpoint = checkpoint_of(window_family)
    if window_family == "gemma3":
        checkpoint.config = replace(checkpoint.config, sliding_layers=(True,) * 3)
    prompt = random_prompt(90)
    tables = ((1, 2, 3, 4, 5, 6), (20, 21, 22, 4, 5, 6))  # the window of 24 tokens begins in the fourth block
    tokens = []
    for table in tables:
        runner = make_runner(on_native(native_library, checkpoint))
        runner.execute(
            step(
                [ScheduledRequest("a", 0, 89, (), samples=False)],
                (admit("a", prompt, (1, 2, 3, 4, 5, 6)),),
            )
        )
        later = [ScheduledRequest("b", 89, 1, (), samples=True)]
        tokens.append(runner.execute(step(later, (admit("b", prompt, table),), ("a",))).sampled_token_ids)
    assert tokens[0] == tokens[1]


# ---- sampling ----


def test_greedy_rows_need_no_logits(native_library: NativeLibrary) -> None:
    asking = SamplingParams(temperature=0.0, num_logprobs=1)
    tokens = []
    for sampling in (GREEDY, asking):
        runner = make_runner(on_native(native_library, checkpoint_of("llama3")))
        seen: list[bool] = []
        watch(runner, seen)
        admitted = tuple(admit(f"r{i}", random_prompt(10 + i), (i,), sampling) for i in range(5))
        rows = [ScheduledRequest(f"r{i}", 0, 10 + i, (), samples=True) for i in range(5)]
        tokens.append(runner.execute(step(rows, admitted)).sampled_token_ids)
        assert seen == [sampling is asking]
    assert tokens[0] == tokens[1]


def watch(runner: ModelRunner, seen: list[bool]) -> None:
    """Note for each step whether it computed logits."""
    run = runner.forward.run

    def noting(inputs: StepInputs, *, wants_logits: bool) -> object:
        logits = run(inputs, wants_logits=wants_logits)
        seen.append(logits.values_RV is not None)
        assert logits.seconds is not None
        assert 0 < logits.seconds < 10
        return logits

    runner.forward.run = noting  # type: ignore[method-assign, assignment]


def test_random_rows_draw_as_on_torch(native_library: NativeLibrary) -> None:
    """The same numbers against the same probabilities: only a draw at an edge could differ."""
    sampling = [SamplingParams(temperature=0.8, seed=i, top_p=0.9 if i % 2 else 1.0) for i in range(8)]
    tokens = []
    for make in (
        on_native(native_library, checkpoint_of("llama3")),
        on_torch(tiny_model("llama3", torch.float32).weights),
    ):
        runner = make_runner(make)
        admitted = tuple(admit(f"r{i}", random_prompt(20), (i, i + 8), sampling[i]) for i in range(8))
        rows = [ScheduledRequest(f"r{i}", 0, 20, (), samples=True) for i in range(8)]
        tokens.append(runner.execute(step(rows, admitted)).sampled_token_ids)
    assert tokens[0] == tokens[1]


# ---- what is not finite ----


def test_nan_fails_its_own_row_and_leaves_with_it(native_library: NativeLibrary) -> None:
    checkpoint = checkpoint_of("llama3")
    prompt, bad_prompt = random_prompt(20), random_prompt(30)
    poison = next(token_id for token_id in range(1, 211) if token_id not in prompt)
    bad_prompt[25] = poison  # a place that the next request of this block does not fill
    checkpoint.state["model.embed_tokens.weight"][poison] = torch.nan
    runner = make_runner(on_native(native_library, checkpoint))
    rows = [
        ScheduledRequest("bad", 0, 30, (), samples=True),
        ScheduledRequest("good", 0, 20, (), samples=True),
    ]
    admitted = (admit("bad", bad_prompt, (5, 6)), admit("good", prompt, (7, 8)))
    output = runner.execute(step(rows, admitted))
    assert output.failed is not None
    assert list(output.failed) == ["bad"]
    assert "nan" in output.failed["bad"]
    (expected,) = output.sampled_token_ids[1]
    again = [ScheduledRequest("again", 0, 20, (), samples=True)]
    output = runner.execute(step(again, (admit("again", prompt, (5, 6)),), ("bad",)))
    assert output.failed is None
    assert output.sampled_token_ids == [[expected]]


# ---- malformed steps ----


def inputs_of(prompt: list[int]) -> StepInputs:
    batch = InputBatch(max_num_seqs=2, max_model_len=96, block_size=16)
    batch.admit(admit("a", prompt, tuple(range(-(-len(prompt) // 16)))))
    return batch.prepare([ScheduledRequest("a", 0, len(prompt), (), samples=True)])


def with_batch(**changes: object) -> Callable[[StepInputs], StepInputs]:
    return lambda inputs: replace(inputs, attention=replace(inputs.attention, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spoil",
    [
        with_batch(query_lens_R=np.array([19])),
        with_batch(query_lens_R=np.array([0])),
        with_batch(context_lens_R=np.array([19])),
        with_batch(slot_mapping_T=np.arange(20) + 10_000),
        with_batch(slot_mapping_T=np.arange(20) - 1),
        with_batch(slots_R=np.array([2])),
        with_batch(slots_R=np.array([-1])),
        with_batch(slots_R=np.array([2**62])),
        with_batch(context_lens_R=np.array([2**63 - 1])),
        with_batch(block_tables_SB=np.full((2, 4), 999, np.int32)),
        lambda inputs: replace(inputs, token_ids_T=np.full(20, 211)),
        lambda inputs: replace(inputs, token_ids_T=np.full(20, -1)),
        lambda inputs: replace(inputs, sampling_tokens=np.array([20])),
    ],
)
def test_a_malformed_step_is_refused(
    native_library: NativeLibrary, spoil: Callable[[StepInputs], StepInputs]
) -> None:
    forward: NativeForward = on_native(native_library, checkpoint_of("llama3"))(num_blocks=8, block_size=16)
    inputs = inputs_of(random_prompt(20))
    before = forward.run(inputs, wants_logits=True).values_RV
    assert before is not None
    before = before.copy()
    with pytest.raises(EngineError, match="20 tokens"):
        forward.run(spoil(inputs), wants_logits=True)
    after = forward.run(inputs, wants_logits=True).values_RV
    assert after is not None
    assert np.array_equal(before, after)


def test_a_block_that_is_not_there_is_not_scrubbed(native_library: NativeLibrary) -> None:
    forward: NativeForward = on_native(native_library, checkpoint_of("llama3"))(num_blocks=8, block_size=16)
    for block in (-1, 8, 2**60):
        with pytest.raises(EngineError, match=f"no blocks .*{block}"):
            forward.scrub(np.array([0, block]))


# ---- short memory ----


@contextmanager
def no_more_memory() -> Iterator[None]:
    """Let this process map no further memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_step_without_memory_says_so(native_library: NativeLibrary) -> None:
    forward: NativeForward = on_native(native_library, checkpoint_of("llama3"))(num_blocks=8, block_size=16)
    few, many = inputs_of(random_prompt(20)), inputs_of(random_prompt(60))
    before = forward.run(few, wants_logits=False).best
    with no_more_memory(), pytest.raises(EngineError, match=r"memory .* 60 tokens"):
        forward.run(many, wants_logits=False)
    after = forward.run(few, wants_logits=False).best
    assert before is not None
    assert after is not None
    np.testing.assert_array_equal(before.logits_R, after.logits_R)
    assert forward.run(many, wants_logits=False).best is not None


def test_threads_that_cannot_be_started_are_an_error(native_library: NativeLibrary) -> None:
    make = on_native(native_library, checkpoint_of("llama3"), num_threads=64)
    with no_more_memory(), pytest.raises(ConfigError, match="64 threads"):
        make(num_blocks=8, block_size=16)
