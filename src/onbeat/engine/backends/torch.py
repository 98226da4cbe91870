"""The engines on torch as backends: the reference, and when the GPU engine serves a model.

How many KV blocks a GPU has room for is decided by what the largest steps take: it is measured, not guessed.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import count, islice

import torch

from onbeat.core.errors import ConfigError
from onbeat.core.request import Request, SamplingParams
from onbeat.core.step import AdmittedRequest, ScheduledRequest
from onbeat.engine.backends.base import CheckpointBackend, Room
from onbeat.engine.cuda.forward import CudaForward, CudaOptions, kernel_sizes
from onbeat.engine.cuda.graphs import CudaGraphs, EagerGraphs, Graphs, piece_sizes
from onbeat.engine.cuda.toolkit import missing_tool
from onbeat.engine.device import DeviceConfig, compute_capability
from onbeat.engine.dtypes import BFLOAT16, FLOAT8
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.forward import ForwardPass
from onbeat.engine.input_batch import InputBatch, StepInputs
from onbeat.engine.memory import Footprint, KVCacheSpec, flag_size
from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.progress import Detail, OnProgress
from onbeat.engine.torch.forward import TorchForward
from onbeat.engine.torch.kernels import ChunkBackend, GraphKernels, KernelSizes
from onbeat.engine.torch.types import FP8, torch_device, torch_dtype
from onbeat.engine.torch.weights import TorchWeights, in_layers, load_weights
from onbeat.engine.weights.checkpoint import Checkpoint
from onbeat.engine.weights.parameters import parameter_shapes
from onbeat.scheduler.scheduler_config import SchedulerConfig

HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
OLDEST_CAPABILITY = (8, 0)
"""Computes in bfloat16, and FlashInfer's fa2 runs there."""
FP8_CAPABILITY = (8, 9)
"""Computes in numbers of 8 bits, and Triton makes them."""
TRIED_CAPABILITY = (9, 0)

MakeKernels = Callable[[KernelSizes], GraphKernels]


def why_not(checkpoint: Checkpoint, device: DeviceConfig, config: EngineConfig) -> str | None:
    """Return why the GPU engine cannot serve a model on a device; None where it can."""
    head_dim, block_size = checkpoint.config.head_dim, config.limits.block_size
    if device.dtype != BFLOAT16:
        return f"it computes in bfloat16, not in {device.dtype.name}"
    if head_dim not in HEAD_DIMS:
        return f"heads of {head_dim} are not supported; 64, 128 and 256 are"
    if checkpoint.config.unusual:
        return f"its kernels do not know {', '.join(checkpoint.config.unusual)}"
    if block_size is not None and block_size not in BLOCK_SIZES:
        return f"block_size is {block_size}; it needs 16, 32, 64 or 128"
    capability = compute_capability(device.device)
    if capability < OLDEST_CAPABILITY:
        return f"it needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    if "fp8" in (config.quantization, config.kv_cache_dtype) and capability < FP8_CAPABILITY:
        return f"fp8 needs compute capability 8.9, this GPU has {capability[0]}.{capability[1]}"
    if find_spec("flashinfer") is None:
        return "FlashInfer is not installed: pip install 'onbeat[gpu]'"
    kernel, problem = unbuilt_kernel(checkpoint.config, config)
    if kernel is not None and problem is not None:
        return f"the kernel {kernel} is not ready-made and cannot be compiled: {problem}"
    return None


def unbuilt_kernel(model: ModelConfig, config: EngineConfig) -> tuple[str | None, str | None]:
    """Return a kernel of FlashInfer that is not there yet, and why it cannot be compiled, with the cure.

    The library is imported only now.
    """
    problem = missing_tool()  # before the library looks for its tools
    from onbeat.engine.cuda.flashinfer_attention import unbuilt_kernel

    kv_dtype = FP8 if config.kv_cache_dtype == "fp8" else torch.bfloat16
    return unbuilt_kernel(model, kv_dtype=kv_dtype), problem


def fast_kernels(sizes: KernelSizes, chunk_backend: ChunkBackend = "fa2") -> GraphKernels:
    """Return the quick operators; what they are written in is imported only now.

    Prompts by fa3 took 5 to 11 % less time on an H100. Its output has not been compared there yet, so it is
    only taken where it is asked for.
    """
    from onbeat.engine.cuda.fast import FastKernels

    return FastKernels(sizes, chunk_backend=chunk_backend)


