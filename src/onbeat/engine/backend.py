"""Which forward pass serves: decided at start, by what was asked for, the machine and the build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol, runtime_checkable

from onbeat.core.errors import ConfigError, ModelLoadError
from onbeat.core.extras import require
from onbeat.engine.device import DeviceConfig, device_name
from onbeat.engine.engine_config import EngineConfig, InstructionSet, native_settings
from onbeat.engine.forward import ForwardPass
from onbeat.engine.kv_cache import KVCacheSpec
from onbeat.engine.native.forward import NativeForward, NativeModel, NativeOptions
from onbeat.engine.native.layouts import PLAIN_LAYOUTS, WeightLayouts
from onbeat.engine.native.library import NativeLibrary, NotLoaded, load_library
from onbeat.engine.native.packing import NativeWeights, WeightPacker
from onbeat.engine.native.set_timer import choose_instruction_set
from onbeat.engine.native.weights_copy import NONE, CopyChoice, choose_copy, make_copy, why_no_copy
from onbeat.engine.progress import Detail, OnProgress
from onbeat.engine.weights import Checkpoint
from onbeat.perfmodel.profile_file import cache_dir
from onbeat.scheduler.scheduler_config import SchedulerConfig

SettleLimits = Callable[[int], SchedulerConfig]
"""From a number of KV blocks to limits that go with it."""

NATIVE_HEAD_MULTIPLE = 16
"""The native KV cache pads heads to a multiple of this width."""


class Backend(Protocol):
    """How one checkpoint becomes a forward pass on one device."""

    @property
    def description(self) -> str:
        """What runs, and why it and not another, for people."""
        ...

    @property
    def weights_format(self) -> str | None:
        """Number format of most weights; None where they are of the model's type."""
        ...

    @property
    def embedding_format(self) -> str | None:
        """Number format of the LM head, likewise."""
        ...

    def weight_bytes(self) -> int:
        """Return about how much memory the weights will take."""
        ...

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec: ...

    def build(self, limits: SchedulerConfig, *, on_progress: OnProgress, spare_bytes: int = 0) -> ForwardPass:
        """Load the weights and make the KV cache.

        Parameters
        ----------
        limits : of what steps may be planned, and of the KV cache.
        spare_bytes : memory that is left beside weights, KV cache and what steps need.
        on_progress : told what was decided on the way.

        Raises
        ------
        ConfigError : a weight cannot be read, or memory is short.
        """
        ...


@runtime_checkable
class MeasuresMemory(Protocol):
    """A backend that finds out what memory it needs, and so how many KV blocks there can be."""

    def default_kv_bytes(self, spare_bytes: int, step_bytes: int) -> int:
        """Return what the KV cache takes, until that is found out, where the user gives no size.

        Parameters
        ----------
        spare_bytes : that the weights leave.
        step_bytes : of those, what the largest steps take, about.
        """
        ...

    def fit_limits(
        self,
        limits: SchedulerConfig,
        settle: SettleLimits,
        draft: Backend | None,
        *,
        on_progress: OnProgress,
    ) -> SchedulerConfig:
        """Load the weights, and return the limits that go with the memory there is; comes before `build`.

        Parameters
        ----------
        limits : an estimate.
        settle : from a number of KV blocks to limits.
        draft : of the model that makes drafts, which will be built with the same limits.

        Raises
        ------
        ConfigError : a weight cannot be read, or memory is short.
        """
        ...

    def tell_excess(self, on_progress: OnProgress) -> None:
        """Say by how much more memory was taken than may be, once all is there, a draft model included."""
        ...


@runtime_checkable
class KeepsQuantized(Protocol):
    """A backend that multiplies some weights as the file has them."""

    def plain_names(self) -> list[str]:
        """Return the parameters of matrices that it keeps as plain numbers."""
        ...


