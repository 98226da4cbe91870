"""The forward pass on a GPU: decode steps by captured graphs, others in pieces or operator by operator.

Legend: T tokens of the step, R rows that decode, N tokens that are sampled or scored, C those of them whose
logits are copied to the host, V vocabulary, X numbers of a row. In pieces: N query heads, H head width, D
model width.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onbeat.core.errors import EngineDead, EngineError
from onbeat.engine.cuda import state
from onbeat.engine.cuda.choice import Choice
from onbeat.engine.cuda.graphs import GraphKey, Graphs
from onbeat.engine.cuda.state import CudaOptions
from onbeat.engine.cuda.step_packer import ALL_DRAWN, PackedStep, StepPacker, draw_params
from onbeat.engine.cuda.stream import DeviceStream, stream_of
from onbeat.engine.dtypes import FLOAT8
from onbeat.engine.forward import ChosenTokens, ForwardPass, Mark, StepLogits
from onbeat.engine.input_batch import IntArray, StepInputs
from onbeat.engine.memory import KVCacheSpec
from onbeat.engine.sampled import BestTokens
from onbeat.engine.torch import kernels as torch_kernels
from onbeat.engine.torch import layer as torch_layer
from onbeat.engine.torch.kv import LayerKVCache, scrub
from onbeat.engine.torch.types import FP8, device_of, numpy_dtype
from onbeat.engine.torch.weights import TorchWeights


class Pieces:
    """The pieces of steps of some sizes, and the memory that one hands to the next.

    A piece is all between two calls of attention, whose rows no graph can know. The host launches a graph in
    place of some ten operators.

    Parameters
    ----------
    weights, kernels, kv, multiply : the model, its KV cache, and what computes it.
    graphs : what captures the pieces.
    options : sizes, those of steps among them.
    """

    def __init__(
        self,
        weights: TorchWeights,
        kernels: torch_kernels.Kernels,
        kv: Sequence[LayerKVCache],
        multiply: torch_kernels.Multiply,
        graphs: Graphs,
        options: CudaOptions,
    ) -> None:
        sizes = options.piece_sizes
        self._weights = weights
        self._kv = kv
        self._graphs = graphs
        most, device = max(sizes), weights.device
        self._ids_T, self._positions_T = (
            torch.zeros(most, dtype=torch.int32, device=device) for _ in range(2)
        )
        self._kv_slots_T = torch.full_like(self._ids_T, options.padding_kv_slot)
        self._x_TD, self._residual_TD = (
            torch.zeros(most, weights.config.hidden_size, dtype=weights.dtype, device=device)
            for _ in range(2)
        )
        self._q_TX, self._mixed_TX = (
            torch.zeros(most * torch_layer.widest_heads(weights), dtype=weights.dtype, device=device)
            for _ in range(2)
        )
        shape = most, len(weights.layers), weights.config.layer_input_size
        self._own_TLP = torch.zeros(shape, dtype=weights.dtype, device=device)
        places = {
            size: torch_kernels.StepTensors(self._positions_T[:size], self._kv_slots_T[:size])
            for size in sizes
        }
        self._steps = {
            size: torch_layer.LayerStep(tensors, kv, kernels, multiply) for size, tensors in places.items()
        }
        keys = [GraphKey(size, piece) for size in sizes for piece in range(len(weights.layers) + 1)]
        graphs.prepare(keys, self._run_piece, lambda _: None)

    def run(
        self, ids_T: Tensor, tensors: torch_kernels.StepTensors, attend: torch_layer.Attend, wanted_N: Tensor
    ) -> torch_layer.Hidden:
        """Run a step of one of the sizes, padding included; return the hidden states of some tokens."""
        size = len(ids_T)
        for own, given in (
            (self._ids_T, ids_T),
            (self._positions_T, tensors.positions_T),
            (self._kv_slots_T, tensors.kv_slots_T),
        ):
            own[:size].copy_(given)
        for piece, (layer, kv) in enumerate(zip(self._weights.layers, self._kv, strict=True)):
            q_TNH, mixed_TNH = (
                torch_layer.heads_in(part, size, layer.spec) for part in (self._q_TX, self._mixed_TX)
            )
            self._graphs.replay(GraphKey(size, piece))
            attend(q_TNH, kv, layer.spec, mixed_TNH)
        self._graphs.replay(GraphKey(size, len(self._kv)))
        return torch_layer.Hidden(
            *(part.index_select(0, wanted_N) for part in (self._x_TD, self._residual_TD))
        )

    def _run_piece(self, key: GraphKey) -> None:
        """Run what lies between two calls of attention: the rest of one layer, and the start of the next."""
        assert key.piece is not None, "the whole of a step has no pieces"
        weights, layers = self._weights, self._weights.layers
        step, residual_TD = self._steps[key.size], self._residual_TD[: key.size]
        x_TD = None
        if key.piece:
            before, own_TP = layers[key.piece - 1], self._own_TLP[: key.size, key.piece - 1]
            mixed_TNH = torch_layer.heads_in(self._mixed_TX, key.size, before.spec)
            x_TD = torch_layer.after_attention(weights, before, mixed_TNH, residual_TD, step, own_TP)
        else:
            torch.index_select(weights.embedding_VD, 0, self._ids_T[: key.size], out=residual_TD)
            torch_layer.scale_embedding(weights, residual_TD)
            if weights.inputs is not None:
                ids_T = self._ids_T[: key.size]
                own_TLP = weights.inputs.of(ids_T, residual_TD, step.kernels, step.multiply)
                self._own_TLP[: key.size].copy_(own_TLP)
        if key.piece < len(layers):
            layer, kv = layers[key.piece], self._kv[key.piece]
            q_TNH = torch_layer.heads_in(self._q_TX, key.size, layer.spec)
            torch_layer.before_attention(layer, x_TD, residual_TD, step, kv, q_TNH)
        elif x_TD is not None:
            self._x_TD[: key.size].copy_(x_TD)


__all__ = ["CudaForward", "CudaOptions", "kernel_sizes"]


def kernel_sizes(weights: TorchWeights, options: CudaOptions) -> torch_kernels.KernelSizes:
    """Return what the operators of such a forward pass are made for."""
    most = {key.width: key.size for key in options.graph_keys}
    return torch_kernels.KernelSizes(
        config=weights.config,
        dtype=weights.dtype,
        kv_dtype=FP8 if options.has_fp8_kv else weights.dtype,
        device=weights.device,
        block_size=options.block_size,
        max_rows=max(options.max_num_seqs, most[1]),
        max_tokens=options.max_num_batched_tokens,
        max_row_blocks=options.max_row_blocks,
        verify_rows=tuple((size, width) for width, size in most.items() if width > 1),
    )


class _Buffers(NamedTuple):
    """Where a step's numbers lie on the device."""

    words: Tensor
    parts: state.StepWords
    """`words`, by name."""
    results: Tensor
    """int32 [2 N]: what the host reads."""
    best: torch_kernels.BestBuffers
    """`results`, by name."""
    drawn_N: Tensor
    """int32."""
    logits_NV: Tensor


