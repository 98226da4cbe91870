"""Padding, poison and crowded tables do not show in a step of the GPU engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from onbeat.core.request import Request
from onbeat.core.step import AdmittedRequest, BatchShape, ScheduledRequest, SchedulerOutput
from onbeat.engine.cuda import step_packer
from onbeat.engine.cuda.forward import CudaForward, CudaOptions, kernel_sizes
from onbeat.engine.cuda.graphs import EagerGraphs, GraphKey, graph_sizes, piece_sizes, verify_sizes
from onbeat.engine.cuda.state import TableMirror
from onbeat.engine.input_batch import AttentionBatch
from onbeat.engine.model_config.architecture import Activation
from onbeat.engine.torch.kernels import ChunkRows, DecodeRows, Int32Array, KernelSizes, LayerSpec
from onbeat.engine.torch.layer import widest_heads
from onbeat.engine.torch.weights import load_weights
from tests.cpu.engine.cuda.test_overlap import SETTINGS, requests_of
from tests.cpu.engine.engines import TorchEngine
from tests.cpu.engine.forwards import on_torch
from tests.cpu.engine.reference_kernels import ReferenceKernels
from tests.cpu.engine.step_driver import GREEDY, StepDriver
from tests.cpu.engine.test_golden_tiny import assert_equals_reference
from tests.cpu.engine.tiny_models import FAMILIES, StateCheckpoint, hf_tiny_model, random_prompt, tiny_model
from tests.cpu.speculation.runs import ScriptedProposer, answers, assert_same, fixed, run

CPU = torch.device("cpu")


class PoisonedGraphs:
    """Makes everything that a step of another size left behind NaN or absurd, before the step."""

    name = "poisoned"

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.widths: list[int] = []
        self.pieces: list[GraphKey] = []
        self.forward: CudaForward | None = None
        self._graphs = EagerGraphs()

    def prepare(
        self, keys: Sequence[GraphKey], run: Callable[[GraphKey], None], plan: Callable[[GraphKey], None]
    ) -> None:
        self._graphs.prepare(keys, run, plan)

    def replay(self, key: GraphKey) -> None:
        assert self.forward is not None
        if key.piece is not None:
            self._replay_piece(key, self.forward)
            return
        self.sizes.append(key.size)
        self.widths.append(key.width)
        self.forward._logits_NV.fill_(torch.nan)
        for other, buffers in self.forward._fixed.items():
            buffers.results.fill_(-1)
            if other != key:
                buffers.words.fill_(2**31 - 1)
        self._graphs.replay(key)

    def _replay_piece(self, key: GraphKey, forward: CudaForward) -> None:
        pieces = forward._pieces
        assert pieces is not None
        self.pieces.append(key)
        for memory in (
            pieces._x_TD,
            pieces._q_TX,
            pieces._mixed_TX[key.size * widest_heads(forward.weights) :],
        ):
            memory.fill_(torch.nan)
        pieces._residual_TD[key.size if key.piece else 0 :].fill_(torch.nan)
        self._graphs.replay(key)


class PlanningKernels(ReferenceKernels):
    """Wants to know the lengths of decodes before it sees them."""

    def __init__(self, sizes: KernelSizes) -> None:
        super().__init__(sizes)
        self.planned: list[list[int]] = []

    def plan_decodes(self, lens_R: Int32Array, layers: Sequence[LayerSpec], width: int = 1) -> None:
        assert len({layer.window for layer in layers}) == len(layers)
        self.planned.append(lens_R.tolist())

    def start_decodes(self, rows: DecodeRows) -> None:
        assert rows.lens_R.tolist() == self.planned[-1]


def poisoned(
    name: str,
    graphs: PoisonedGraphs,
    make_kernels: Callable[[KernelSizes], ReferenceKernels] = ReferenceKernels,
    **changes: Any,
) -> Callable[..., CudaForward]:
    weights = load_weights(StateCheckpoint(hf_tiny_model(name, torch.float64)), torch.float64, CPU)

    def make(*, num_blocks: int, block_size: int) -> CudaForward:
        sizes = {"max_num_seqs": 32, "max_model_len": 320, "max_num_batched_tokens": 64} | changes
        options = CudaOptions(num_blocks=num_blocks, block_size=block_size, **sizes)
        kernels = make_kernels(kernel_sizes(weights, options))
        graphs.forward = CudaForward(weights, kernels, graphs, options)
        return graphs.forward

    return make


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_decodes_are_padded_to_the_next_size_and_read_none_of_the_padding(name: str) -> None:
    graphs = PoisonedGraphs()
    driver = StepDriver(poisoned(name, graphs))
    for length in (1, 17, 30, 3, 40):
        driver.add(random_prompt(length), 6)
    driver.step(dict.fromkeys(driver.requests, 100))
    assert not graphs.sizes  # a step of chunks
    driver.run(1)
    assert set(graphs.sizes) == {8}
    assert_equals_reference(driver, TorchEngine(), name)


@pytest.mark.parametrize("name", ["mistral-sliding", "gemma3"])
def test_decodes_may_be_planned_on_the_host(name: str) -> None:
    graphs = PoisonedGraphs()
    driver = StepDriver(poisoned(name, graphs, PlanningKernels))
    for length in (1, 17, 30):
        driver.add(random_prompt(length), 9)
    driver.step(dict.fromkeys(driver.requests, 100))
    driver.add(random_prompt(40), 9)
    driver.run(7)
    assert graphs.forward is not None
    kernels = graphs.forward.kernels
    assert isinstance(kernels, PlanningKernels)
    assert len(kernels.planned) == len(graphs.sizes)
    assert_equals_reference(driver, TorchEngine(), name)


@pytest.mark.parametrize("kernels", [ReferenceKernels, PlanningKernels])
@pytest.mark.parametrize("name", ["llama3", "gemma3", "mistral-sliding", "granite"])
def test_steps_with_prompts_run_in_pieces_and_read_none_of_the_padding(
    name: str, kernels: Callable[[KernelSizes], ReferenceKernels]
) -> None:
    graphs = PoisonedGraphs()
    driver = StepDriver(poisoned(name, graphs, kernels, piece_sizes=(8, 32, 64), max_num_batched_tokens=128))
    for length in (1, 17, 30, 3, 40):
        driver.add(random_prompt(length), 6)
    driver.step(dict.fromkeys(driver.requests, 12))
    driver.step({driver.add(random_prompt(70), 4): 7})
    driver.run(20)
    assert graphs.forward is not None
    num_pieces = graphs.forward.config.num_layers + 1
    assert {key.size for key in graphs.pieces} == {8, 32, 64}
    assert [key.piece for key in graphs.pieces] == [*range(num_pieces)] * (len(graphs.pieces) // num_pieces)
    assert_equals_reference(driver, TorchEngine(), name)


class PartedKernels(ReferenceKernels):
    """Notes which rows attend together."""

    def __init__(self, sizes: KernelSizes) -> None:
        super().__init__(sizes)
        self.lens: list[list[int]] = []

    def plan_chunks(self, rows: ChunkRows, layer: LayerSpec) -> Any:
        self.lens.append(rows.query_lens_R.tolist())
        return super().plan_chunks(rows, layer)


_WITH_PIECES = ("llama3", "gemma3", "mistral-sliding")


@pytest.mark.parametrize(
    ("name", "piece_sizes"), [*((name, ()) for name in FAMILIES), *((name, (8, 64)) for name in _WITH_PIECES)]
)
def test_rows_of_one_token_attend_apart_from_chunks_where_they_see_much(
    name: str, piece_sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_packer, "_MUCH_CONTEXT", 20)
    graphs = PoisonedGraphs()
    driver = StepDriver(poisoned(name, graphs, PartedKernels, piece_sizes=piece_sizes))
    first, long, last = (driver.add(random_prompt(length), 12) for length in (17, 50, 3))
    driver.step({first: 17})
    driver.step({long: 20, first: 1, last: 3})
    driver.step({long: 5, first: 1, driver.add(random_prompt(41), 9): 40, last: 1})
    driver.step({long: 20, first: 1, last: 1})
    assert graphs.forward is not None
    kernels, weights = graphs.forward.kernels, graphs.forward.weights
    assert isinstance(kernels, PartedKernels)
    num_windows = len({layer.spec.window for layer in weights.layers})
    expected = ([[17]], [[20, 1, 3]], [[1, 1], [5, 40]], [[1, 1], [20]])
    assert kernels.lens == [lens for step in expected for lens in step * num_windows]
    driver.run(100)
    assert_equals_reference(driver, TorchEngine(), name)


def test_a_step_of_many_tokens_is_parted_whatever_its_rows_see() -> None:
    def lens_of(query_lens: list[int]) -> list[list[int]]:
        lens_R = np.array(query_lens)
        nothing = np.zeros(0, np.int64)
        batch = AttentionBatch(lens_R, lens_R, nothing, np.zeros((0, 0), np.int32), nothing)
        groups = step_packer._row_groups(batch, sum(query_lens))
        return [lens_R[rows].tolist() for rows in groups]

    assert lens_of([1, 500, 1]) == [[1, 500, 1]]
    assert lens_of([1, 511, 1]) == [[1, 1], [511]]
    assert lens_of([600]) == [[600]]
    assert lens_of([1] * 600) == [[1] * 600]


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_the_last_layers_products_leave_out_tokens_that_nobody_asks_for(name: str) -> None:
    driver = StepDriver(poisoned(name, PoisonedGraphs()))
    forward: Any = driver.runner.forward
    rows: list[int] = []

    def multiply(x_TD: torch.Tensor, *matrix: Any) -> torch.Tensor:
        rows.append(len(x_TD))
        return torch.nn.functional.linear(x_TD, *matrix)

    forward._multiply = multiply
    first = driver.add(random_prompt(50), 6)
    driver.step({first: 20})
    assert rows == [20] * (4 * forward.config.num_layers - 3)  # but for queries, keys and values: none
    rows.clear()
    driver.step({first: 10, driver.add(random_prompt(7), 6): 7})
    assert rows == [17] * (4 * forward.config.num_layers - 3) + [1] * 3
    driver.run(100)
    assert_equals_reference(driver, TorchEngine(), name)


def test_the_largest_tensor_of_a_layer_is_gone_before_its_last_product() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    class Watching(ReferenceKernels):
        def act_mul(self, gate_up_TF2: torch.Tensor, activation: Activation, out_TF: torch.Tensor) -> None:
            seen.append(weakref.ref(gate_up_TF2))
            super().act_mul(gate_up_TF2, activation, out_TF)

    def multiply(*tensors: Any) -> torch.Tensor:
        assert all(each() is None for each in seen)
        return torch.nn.functional.linear(*tensors)

    driver = StepDriver(poisoned("llama3", PoisonedGraphs(), Watching))
    forward: Any = driver.runner.forward
    forward._multiply = multiply
    driver.step({driver.add(random_prompt(50), 6): 50})
    assert seen


def test_more_rows_than_the_largest_graph_run_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onbeat.engine.cuda.graphs.GRAPH_SIZES", (1, 2, 4))
    graphs = PoisonedGraphs()
    driver = StepDriver(poisoned("llama3", graphs))
    for length in (5, 17, 30, 3, 40):
        driver.add(random_prompt(length), 3 + length % 3)
    driver.run(100)
    assert graphs.sizes
    assert set(graphs.sizes) <= {1, 2, 4}
    assert_equals_reference(driver, TorchEngine(), "llama3")


def test_a_first_decode_of_a_long_cached_prompt_brings_its_whole_table() -> None:
    driver = StepDriver(poisoned("llama3", PoisonedGraphs()))
    prompt = random_prompt(197)
    first = driver.add(prompt, 10**9)
    driver.step({first: 1000})
    again = Request(request_id="again", prompt_token_ids=tuple(prompt), sampling=GREEDY)
    admitted = AdmittedRequest(again, (), tuple(driver.requests[first].block_ids))
    row = ScheduledRequest("again", len(prompt) - 1, 1, (), samples=True)
    output = driver.runner.execute(SchedulerOutput(9, (row,), (admitted,), (), BatchShape()))
    assert output.sampled_token_ids == [driver.requests[first].output_token_ids]


@pytest.mark.parametrize("shortfall", [0, 2])
@pytest.mark.parametrize("name", ["llama3", "gemma3", "mistral-sliding"])
def test_rows_that_verify_as_many_drafts_are_replayed_and_others_are_not(name: str, shortfall: int) -> None:
    """Greedy rows and such as draw by each rule, five of them in graphs of eight."""
    requests = requests_of(SETTINGS, 24)
    expected = run(on_torch(tiny_model(name).weights), requests)
    script = ScriptedProposer(
        answers(requests, expected),
        right=lambda position: position % 7 != 0,
        shortfall=lambda position: shortfall if position % 3 == 0 else 0,
    )
    graphs = PoisonedGraphs()
    make = poisoned(name, graphs, WidthKernels, max_num_batched_tokens=96, verify_widths=(3, 5))
    done = run(make, requests, speculation=fixed(4), proposer=script)
    assert_same(done, expected)
    assert 0 < done.num_accepted < done.num_drafted
    assert graphs.forward is not None
    kernels = graphs.forward.kernels
    assert isinstance(kernels, WidthKernels)
    assert kernels.planned == list(zip(graphs.sizes, graphs.widths, strict=True))
    assert (8, 5) in kernels.planned
    num_verifying = sum(bool(output.num_drafted and any(output.num_drafted)) for _, output in done.steps)
    num_replayed = sum(width > 1 for width in graphs.widths)
    assert 0 < num_replayed < num_verifying if shortfall else num_replayed > num_verifying / 2


class WidthKernels(ReferenceKernels):
    """Notes for how many rows steps are planned, and how many tokens of each."""

    def __init__(self, sizes: KernelSizes) -> None:
        super().__init__(sizes)
        assert sizes.verify_rows == ((32, 3), (16, 5))
        self.planned: list[tuple[int, int]] = []

    def plan_decodes(self, lens_R: Int32Array, layers: Sequence[LayerSpec], width: int = 1) -> None:
        self.planned.append((len(lens_R), width))


def test_sizes_reach_the_largest_step() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(5) == (1, 2, 4, 8)
    assert graph_sizes(33)[-1] == 48
    assert graph_sizes(257)[-2:] == (256, 320)
    assert graph_sizes(10**6)[-1] == 512
    assert piece_sizes(100) == (16, 32, 64)
    assert verify_sizes(10**6, 10**6, 5)[-1] == 96
    assert verify_sizes(16, 64, 5) == (1, 2, 4, 8)
    assert verify_sizes(16, 4, 5) == ()


def test_the_mirror_tells_each_change_once() -> None:
    options = CudaOptions(
        num_blocks=50, block_size=16, max_num_seqs=4, max_model_len=64, max_num_batched_tokens=64
    )
    mirror = TableMirror(options)
    tables_SB = np.array([[7, 8, 9, 0], [1, 2, 3, 4]], np.int32)
    admissions_S = np.array([5, 6])

    def changes(slots: list[int], lens: list[int]) -> dict[int, int]:
        ones_R, nothing = np.ones(len(slots), np.int64), np.zeros(0, np.int64)
        batch = AttentionBatch(ones_R, np.array(lens), np.array(slots), tables_SB, nothing, admissions_S)
        places, blocks = mirror.changes(batch)
        return dict(zip(places.tolist(), blocks.tolist(), strict=True))

    assert changes([1, 0], [17, 33]) == {4: 1, 5: 2, 0: 7, 1: 8, 2: 9}
    assert changes([0, 1], [33, 17]) == {}
    assert changes([0, 1], [34, 64]) == {6: 3, 7: 4}
    admissions_S[0] = 7  # the slot is another request's, and one of its blocks is another
    tables_SB[0, 1] = 11
    assert changes([0], [20]) == {0: 7, 1: 11}
    mirror.forget()
    assert changes([0, 1], [20, 5]) == {0: 7, 1: 11, 4: 1}
