"""Configuration of one engine; imports no torch, so that the command line starts quickly."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

from onbeat.core.errors import ConfigError
from onbeat.core.options import check, option, part
from onbeat.core.slo import SLO
from onbeat.files import packaged, parse_object
from onbeat.hub.files import ModelFiles
from onbeat.scheduler.scheduler_config import SchedulerLimits
from onbeat.speculative_config import SpeculativeConfig, speculative_option
from onbeat.typed import Table

DTypeName = Literal["auto", "float32", "bfloat16", "float64"]
DTYPES: tuple[str, ...] = get_args(DTypeName)
BackendName = Literal["auto", "native", "cuda", "vllm", "torch"]
BACKENDS: tuple[str, ...] = get_args(BackendName)
Quantization = Literal["auto", "none", "int8", "int4", "fp8"]
ActivationQuantization = Literal["auto", "none", "int8"]
LORA_FORM = "NAME=PATH"
InstructionSet = Literal["auto", "amx", "avx512bf16", "avx512", "avx2", "portable"]

_model, _engine = partial(option, group="model"), partial(option, group="engine")


class _VllmFlags(Table):
    ours: str
    not_behind: dict[str, str]


@cache
def vllm_flags() -> tuple[frozenset[str], Mapping[str, str]]:
    """Return the flags of vLLM that onbeat has too, and those that may not be given, with what to do."""
    table = packaged(_VllmFlags, "onbeat.engine", "vllm_flags.yaml")
    cures = {name: cure for cure, names in table.not_behind.items() for name in names.split()}
    return frozenset(table.ours.split()), cures


def check_vllm_arguments(arguments: Sequence[str]) -> None:
    """Refuse what is onbeat's to say; vLLM judges the others.

    Raises
    ------
    ConfigError : naming onbeat's flag, or the reason.
    """
    for argument in arguments:
        if not argument.startswith("-"):
            continue
        ours, cures = vllm_flags()
        flag = argument.partition("=")[0]
        name = flag.lstrip("-").partition(".")[0].replace("-", "_").removeprefix("no_")
        if name in ours:
            raise ConfigError(f"{flag} behind `--`: onbeat has this flag; give it before the `--`")
        if name in cures:
            raise ConfigError(f"{flag} behind `--`: {cures[name]}")


DEFAULT_GPU_UTILIZATION = 0.9
"""Share of the GPU's memory that may be taken, with what others have of it."""