class _Launched:
    """A step's tokens; see `ChosenTokens`."""

    def __init__(self, inputs: StepInputs, packed: PackedStep, mark: Mark, choice: Choice | None) -> None:
        self.packed = packed
        self._choice = choice
        self._inputs = inputs
        self._mark = mark

    def wait(self) -> BestTokens:
        """Return the tokens once the step is done."""
        with _failures_in_words(self._inputs):
            self._mark.wait()
        best = self.packed.best_tokens()
        return best if self._choice is None else self._choice.told(best)


class CudaForward(ForwardPass):
    """Runs steps of a model on a device, with a KV cache of its own.

    Parameters
    ----------
    weights, kernels : the model, and the operators that compute it.
    graphs : how decode steps are run.
    options : sizes; `kernels` are made for the same.
    multiply : computes the layers' products.
    stream : where work is queued; that of the weights' device where there is none.

    Raises
    ------
    ConfigError : a graph cannot be captured.
    """

    def __init__(
        self,
        weights: TorchWeights,
        kernels: torch_kernels.GraphKernels,
        graphs: Graphs,
        options: CudaOptions,
        *,
        multiply: torch_kernels.Multiply | None = None,
        stream: DeviceStream | None = None,
    ) -> None:
        self.weights, self.config, self.device = weights, weights.config, device_of(weights.device)
        self.kernels = kernels
        self.options = options
        self._graphs = graphs
        self._multiply = multiply or partial(torch_layer.multiply_by, kernels)
        self._windows = {layer.spec.window: layer.spec for layer in reversed(weights.layers)}
        self._stream = stream or stream_of(weights.device)
        keys = options.graph_keys
        kv_dtype = FLOAT8 if options.has_fp8_kv else numpy_dtype(weights.dtype)
        spec = KVCacheSpec.of_model(weights.config, dtype=kv_dtype, block_size=options.block_size)
        most = max(options.max_num_seqs, *(key.size * key.width for key in keys))
        pieces = " and pieces" if options.piece_sizes else ""
        verifies = f", of up to {keys[-1].width} tokens each" if options.verify_widths else ""
        graphs_name = f"{graphs.name}{pieces}, up to {max(key.size for key in keys)} rows{verifies}"
        self.settings = {"backend": "cuda", "kernels": kernels.name, "graphs": graphs_name}
        with torch.inference_mode():
            self._state = state.DeviceState(spec, options, weights.device)
            places = map(self.config.place, range(self.config.num_layers))
            self._kv = [self._state.kv[place] for _, place in places]
            shape = most, weights.config.vocab_size
            self._logits_NV = torch.zeros(shape, dtype=weights.wide_dtype, device=weights.device)
            self._packer = StepPacker(options)
            most_samples = max(most, options.max_num_batched_tokens)  # every token of a prompt that is scored
            counts = state.StepCounts(options.max_num_batched_tokens, most, most_samples, 0)
            self._ring = state.HostRing(self._stream, counts.num_words, 2 * most_samples)
            self._fixed = {key: self._fixed_buffers(key) for key in keys}
            self._stream.run(partial(graphs.prepare, keys, self._run_graph, self._plan_padding))
            self._pieces: Pieces | None = None
            if options.piece_sizes:
                self._stream.run(self._make_pieces)
            for key in {keys[0], keys[-1]}:
                self._stream.run(partial(self._draw, self._fixed[key]))  # compiled before it is needed

    @torch.inference_mode()
    def run(self, inputs: StepInputs, *, wants_logits: bool) -> StepLogits:
        """Run one step to its end; see `ForwardPass.run`.

        The device chooses for the rows that want no more than a draw, behind each of their drafts, too. The
        logits of the others and those of tokens of prompts that are scored are copied to the host.
        """
        num_samples = len(inputs.sampling_tokens)
        drawn_N = is_chosen_N = None
        left_C = np.arange(0)
        if wants_logits:
            drawn_N = np.array([row.is_plain for row in inputs.sampling_rows], np.bool_)
            if inputs.waves is not None:
                drawn_N = drawn_N[inputs.waves[1]]
            is_chosen_N = np.pad(drawn_N, (0, num_samples - len(drawn_N)))
            left_C = np.flatnonzero(~is_chosen_N)
        copied: list[NDArray[Any] | None] = []

        def compute(packed: PackedStep) -> None:
            logits_NV, pooled_PD = self._queue(packed)
            places_C = left_C if packed.graph is None else inputs.sampling_tokens[left_C]
            copied.append(self._on_host(logits_NV, places_C))
            copied.append(self._on_host(pooled_PD, np.arange(len(inputs.pooled_tokens))))

        best = (
            self._submit(inputs, partial(self._on_stream, compute), drawn_N)
            .wait()
            ._replace(is_chosen_R=is_chosen_N)
        )
        values_CV, hidden_PD = copied
        return StepLogits(values_CV, best if num_samples else None, hidden_PD=hidden_PD)

    @torch.inference_mode()
    def _on_host(self, values_NX: Tensor | None, places_C: IntArray) -> NDArray[Any] | None:
        """Queue the copy of some rows, and return where they will be; None where there are none."""
        if values_NX is None or not len(places_C):
            return None
        width = values_NX.shape[1]
        words = self._stream.pinned(len(places_C) * width * values_NX.itemsize // 4)
        copied_CX = words.view(values_NX.dtype).view(-1, width)
        runs = np.split(places_C, np.flatnonzero(np.diff(places_C) != 1) + 1)
        for there, run in zip(torch.split(copied_CX, [len(run) for run in runs]), runs, strict=True):
            there.copy_(values_NX[run[0] : run[-1] + 1], non_blocking=True)
        return copied_CX.numpy()

    def launch(self, inputs: StepInputs, settle: Callable[[], None] | None) -> ChosenTokens:
        """Queue a step that chooses its rows' tokens; see `LaunchesSteps.launch`."""
        if settle is None:
            return self._submit(inputs, partial(self._on_stream, self._queue), ALL_DRAWN)

        def choose(packed: PackedStep) -> Choice:
            computed: list[_Buffers] = []
            self._stream.run(lambda: computed.append(self._run_step(packed)[0]))
            settle()
            places_N = packed.sampling_tokens
            if packed.graph is None:
                places_N = np.arange(len(inputs.sampling_rows))
            choice = Choice(inputs.sampling_rows, places_N, self.config.vocab_size, self._stream)
            self._stream.run(lambda: self._choose(packed, computed[0], choice))
            return choice

        return self._submit(inputs, choose, ALL_DRAWN)

    def mark(self) -> Mark:
        """Return the present end of the queue; see `LaunchesSteps.mark`."""
        return self._stream.mark()

    def scrub(self, block_ids: IntArray) -> None:
        """Make stored keys and values of blocks finite; see `ForwardPass.scrub`."""
        ids = torch.from_numpy(block_ids)
        with _failures_in_words(None):
            self._stream.run(lambda: scrub(self._state.kv, ids.to(self.weights.device)))

    def _on_stream(self, work: Callable[[PackedStep], object], packed: PackedStep) -> None:
        self._stream.run(partial(work, packed))

    def _submit(
        self,
        inputs: StepInputs,
        queue: Callable[[PackedStep], Choice | None],
        drawn_N: NDArray[np.bool_] | None,
    ) -> _Launched:
        with _failures_in_words(inputs):
            entry = self._ring.take()
            try:
                packed = self._packer.pack(inputs, entry, drawn_N)
                choice = queue(packed)
            except Exception:
                self._packer.forget()
                raise
            finally:  # what failed may have queued a part, and a device that failed says so now
                entry.mark = self._stream.mark()
        return _Launched(inputs, packed, entry.mark, choice)

    def _fixed_buffers(self, key: GraphKey) -> _Buffers:
        """Return the buffers that a graph reads and writes, full of padding."""
        words = torch.from_numpy(self._packer.padding(key)).to(self.weights.device)
        return self._buffers(words, self._packer.graph_counts(key))

    def _buffers(self, words: Tensor, counts: state.StepCounts) -> _Buffers:
        num_samples = counts.samples
        results = torch.zeros(2 * num_samples, dtype=torch.int32, device=self.weights.device)
        best = torch_kernels.BestBuffers(results[:num_samples], results[num_samples:].view(torch.float32))
        drawn_N = torch.zeros(num_samples, dtype=torch.int32, device=self.weights.device)
        logits_NV = self._logits_NV[:num_samples]
        if num_samples > len(self._logits_NV):
            logits_NV = self._logits_NV.new_empty(num_samples, self._logits_NV.shape[1])
        return _Buffers(words, state.step_words(words, counts), results, best, drawn_N, logits_NV)

    @torch.inference_mode()
    def _queue(self, packed: PackedStep) -> tuple[Tensor, Tensor | None]:
        """Queue a step and the way back of its tokens; return logits [N, V] and what is pooled [P, D]."""
        buffers, pooled_PD = self._run_step(packed)
        if packed.is_random:
            self._draw(buffers)
        packed.views.results.copy_(buffers.results, non_blocking=True)
        return buffers.logits_NV, pooled_PD

    @torch.inference_mode()
    def _choose(self, packed: PackedStep, buffers: _Buffers, choice: Choice) -> None:
        """Queue the choice of the tokens of a step that is queued."""
        draws = draw_params(buffers.parts) if packed.is_random else None
        choice.queue(self.kernels, buffers.logits_NV, buffers.best, draws)
        self._remember(buffers)
        packed.views.results.copy_(buffers.results, non_blocking=True)

    @torch.inference_mode()
    def _run_step(self, packed: PackedStep) -> tuple[_Buffers, Tensor | None]:
        """Queue a step up to its most likely tokens; return its buffers and what is pooled [P, D]."""
        words = packed.views.words
        pooled_PD = None
        if packed.late_updates is not None:
            places, blocks = packed.late_updates.to(self.weights.device, non_blocking=True)
            self._state.tables_SW.view(-1).index_put_((places,), blocks)
        if packed.graph is not None:
            buffers = self._fixed[packed.graph]
            buffers.words.copy_(words, non_blocking=True)
            self._plan_decodes(packed.views.parts, packed.graph.width)
            self._graphs.replay(packed.graph)
        else:
            buffers = self._buffers(words.to(self.weights.device, non_blocking=True), packed.views.counts)
            wanted_N = buffers.parts.sampled_N
            if len(packed.pooled_tokens):
                wanted_N = torch.cat((wanted_N, torch.from_numpy(packed.pooled_tokens).to(wanted_N)))
            hidden = self._compute(buffers, packed.chunks, wanted_N)
            if len(packed.pooled_tokens):
                num_samples = packed.views.counts.samples
                pooled = torch_layer.Hidden(*(part[num_samples:] for part in hidden))
                pooled_PD = torch_layer.final_states(self.weights, self.kernels, pooled)
        return buffers, pooled_PD

    def _plan_decodes(self, parts: state.StepWords, width: int) -> None:
        self.kernels.plan_decodes(parts.lens_R, list(self._windows.values()), width)

    def _plan_padding(self, key: GraphKey) -> None:
        """Plan a graph's step that has no row."""
        parts = state.step_words(self._packer.padding(key), self._packer.graph_counts(key))
        self._plan_decodes(parts, key.width)

    def _run_graph(self, key: GraphKey) -> None:
        """Run what a graph is captured of."""
        self._compute(self._fixed[key], (), None)

    @torch.inference_mode()
    def _make_pieces(self) -> None:
        multiply, graphs = self._multiply, self._graphs
        self._pieces = Pieces(self.weights, self.kernels, self._kv, multiply, graphs, self.options)

    @torch.inference_mode()
    def _compute(
        self, buffers: _Buffers, chunks: Sequence[torch_kernels.ChunkRows], wanted_N: Tensor | None
    ) -> torch_layer.Hidden:
        """Compute a step; return the hidden states of wanted tokens (None: all), those that sample first.

        Parameters
        ----------
        chunks : its rows, as those of `PackedStep`.
        """
        parts, device = buffers.parts, self._state
        device.tables_SW.view(-1).index_put_((parts.update_places_U,), parts.update_blocks_U)
        last_T = device.tokens_S.index_select(0, parts.token_slots_T)
        ids_T = torch.where(parts.ids_T < 0, last_T, parts.ids_T)
        attend = self._attend_chunks(chunks) if chunks else self._attend_decodes(parts)
        tensors = torch_kernels.StepTensors(parts.positions_T, parts.kv_slots_T)
        if self._pieces is not None and wanted_N is not None and len(ids_T) in self.options.piece_sizes:
            hidden = self._pieces.run(ids_T, tensors, attend, wanted_N)
        else:
            step = torch_layer.LayerStep(tensors, self._kv, self.kernels, self._multiply)
            hidden = torch_layer.run_layers(self.weights, ids_T, step, attend, wanted_N)
        if len(parts.sampled_N):
            torch_layer.write_logits(self.weights, self.kernels, hidden, buffers.logits_NV)
            self.kernels.best(buffers.logits_NV, buffers.best)
            self._remember(buffers)
        return hidden

    def _attend_decodes(self, parts: state.StepWords) -> torch_layer.Attend:
        width = len(parts.ids_T) // len(parts.lens_R)
        rows = torch_kernels.DecodeRows(
            self._state.tables_SW.index_select(0, parts.slots_R), parts.lens_R, width
        )
        self.kernels.start_decodes(rows)

        def attend(q_RNH: Tensor, kv: LayerKVCache, layer: torch_kernels.LayerSpec, out_RNH: Tensor) -> None:
            self.kernels.attend_decodes(q_RNH, kv, rows, layer, out_RNH)

        return attend

    def _attend_chunks(self, chunks: Sequence[torch_kernels.ChunkRows]) -> torch_layer.Attend:
        """Return what attends with the tokens of all rows; those behind them are padding."""
        ends = np.cumsum([0, *(rows.query_lens_R.sum() for rows in chunks)]).tolist()
        tokens = [slice(*pair) for pair in pairwise(ends)]
        plans = {
            window: [self.kernels.plan_chunks(rows, spec) for rows in chunks]
            for window, spec in self._windows.items()
        }

        def attend(q_TNH: Tensor, kv: LayerKVCache, layer: torch_kernels.LayerSpec, out_TNH: Tensor) -> None:
            for own, plan in zip(tokens, plans[layer.window], strict=True):
                self.kernels.attend_chunks(q_TNH[own], kv, plan, layer, out_TNH[own])

        return attend

    @torch.inference_mode()
    def _draw(self, buffers: _Buffers) -> None:
        """Choose the tokens of random rows in place of the most likely ones."""
        self.kernels.draw(buffers.logits_NV, draw_params(buffers.parts), buffers.best, buffers.drawn_N)
        buffers.best.ids_R.copy_(buffers.drawn_N)
        self._remember(buffers)

    def _remember(self, buffers: _Buffers) -> None:
        """Keep each slot's token for the next step; 0 where the row failed."""
        ids_N, peaks_N = buffers.best
        tokens_N = torch.where(peaks_N.isfinite(), ids_N, 0)
        self._state.tokens_S.index_put_((buffers.parts.write_slots_N,), tokens_N)


@contextmanager
def _failures_in_words(inputs: StepInputs | None) -> Iterator[None]:
    """Turn what torch, Triton and FlashInfer raise while a step is queued or waited for into words.

    Parameters
    ----------
    inputs : of the step; None while blocks are cleared.

    Raises
    ------
    EngineError : the step does not fit in memory; the next one may.
    EngineDead : the device failed, and nothing runs on it any more.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = "clearing the blocks of a failed request"
        if inputs is not None:
            what = f"a step of {len(inputs.token_ids_T)} tokens in {len(inputs.attention.slots_R)} rows"
        cure = "does not fit in the GPU's memory; lower --max-num-batched-tokens"
        raise EngineError(f"{what} {cure}") from error
    except RuntimeError as error:
        text = str(error).strip().partition("\n")[0]
        if "CUDA" not in text:
            raise
        raise EngineDead(f"the GPU failed: {text}; the engine must be started again") from error