class NativeBackend:
    """The native CPU engine.

    Parameters
    ----------
    library : what runs.
    checkpoint, device : the weights, and type and threads.
    config : how it shall run.

    Raises
    ------
    ConfigError : this processor lacks the instruction set, or weights are not quantized that must be.
    """

    def __init__(
        self, library: NativeLibrary, checkpoint: Checkpoint, device: DeviceConfig, config: EngineConfig
    ) -> None:
        layouts = WeightLayouts(checkpoint, dtype=device.dtype, quantization=config.quantization)
        if config.activation_quantization == "int8" and not layouts.are_any_quantized:
            raise ConfigError(
                "activation_quantization int8 needs quantized weights, but those of this model are not; give "
                "--quantization int8 too, or leave --activation-quantization out"
            )
        self._library = library
        self._config = config
        self._instruction_set = instruction_set = _instruction_set(library, config.instruction_set)
        self._checkpoint = checkpoint
        self._device = device
        self._layouts = layouts
        self.weights_format: str | None = layouts.number_format()
        self.embedding_format: str | None = layouts.embedding_format()
        given = "" if instruction_set is None else f"{instruction_set}, "
        numbers = ", batch-invariant" if config.batch_invariant else ""
        self.description = f"by the native engine ({given}{self.weights_format} weights{numbers})"

    def weight_bytes(self) -> int:
        return self._layouts.num_bytes()

    def plain_names(self) -> list[str]:
        return self._layouts.plain_names()

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        return KVCacheSpec.of_model(
            self._checkpoint.config,
            dtype=self._device.dtype,
            block_size=block_size,
            head_dim_multiple=NATIVE_HEAD_MULTIPLE,
        )

    def build(self, limits: SchedulerConfig, *, on_progress: OnProgress, spare_bytes: int = 0) -> ForwardPass:
        num_threads = self._device.num_threads
        packer = WeightPacker(self._library, self._checkpoint, self._layouts, num_threads=num_threads)
        options = NativeOptions(
            dtype=self._device.dtype,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            num_threads=num_threads,
            activation_quantization=self._config.activation_quantization,
            instruction_set=self._instruction_set,
            batch_invariant=self._config.batch_invariant,
        )
        weights = packer.pack()
        copy = None
        if self._config.weights_copy == "auto" and weights.quantized_products:
            copy = self._choose_copy(weights, options, spare_bytes)
            options = replace(options, copy_rows=copy.rows)
        if self._instruction_set is None:
            options = self._with_quickest_set(weights, options, on_progress)
        if copy is not None:
            options = _with_copy(copy, weights, options, on_progress)
        return NativeForward(self._library, self._checkpoint.config, weights, options)

    def _choose_copy(self, weights: NativeWeights, options: NativeOptions, spare_bytes: int) -> CopyChoice:
        if why := why_no_copy(weights, options, spare_bytes):
            return CopyChoice(0, why)
        newest = self._library.instruction_sets[0]
        options = replace(options, instruction_set=options.instruction_set or newest)
        model = NativeModel(self._library, self._checkpoint.config, weights, options)
        directory = cache_dir() / "weights-copies"
        return choose_copy(model, processor=device_name(self._device), directory=directory)

    def _with_quickest_set(
        self, weights: NativeWeights, options: NativeOptions, on_progress: OnProgress
    ) -> NativeOptions:
        if self._library.withheld:
            on_progress(
                f"the system withholds the instruction set {self._library.withheld}, which this processor "
                "has; Linux 5.16 or newer grants it, unless a container or sandbox forbids the call"
            )
        model = NativeModel(self._library, self._checkpoint.config, weights, options)
        processor, directory = device_name(self._device), cache_dir() / "instruction-sets"
        chosen, reason = choose_instruction_set(model, processor=processor, directory=directory)
        on_progress(Detail(f"instruction set {chosen}, {reason}"))
        copy_rows = options.copy_rows if chosen == self._library.instruction_sets[0] else 0
        return replace(options, instruction_set=chosen, copy_rows=copy_rows)