def parse_lora_module(text: str) -> tuple[str, str]:
    """Return the name of a LoRA adapter and the folder of its files.

    Raises
    ------
    argparse.ArgumentTypeError : it is not written so.
    """
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ArgumentTypeError(f"{text!r} is no adapter; give {LORA_FORM}, such as sql=./sql-lora")
    return name, path


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """One of equal shares of the memory that was free before the first engine started."""

    total_bytes: int
    num_shares: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What one engine loads and how it runs. None means: decided at start, and said."""

    model: ModelFiles
    load_format: Literal["auto", "dummy", "stand-in"] = _model(
        "auto",
        help="where weights come from; auto: from the model's files; dummy: random weights; stand-in: no "
        "model, a step takes its predicted time on --device",
    )
    dtype: DTypeName = _model(
        "auto",
        help="number type of weights and activations; auto: bfloat16 if the device computes in it natively, "
        "else float32",
    )
    quantization: Quantization = _model(
        "auto",
        help="format of the weights; auto: as in the file, which the torch backend dequantizes; none: all in "
        "--dtype; int8: all matrices in 8 bits, with a scale for 32 neighbours (native backend only); int4: "
        "those of the layers in 4 bits, with a scale and an offset, embedding and head in 8 (native backend "
        "only); fp8: likewise in 8 bits, with a scale a row (GPU engine only; not run on a GPU yet)",
    )
    activation_quantization: ActivationQuantization = _engine(
        "auto",
        help="number format of activations that meet quantized weights (native backend); int8: 8 bits, with "
        "a scale for 32 neighbours; none: --dtype, exact and slower; auto: int8 if the processor "
        "multiplies bytes faster",
    )
    pooling: Literal["auto", "last", "mean"] = _model(
        "auto",
        help="how an embedding is made; last: from the last token's hidden state; mean: from the mean of "
        "all; auto: as the model's files say, else last",
    )
    seed: int = _model(0, help="seed of dummy weights")
    generation_config: str = _model(
        "auto",
        metavar="SOURCE",
        help="sampling defaults of requests; auto: those of the model's files; vllm: none; or a folder with "
        "a generation_config.json",
    )
    override_generation_config: Mapping[str, Any] | None = _model(
        None,
        parse=partial(parse_object, what="override_generation_config"),
        metavar="JSON",
        help="sampling defaults that win over those, such as '{\"temperature\": 0.5}'",
    )
    lora_modules: tuple[tuple[str, str], ...] = _model(
        (),
        parse=parse_lora_module,
        metavar=LORA_FORM,
        help="LoRA adapters to load; the model NAME of a request is then the one in the folder PATH (vllm "
        "backend only)",
    )
    enable_lora: bool = _model(
        default=False,
        help="let POST /v1/load_lora_adapter load LoRA adapters later, also where none is loaded at start",
    )
    max_loras: int | None = _model(
        None,
        at_least=1,
        metavar="N",
        help="most LoRA adapters that are loaded at a time (default: as many as --lora-modules, at least 1)",
    )
    max_lora_rank: int = _model(
        16, at_least=1, metavar="RANK", help="largest rank of a LoRA adapter; vLLM says which there may be"
    )
    device: str = _engine(
        "auto",
        help="where to run: auto, cpu, cuda, cuda:N; a GPU's name, such as h100-sxm: cuda, if that GPU is "
        "there; with a stand-in: the device to stand in for",
    )
    backend: BackendName = _engine(
        "auto",
        help="what computes steps; native: the CPU engine; cuda: the GPU engine; vllm: vLLM's workers, for "
        "any model that vLLM runs (vLLM's own flags follow after --); torch: the reference; auto: vllm if "
        "flags follow after --, else the device's own engine if it supports the model, else vllm or torch",
    )
    instruction_set: InstructionSet = _engine(
        "auto",
        help="instruction set of the native CPU engine; auto: the fastest here, timed at the first start",
    )
    batch_invariant: bool = _engine(
        default=False,
        help="compute the same numbers for a request, bit for bit, in any batch (native backend only)",
    )
    threads: int | None = _engine(
        None,
        at_least=1,
        metavar="N",
        help="CPU threads of a forward pass (default: all cores, or what a CPU quota leaves)",
    )
    kv_cache_memory_bytes: int | None = _engine(
        None,
        at_least=1,
        metavar="BYTES",
        help="memory of the KV cache, such as 2G; default on a CPU: a quarter of the free memory, at most "
        "4G; or what a request of --max-model-len takes (else one of 4096 tokens, if that fits), if that is "
        "more; default on a GPU: what --gpu-memory-utilization leaves",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = _engine(
        "auto",
        help="number type of keys and values; auto: --dtype; fp8: 8 bits (GPU engine only; not run on a GPU "
        "yet)",
    )
    gpu_memory_utilization: float = _engine(
        DEFAULT_GPU_UTILIZATION,
        metavar="SHARE",
        above=0,
        at_most=1,
        help="share of the GPU's memory that all its programs may take together",
    )
    enforce_eager: bool = _engine(
        default=False, help="run decode steps operator by operator, not as CUDA graphs (GPU engine)"
    )
    cuda_graph_pieces: bool = _engine(
        default=False,
        help="capture steps with prompts too, as CUDA graphs of pieces around attention, and as whole "
        "graphs those that verify as many drafts in each row (GPU engine); not run on a GPU yet",
    )
    tensor_parallel_size: int = _engine(
        1,
        aliases=("-tp",),
        at_least=1,
        metavar="N",
        help="devices that share each layer: by vLLM, or as a stand-in of them",
    )
    step_time_profile: str = _engine(
        "auto",
        metavar="FILE",
        help="what predicts step times; FILE: a profile of `onbeat profile`; auto: the cached profile of "
        "this model and machine, else roofline, corrected by two steps timed now; calibrate: measure for "
        "some seconds now; roofline: estimate from hardware limits; none: no predictions",
    )
    speculative: SpeculativeConfig | None = speculative_option("engine")
    limits: SchedulerLimits = part(SchedulerLimits)
    async_scheduling: bool | None = option(
        default=None,
        group="scheduler",
        help="plan the next step while the current one runs (default: with the GPU engine, without drafts)",
    )
    record: Path | None = option(
        None, group="server", metavar="FILE", help="write what the scheduler does, for `onbeat replay FILE`"
    )
    vllm_arguments: Sequence[str] = ()
    """Flags of vLLM's own, as on its command line, with their values."""
    memory_share: MemoryShare | None = None
    """What of the machine's memory the engine may take, where several share it; None is all that is free."""
    slo_classes: Mapping[str, SLO] = field(default_factory=dict)
    """Objectives that requests may carry, by class: at start the engine says which it cannot meet."""
    reports_load: bool = False
    """Whether its messages say how it stands: for an engine that is one of several."""
    window_tokens: int | None = None
    """As of `SchedulerConfig`."""

    def __post_init__(self) -> None:
        check(self, EngineConfig)
        if self.enforce_eager and self.cuda_graph_pieces:
            raise ConfigError("--enforce-eager does without the graphs of --cuda-graph-pieces; leave one out")
        if self.vllm_arguments and (self.backend not in ("auto", "vllm") or self.load_format == "stand-in"):
            runs = "a stand-in" if self.load_format == "stand-in" else f"--backend {self.backend}"
            raise ConfigError(
                "arguments behind `--` (in a file: `vllm`) are vLLM's, but the model would run by "
                f"{runs}; leave them out, or give --backend vllm"
            )
        check_vllm_arguments(self.vllm_arguments)
        names = [name for name, _ in self.lora_modules]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"lora_modules has two adapters of the name {twice!r}; give one another name")
        if len(names) > self.num_loras:
            raise ConfigError(
                f"max_loras is {self.max_loras}, but lora_modules has {len(names)} adapters, which all stay "
                "loaded; raise --max-loras"
            )

    @property
    def most_drafts(self) -> int:
        """Drafts that a request may have in a step."""
        return 0 if self.speculative is None else self.speculative.num_speculative_tokens

    @property
    def num_loras(self) -> int:
        """LoRA adapters for which there is room; 0 where none is asked for."""
        if not (self.enable_lora or self.lora_modules or self.max_loras):
            return 0
        return self.max_loras or max(len(self.lora_modules), 1)


def own_settings(config: EngineConfig) -> Iterator[tuple[str, str, BackendName]]:
    """Yield the settings, and their values, that ask for what only one of our engines does, and which."""
    for name in ("quantization", "activation_quantization", "instruction_set", "kv_cache_dtype"):
        if (value := getattr(config, name)) not in ("auto", "none"):
            yield name, value, "cuda" if value == "fp8" else "native"
    if config.batch_invariant:
        yield "batch_invariant", "on", "native"