class TorchBackend(CheckpointBackend):
    """The model in torch operators: any device and type.

    Parameters
    ----------
    name, checkpoint, device : what runs where.
    reason : why torch.
    """

    def __init__(self, name: str, checkpoint: Checkpoint, device: DeviceConfig, reason: str) -> None:
        self.name, self.model = name, checkpoint.config
        self.checkpoint, self.device = checkpoint, device
        self.description = f"by torch ({reason})"

    def needs(self, block_size: int) -> Footprint:
        """Return the memory of weights and KV in the device's type."""
        dtype = self.device.dtype
        kv_dtype = FLOAT8 if self.kv_format == "fp8" else dtype
        kv_cache = KVCacheSpec.of_model(self.model, dtype=kv_dtype, block_size=block_size)
        shapes = parameter_shapes(self.model)
        weight_bytes = sum(map(math.prod, shapes.values())) * dtype.itemsize
        if self.weights_format == "fp8":
            in_fp8 = [shape for name, shape in shapes.items() if in_layers(name)]
            weight_bytes -= sum(math.prod(shape) * (dtype.itemsize - 1) - 4 * shape[0] for shape in in_fp8)
        return Footprint.of(self.model, kv_cache, weight_bytes)

    def build(
        self,
        limits: SchedulerConfig,
        say: OnProgress,  # noqa: ARG002
        room: Room | None = None,  # noqa: ARG002
    ) -> tuple[ForwardPass, SchedulerConfig]:
        """Load the weights and make the KV cache."""
        torch.set_num_threads(self.device.num_threads)
        dtype, device = torch_dtype(self.device.dtype), torch_device(self.device.device)
        weights = load_weights(self.checkpoint, dtype, device)
        forward = TorchForward(
            weights,
            num_blocks=limits.num_pages,
            block_size=limits.block_size,
            num_slots=limits.num_states,
            most_drafts=limits.most_drafts,
            num_tables=limits.num_tables,
        )
        return forward, limits