def _with_copy(
    copy: CopyChoice, weights: NativeWeights, options: NativeOptions, on_progress: OnProgress
) -> NativeOptions:
    """Make the copy that was chosen, unless memory runs out or another set is quicker without."""
    if copy.rows and not options.copy_rows:
        on_progress(Detail(f"{NONE}: {options.instruction_set} is quicker without"))
        return options
    try:
        if copy.rows:
            make_copy(weights, options)
    except ModelLoadError as error:
        on_progress(Detail(f"{NONE}: {error}"))
        return replace(options, copy_rows=0)
    on_progress(Detail(copy.reason))
    return options


def choose_backend(config: EngineConfig, checkpoint: Checkpoint, device: DeviceConfig) -> Backend:
    """Take the engine that is made for the device, where it can run and nothing else is asked for.

    Raises
    ------
    ConfigError : what was asked for cannot run here.
    """
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but a replica that computes runs on one "
            "device; leave --tensor-parallel-size out, or give --load-format stand-in"
        )
    if config.backend == "torch":
        return _not_native(config, _by_torch(checkpoint, device, "as asked for"), "torch (as asked for)")
    engine = _ENGINES[_ENGINE_OF_DEVICE[device.device.type] if config.backend == "auto" else config.backend]
    found = engine.make(config, checkpoint, device)
    if not isinstance(found, str):
        return found if isinstance(found, NativeBackend) else _not_native(config, found, engine.name)
    if config.backend != "auto":
        raise ConfigError(f"{engine.name} cannot run: {found}; leave --backend out to use torch")
    backend = _by_torch(checkpoint, device, f"not by {engine.name}: {found}")
    return _not_native(config, backend, f"torch ({found})")


def _not_native(config: EngineConfig, backend: Backend, name: str) -> Backend:
    """Return a backend, unless something is asked for that only the native engine does."""
    if setting := next(native_settings(config), None):
        raise ConfigError(
            f"{setting[0]} {setting[1]} needs the native engine, but the model would run by {name}; leave "
            f"--{setting[0].replace('_', '-')} out"
        )
    return backend


def _by_torch(checkpoint: Checkpoint, device: DeviceConfig, reason: str) -> Backend:
    """Return the reference engine.

    Raises
    ------
    MissingExtra : torch is not installed.
    """
    require("torch", extra="torch", purpose=f"a model that runs by torch ({reason})")
    from onbeat.engine.torch.backend import TorchBackend

    return TorchBackend(checkpoint, device, reason)


def _instruction_set(library: NativeLibrary, wanted: InstructionSet) -> str | None:
    has = library.instruction_sets
    if wanted == "auto":
        return None
    if wanted not in has:
        withheld = f" (withheld: {library.withheld})" if library.withheld else ""
        raise ConfigError(
            f"this processor, its system{withheld} or this build has no {wanted}; choose one of "
            f"{', '.join(has)}, or leave --instruction-set out"
        )
    return wanted


def _make_native(config: EngineConfig, checkpoint: Checkpoint, device: DeviceConfig) -> Backend | str:
    """Return the native engine, or why it cannot run."""
    if device.device.type != "cpu":
        return f"it runs on the CPU, not on {device.device}"
    if device.dtype not in PLAIN_LAYOUTS:
        return f"it does not compute in {device.dtype.name}"
    library = load_library()
    if isinstance(library, NotLoaded):
        return library.reason
    return NativeBackend(library, checkpoint, device, config)


def _make_cuda(config: EngineConfig, checkpoint: Checkpoint, device: DeviceConfig) -> Backend | str:
    """Return the GPU engine, or why it cannot run."""
    if device.device.type != "cuda":
        return f"it runs on a CUDA device, not on {device.device}"
    from onbeat.engine.cuda.backend import CudaBackend, fast_kernels, why_not

    return why_not(checkpoint, device, config.limits.block_size) or CudaBackend(
        checkpoint, device, config, fast_kernels
    )


class _Engine(NamedTuple):
    name: str
    make: Callable[[EngineConfig, Checkpoint, DeviceConfig], Backend | str]


_ENGINES = {
    "native": _Engine("the native engine", _make_native),
    "cuda": _Engine("the GPU engine", _make_cuda),
}
"""By their names on the command line."""
_ENGINE_OF_DEVICE = {"cpu": "native", "cuda": "cuda"}
