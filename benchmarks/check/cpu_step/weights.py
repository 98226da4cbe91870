"""How many bytes of weights a step reads."""

from __future__ import annotations

from gguf import GGUFReader

from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.load import LoadedModel
from onbeat.perfmodel.model_sizes import ModelSpec

from .floor import WeightBytes

INT8_BYTES = 1 + 2 / 32
"""Of a number in 8 bits, with a scale of 16 bits for 32 neighbours."""


def weight_bytes(config: EngineConfig, loaded: LoadedModel, model: ModelSpec) -> WeightBytes:
    """Return the bytes of the layers' matrices and of the LM head, as the file or the option has them.

    An engine that packs them with more bytes has a longer way to this floor.
    """
    is_native = loaded.runner.forward.settings["backend"] == "native"
    plain = loaded.device.dtype.itemsize
    if is_native and config.quantization == "int8":
        return _of_size(model, INT8_BYTES)
    if is_native and config.quantization == "auto" and config.model.kind == "gguf":
        return _in_file(config, plain)
    return _of_size(model, plain)


def _of_size(model: ModelSpec, number_bytes: float) -> WeightBytes:
    return WeightBytes(
        layers=model.active_layer_parameters * number_bytes, head=model.embedding_parameters * number_bytes
    )


def _in_file(config: EngineConfig, plain: int) -> WeightBytes:
    # Numbers that the file does not quantize are packed in the engine's own type.
    sizes = {
        tensor.name: min(int(tensor.n_bytes), int(tensor.n_elements) * plain)
        for tensor in GGUFReader(config.model.path).tensors
        if len(tensor.shape) == 2
    }
    layers = sum(size for name, size in sizes.items() if name.startswith("blk."))
    return WeightBytes(layers=layers, head=sizes.get("output.weight", sizes["token_embd.weight"]))