class CudaBackend(TorchBackend):
    """The GPU engine; see `Backend`.

    Parameters
    ----------
    checkpoint, device : what runs where; `why_not` has found nothing.
    config : how it shall run.
    make_kernels : makes the operators.
    """

    has_graphs = True
    frees_windows = False
    block_size = 64  # a row's plan changes when it gets another block: of 32 rows one in two steps, not each

    def __init__(
        self, checkpoint: Checkpoint, device: DeviceConfig, config: EngineConfig, make_kernels: MakeKernels
    ) -> None:
        super().__init__(config.model.name, checkpoint, device, "")
        self._torch_device = torch_device(device.device)
        self._config = config
        self._make_kernels = make_kernels
        self._weights: TorchWeights | None = None
        self._utilization = config.gpu_memory_utilization
        # The host waits for a router's choice, which no graph can do.
        self._is_eager = config.enforce_eager or checkpoint.config.experts is not None
        self._has_pieces = config.cuda_graph_pieces and not self._is_eager
        graphs = "without graphs" if self._is_eager else "decodes by CUDA graphs"
        pieces = ", steps with prompts in pieces" if self._has_pieces else ""
        formats = ""
        if config.quantization == "fp8":
            self.weights_format, formats = "fp8", "fp8 weights, "
        if config.kv_cache_dtype == "fp8":
            self.kv_format, formats = "fp8", f"{formats}fp8 KV, "
        self.description = f"by the GPU engine ({formats}{graphs}{pieces})"

    def remarks(self, config: EngineConfig) -> Iterator[str]:
        """Yield what nobody has tried, too, and why the start takes long; see `Backend.remarks`."""
        yield from super().remarks(config)
        if (capability := compute_capability(self.device.device)) != TRIED_CAPABILITY:
            yield (
                "the GPU engine has run on compute capability 9.0 alone (H100, H200); this GPU has "
                f"{capability[0]}.{capability[1]}"
            )
        if unbuilt_kernel(self.model, self._config)[0] is not None:
            yield "compiling attention kernels, once: about a minute"

    def fit_measured(self, limits: SchedulerConfig, room: Room, say: OnProgress) -> SchedulerConfig:
        """Load the weights, measure what the largest steps take, and give the rest to the KV cache.

        Parameters
        ----------
        limits : an estimate.
        """
        block_bytes, draft_bytes = self.needs(limits.block_size).block_bytes, 0
        if room.draft is not None:
            draft = room.draft.needs(limits.block_size)
            block_bytes, draft_bytes = block_bytes + draft.block_bytes, draft.weight_bytes
            if isinstance(room.draft, CudaBackend):
                # It verifies nothing.
                draft_bytes = room.draft._measured(replace(limits, speculation=None)).still_bytes
        measured = self._measured(limits)
        say(Detail(measured))
        return room.settle(
            measured.num_blocks(
                self._utilization,
                block_bytes=block_bytes,
                other_bytes=draft_bytes,
                wanted=None if self._config.kv_cache_memory_bytes is None else limits.num_blocks,
            )
        )

    def _measured(self, limits: SchedulerConfig) -> MeasuredMemory:
        """Load the weights, and find out what the largest steps take."""
        self._prepare()
        # The pieces of a size count as one graph: together they are a step.
        options = self._options(limits, limits.num_blocks)
        captured = (*options.graph_keys, *options.piece_sizes)
        return measure(
            self._torch_device,
            lambda num_blocks: self._make(limits, num_blocks, EagerGraphs()),
            largest_steps(limits),
            block_bytes=self.needs(limits.block_size).block_bytes,
            num_graphs=0 if self._is_eager else len(captured),
        )

    def default_kv_bytes(self, spare_bytes: int, step_bytes: int) -> int:
        """Return an estimate, until it is measured."""
        return int((spare_bytes - step_bytes) * self._utilization)

    def build(
        self, limits: SchedulerConfig, say: OnProgress, room: Room | None = None
    ) -> tuple[ForwardPass, SchedulerConfig]:
        """Load the weights, measure memory, and capture the graphs."""
        if room is not None:
            limits = self.fit_measured(limits, room, say)
        own = limits if room is not None else replace(limits, speculation=None)  # it verifies nothing
        self._prepare()
        graphs = EagerGraphs() if self._is_eager else CudaGraphs(self._torch_device)
        return self._make(own, limits.num_blocks, graphs), limits

    def tell_excess(self, say: OnProgress) -> None:
        """Say it; see `Backend.tell_excess`."""
        free, total = torch.cuda.mem_get_info(self._torch_device)
        if (excess := total - free - int(self._utilization * total)) > 0:
            say(
                f"the GPU engine took {excess / 2**20:.0f} MiB more than its share of the memory: its graphs "
                "are larger than was planned for"
            )

    def _prepare(self) -> None:
        """Load the weights, once."""
        if self._weights is not None:
            return
        # Threads of torch would wait for their next work at full speed, on cores that other processes need.
        torch.set_num_threads(1)
        dtype, where = torch_dtype(self.device.dtype), self._torch_device
        self._weights = load_weights(self.checkpoint, dtype, where, in_fp8=self.weights_format == "fp8")

    def _options(self, limits: SchedulerConfig, num_blocks: int) -> CudaOptions:
        options = CudaOptions(
            num_blocks=num_blocks,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            has_fp8_kv=self.kv_format == "fp8",
        )
        if not self._has_pieces:
            return options
        widths: tuple[int, ...] = ()
        if (speculation := limits.speculation) is not None:
            most = 1 + speculation.num_speculative_tokens
            widths = (most,) if speculation.draft_length == "fixed" else tuple(range(2, most + 1))
        sizes = piece_sizes(limits.max_num_batched_tokens)
        return replace(options, piece_sizes=sizes, verify_widths=widths)

    def _make(self, limits: SchedulerConfig, num_blocks: int, graphs: Graphs) -> CudaForward:
        options = self._options(limits, num_blocks)
        weights = self._weights
        assert weights is not None, "nothing is loaded"
        kernels = self._make_kernels(kernel_sizes(weights, options))
        return CudaForward(weights, kernels, graphs, options)


_UNSEEN_BYTES = 64 << 20
"""For what the driver takes later: more of a stream's, of a library's."""
_GRAPH_BYTES = 24 << 20
"""For a captured graph, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """A device's memory once the weights are there, and what steps take beside them; bytes."""

    total: int
    used: int
    """By the weights, by libraries, and by whoever else is on the device."""
    step: int
    """By the largest step while it runs, and by what steps keep beside the KV cache."""
    num_graphs: int

    @property
    def still_bytes(self) -> int:
        """What is still to be taken, the KV cache left out."""
        return self.step + _UNSEEN_BYTES + self.num_graphs * _GRAPH_BYTES

    def num_blocks(
        self, utilization: float, *, block_bytes: int, other_bytes: int, wanted: int | None
    ) -> int:
        """Return how many KV blocks there are to be: as many as are wanted, else as many as fit.

        Parameters
        ----------
        utilization : share of the device's memory that may be used by all.
        block_bytes : of a block, with what a draft model keeps beside it.
        other_bytes : that are still to be taken by others, such as a draft model.
        wanted : None leaves the number open.

        Raises
        ------
        ConfigError : so many do not fit, or not even one does.
        """
        # One block more is for padding.
        left = int(utilization * self.total) - self.used - self.still_bytes - other_bytes
        fitting = left // block_bytes - 1
        if fitting >= (wanted or 1):
            return wanted or fitting
        problem = (
            f"of the GPU's {_size(self.total)}, {_size(self.used)} are taken by weights, libraries and "
            f"others, and the largest steps take {_size(self.step)}: a share of {utilization} "
            "(--gpu-memory-utilization) leaves "
        )
        if fitting < 1:
            raise ConfigError(
                f"{problem}no room for a KV cache; lower --max-num-batched-tokens or --max-num-seqs, raise "
                "the share, or use a smaller model"
            )
        raise ConfigError(
            f"{problem}{_size(fitting * block_bytes)} for the KV cache, but "
            f"{_size((wanted or 0) * block_bytes)} are asked for; what fits is "
            f"--kv-cache-memory-bytes {flag_size(fitting, block_bytes)}"
        )

    def __str__(self) -> str:
        return (
            f"the largest steps take {_size(self.step)} beside {_size(self.used)} of {_size(self.total)} of "
            "the GPU's memory, as measured"
        )


def measure(
    device: torch.device,
    build: Callable[[int], ForwardPass],
    steps: Sequence[StepInputs],
    *,
    block_bytes: int,
    num_graphs: int,
) -> MeasuredMemory:
    """Run steps on a KV cache just large enough, with the weights in place.

    Parameters
    ----------
    build : makes a forward pass with so many KV blocks.
    steps : the largest there can be.
    block_bytes : of one block.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    num_blocks = max(int(step.attention.block_tables_SB.max()) + 1 for step in steps)
    forward = build(num_blocks)
    for step in steps:
        forward.run(step, wants_logits=True)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - before - (num_blocks + 1) * block_bytes
    forward.close()
    del forward
    gc.collect()  # it and its graphs refer to each other; what it took would count as used for good
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MeasuredMemory(total=total, used=total - free, step=max(peak, 0), num_graphs=num_graphs)


def largest_steps(limits: SchedulerConfig) -> list[StepInputs]:
    """Return a step of as many prompt tokens as there may be, and one of as many rows that decode.

    With drafts there is a third one, of as many tokens that are drawn as there may be.
    """
    num_tokens, longest = limits.max_num_batched_tokens, limits.max_model_len
    lens = [longest] * (num_tokens // longest)
    if rest := num_tokens % longest:
        lens.append(rest)
    steps = [_step(limits, lens[: limits.max_num_seqs]), _step(limits, [1] * limits.max_num_seqs)]
    if limits.speculation is not None:
        length = min(1 + limits.speculation.num_speculative_tokens, longest, num_tokens)
        num_rows = min(limits.max_num_seqs, num_tokens // length)
        steps.append(_step(limits, [length] * num_rows, num_drafts=length - 1))
    return steps


def _step(limits: SchedulerConfig, lens: Sequence[int], num_drafts: int = 0) -> StepInputs:
    """Return a step of rows without a past, each of which samples behind its last token and its drafts."""
    batch = InputBatch(
        max_num_seqs=len(lens), max_model_len=limits.max_model_len, block_size=limits.block_size
    )
    block_ids, rows = count(), []
    for index, length in enumerate(lens):
        prompt = (0,) * (length - num_drafts)
        request = Request(request_id=str(index), prompt_token_ids=prompt, sampling=SamplingParams())
        own_blocks = tuple(islice(block_ids, -(-length // limits.block_size)))
        batch.admit(AdmittedRequest(request, (), own_blocks))
        name, drafts = request.request_id, num_drafts
        rows.append(ScheduledRequest(name, 0, length, (), samples=True, num_draft_tokens=drafts))
    return batch.prepare(rows, [[0] * num_drafts] * len(rows) if num_drafts else None)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
