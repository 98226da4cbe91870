"""Quantized safetensors: each scheme is written by a quantizer here, and read as what it stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from onbeat.core.errors import ModelLoadError, NeedsVllm
from onbeat.engine.dtypes import BFLOAT16, FLOAT32
from onbeat.engine.engine_config import ActivationQuantization
from onbeat.engine.native import packing
from onbeat.engine.native.layouts import WeightLayouts
from onbeat.engine.native.library import NativeLibrary, Store
from onbeat.engine.torch.weights import load_weights
from onbeat.engine.weights.checkpoint import Checkpoint, loading_remarks
from onbeat.engine.weights.open import SafetensorsCheckpoint, open_checkpoint
from onbeat.engine.weights.quantized import Codes, Settings, Stored, gather
from onbeat.hub.files import ModelFiles
from tests.cpu.engine.forwards import MakeForward, on_native, on_torch, pack, rows_of
from tests.cpu.engine.step_driver import StepDriver
from tests.cpu.engine.tiny_models import random_prompt
from tests.cpu.native.test_forward import relative_error
from tests.cpu.weights.tiny_models import COMMON, FAMILIES, parameters

CPU = torch.device("cpu")
SIZES = COMMON | {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 211}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, torch.Tensor]
"""A weight's tensors, by the ends of their names, and what they stand for."""


# ---- Quantizers: N outputs, K inputs, G groups ----


def in_groups(weight_NK: torch.Tensor, size: int) -> torch.Tensor:
    return weight_NK.reshape(len(weight_NK), -1, size)


def whole(weight_NK: torch.Tensor, bits: int, *, size: int, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Return codes [N, K], scales and zeros [N, G], and the group of each input."""
    groups = in_groups(weight_NK, size)
    most = 2**bits - 1
    if symmetric:
        scales = (groups.abs().amax(-1) / (most // 2)).half().float()
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low = groups.amin(-1)
        scales = ((groups.amax(-1) - low) / most).half().float()
        zeros = (-low / scales).round().clamp(1, most)
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, most)
    return codes.reshape(weight_NK.shape), scales, zeros


def meant(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, size: int) -> torch.Tensor:
    return (codes - zeros.repeat_interleave(size, 1)) * scales.repeat_interleave(size, 1)


def words(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack columns into words of 32 bits, the first in the lowest bits."""
    count = 32 // bits
    parts = values.long().reshape(len(values), -1, count)[..., list(order or range(count))]
    packed = (parts << (bits * torch.arange(count))).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def gptq(
    weight_NK: torch.Tensor, *, bits: int = 4, symmetric: bool = False, order: bool = False, plus: int = 1
) -> Written:
    perm = torch.randperm(weight_NK.shape[1]) if order else torch.arange(weight_NK.shape[1])
    codes, scales, zeros = whole(weight_NK[:, perm], bits, size=128, symmetric=symmetric)
    stands_for, in_order, g_idx = torch.empty_like(weight_NK), torch.empty_like(codes), torch.empty_like(perm)
    stands_for[:, perm], in_order[:, perm] = meant(codes, scales, zeros, 128), codes
    g_idx[perm] = torch.arange(len(perm)) // 128
    parts = {
        "qweight": words(in_order, bits).t(),
        "qzeros": words(zeros.t() - plus, bits),
        "scales": scales.t().half(),
        "g_idx": g_idx.to(torch.int32),
    }
    return parts, stands_for


def awq(weight_NK: torch.Tensor) -> Written:
    codes, scales, zeros = whole(weight_NK, 4, size=64, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": words(codes.t(), 4, order), "qzeros": words(zeros.t(), 4, order)}
    return {**parts, "scales": scales.t().half()}, meant(codes, scales, zeros, 64)


def packed(weight_NK: torch.Tensor, *, bits: int = 4, symmetric: bool = True) -> Written:
    codes, scales, zeros = whole(weight_NK, bits, size=128, symmetric=symmetric)
    scales = scales.bfloat16().float()
    parts = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(weight_NK.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = words(zeros.t(), bits).t()
    return parts, meant(codes, scales, zeros, 128)


def int8(weight_NK: torch.Tensor) -> Written:
    scales = weight_NK.abs().amax(1, keepdim=True) / 127
    codes = (weight_NK / scales).round()
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales


def fp8(weight_NK: torch.Tensor, *, by: str) -> Written:
    """By `tensor`, `channel`, or `block` of 128."""
    size = weight_NK.abs()
    if by == "block":
        rows, columns = (-(-each // 128) for each in weight_NK.shape)
        padded = torch.nn.functional.pad(size, (0, -size.shape[1] % 128, 0, -size.shape[0] % 128))
        scales = padded.reshape(rows, 128, columns, 128).amax((1, 3)) / 448
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(size), : size.shape[1]]
    else:
        scales = (size.amax(1, keepdim=True) if by == "channel" else size.amax()) / 448
        spread = scales
    codes = (weight_NK / spread).to(torch.float8_e4m3fn)
    parts = {"weight": codes, "weight_scale_inv" if by == "block" else "weight_scale": scales}
    if by == "tensor":
        parts["input_scale"] = torch.tensor(0.5)
    return parts, codes.float() * spread


def e2m1(scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes of 4 bits in pairs, and their numbers."""
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    numbers = E2M1[codes] * scaled.sign()
    codes = codes + 8 * (scaled < 0)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), numbers


def nvfp4(weight_NK: torch.Tensor, *, divides: bool) -> Written:
    over = weight_NK.abs().max() / (6 * 448)
    groups = in_groups(weight_NK, 16)
    scales = (groups.abs().amax(-1) / 6 / over).to(torch.float8_e4m3fn)
    spread = (scales.float() * over).repeat_interleave(16, 1)
    pairs, numbers = e2m1(weight_NK / spread)
    if divides:
        parts = {"weight_packed": pairs, "weight_global_scale": (1 / over).reshape(1)}
    else:
        parts = {"weight": pairs, "weight_scale_2": over}
    return {**parts, "weight_scale": scales}, numbers * spread


def mxfp4(weight_NK: torch.Tensor) -> Written:
    exponents = (in_groups(weight_NK, 32).abs().amax(-1) / 6).log2().ceil()
    spread = (2**exponents).repeat_interleave(32, 1)
    pairs, numbers = e2m1(weight_NK / spread)
    return {"weight_packed": pairs, "weight_scale": (exponents + 127).to(torch.uint8)}, numbers * spread


class Way(NamedTuple):
    write: Callable[[torch.Tensor], Written]
    settings: Mapping[str, Any]
    store: Store
    """Of the native engine in float32."""
    error: float
    """Of the logits, at most: some 10 times what was found."""
    says: str


def compressed(bits: int, *, activations: bool = False) -> dict[str, Any]:
    group = {"weights": {"num_bits": bits}, "input_activations": {"num_bits": 8} if activations else None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


ROUNDED = r"rounded by 0\.0\d+ %"
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False}
WAYS = {
    "fp8 by tensor": Way(
        lambda weight: fp8(weight, by="tensor"),
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        Store.F32,
        1e-5,
        "fp8 become float32 numbers, exactly",
    ),
    "fp8 by channel": Way(
        lambda weight: fp8(weight, by="channel"),
        compressed(8, activations=True),
        Store.F32,
        1e-5,
        "fp8 become",
    ),
    "fp8 by block": Way(
        lambda weight: fp8(weight, by="block"),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        Store.F32,
        1e-5,
        "fp8 become",
    ),
    "AWQ": Way(awq, {"quant_method": "awq", "bits": 4}, Store.Q4, 5e-3, rf"AWQ \(4 bits\) keep.*{ROUNDED}"),
    "GPTQ": Way(gptq, GPTQ, Store.Q4, 5e-3, rf"GPTQ \(4 bits\) keep.*{ROUNDED}"),
    "GPTQ symmetric": Way(lambda weight: gptq(weight, symmetric=True), GPTQ, Store.Q4, 1e-5, "keep.*exactly"),
    "GPTQ in order": Way(
        lambda weight: gptq(weight, order=True), GPTQ | {"desc_act": True}, Store.F32, 1e-5, "become.*exactly"
    ),
    "GPTQ second format": Way(
        lambda weight: gptq(weight, plus=0), GPTQ | {"checkpoint_format": "gptq_v2"}, Store.Q4, 5e-3, ROUNDED
    ),
    "GPTQ 8 bits": Way(
        lambda weight: gptq(weight, bits=8, symmetric=True),
        GPTQ | {"bits": 8},
        Store.Q8,
        1e-5,
        r"GPTQ \(8 bits\) keep their bits \(as Q8_0\), exactly",
    ),
    "GPTQ 8 bits with zeros": Way(
        lambda weight: gptq(weight, bits=8), GPTQ | {"bits": 8}, Store.F32, 1e-5, "become.*exactly"
    ),
    "AutoRound": Way(
        lambda weight: gptq(weight, symmetric=True),
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
        Store.Q4,
        1e-5,
        "exactly",
    ),
    "w4a16": Way(packed, compressed(4), Store.Q4, 1e-5, r"compressed-tensors \(4 bits\) keep.*exactly"),
    "w4a16 with zeros": Way(
        lambda weight: packed(weight, symmetric=False), compressed(4), Store.Q4, 5e-3, "keep.*exactly|rounded"
    ),
    "w8a16": Way(lambda weight: packed(weight, bits=8), compressed(8), Store.Q8, 1e-5, "keep.*exactly"),
    "w8a8": Way(int8, compressed(8, activations=True), Store.Q8, 5e-3, f"int8 keep.*{ROUNDED}"),
    "NVFP4": Way(
        lambda weight: nvfp4(weight, divides=False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        Store.E2M1,
        5e-3,
        f"NVFP4 keep.*{ROUNDED}",
    ),
    "NVFP4 compressed": Way(
        lambda weight: nvfp4(weight, divides=True), compressed(4), Store.E2M1, 5e-3, "NVFP4 keep"
    ),
    "MXFP4": Way(mxfp4, compressed(4), Store.E2M1, 1e-5, r"MXFP4 keep their bits \(as MXFP4\), exactly"),
}


def write(directory: Path, way: Way, model: Any) -> Any:
    """Save a model with its layers' weights quantized; return it with what they stand for."""
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                parts, stands_for = way.write(module.weight.detach())
                del tensors[f"{name}.weight"]
                tensors |= {f"{name}.{part}": value.contiguous() for part, value in parts.items()}
                module.weight.copy_(stands_for)
    save_file(tensors, directory / "model.safetensors")
    path = directory / "config.json"
    settings = {"quantization_config": dict(way.settings)}
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return model.eval()


def tiny(config: Any) -> Any:
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_config(config)


def open_directory(path: Path) -> Checkpoint:
    return open_checkpoint(ModelFiles(kind="hf", path=path, name="tiny"))


def check_answer(make_forward: MakeForward, model: Any, error: float) -> None:
    """Compare greedy tokens that follow a prompt in chunks, and the logits behind them, with a model's."""
    driver = StepDriver(make_forward)
    driver.add(random_prompt(20), 5)
    driver.run(chunk=7)
    (live,) = driver.requests.values()
    known = [*live.request.prompt_token_ids, *live.output_token_ids]
    expected = model(torch.tensor([known[:-1]])).logits[0, 19:].detach()
    assert relative_error(torch.stack(live.logits), expected) < error
    chosen = expected.gather(1, torch.tensor(live.output_token_ids)[:, None])[:, 0]
    # Another token than the best is one that such an error cannot tell from it.
    assert (expected.amax(-1) - chosen <= error * expected.norm(dim=-1)).all()


@pytest.mark.parametrize("name", WAYS)
def test_answers_are_those_of_the_dequantized_model(
    native_library: NativeLibrary, name: str, tmp_path: Path
) -> None:
    way = WAYS[name]
    model = write(tmp_path, way, tiny(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)))
    checkpoint = open_directory(tmp_path)
    for parameter, tensor in model.state_dict().items():
        np.testing.assert_allclose(checkpoint.get(parameter, FLOAT32), tensor.numpy(), rtol=1e-6, atol=0)

    check_answer(on_torch(load_weights(checkpoint, dtype=torch.float32, device=CPU)), model, 1e-5)
    errors: dict[ActivationQuantization, float] = {"none": way.error, "auto": 0.03}
    for activations, error in errors.items():
        native = on_native(
            native_library, checkpoint, quantization="auto", activation_quantization=activations
        )
        check_answer(native, model, error)

    weights = pack(native_library, checkpoint, quantization="auto")
    assert {matrix.layout.store for layer in weights.layers for matrix in layer.matrices} == {way.store}
    assert weights.lm_head.layout.store == Store.F32

    plain = WeightLayouts(checkpoint, dtype=FLOAT32, quantization="auto").plain_names()
    first, *rest = loading_remarks(checkpoint, plain, FLOAT32)
    assert re.search(f"weights in .*{way.says}", first)
    rounds = "fp8" in way.settings["quant_method"] or name in ("w8a8", "fp8 by channel")
    assert len(rest) == rounds
    assert all("--activation-quantization" in line for line in rest)


def test_rows_of_a_fused_weight(native_library: NativeLibrary, tmp_path: Path) -> None:
    """Phi-3 has queries, keys and values in one tensor, and both parts of its feed-forward."""
    model = tiny(
        transformers.Phi3Config(
            **SIZES, pad_token_id=0, bos_token_id=None, eos_token_id=None, sliding_window=None
        )
    )
    for name in ("AWQ", "GPTQ", "fp8 by block", "NVFP4"):
        write(tmp_path, WAYS[name], model)
        native = on_native(
            native_library, open_directory(tmp_path), quantization="auto", activation_quantization="none"
        )
        check_answer(native, model, 5e-3)


def test_experts_of_gpt_oss_are_in_mxfp4(native_library: NativeLibrary, tmp_path: Path) -> None:
    """In the tensors of all experts, whose rows are of the gate and up in turn."""
    config = FAMILIES["gpt-oss"]()
    config.vocab_size = SIZES["vocab_size"]
    model = tiny(config)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                rows = weight.detach().transpose(1, 2)
                parts, stands_for = mxfp4(rows.reshape(-1, rows.shape[2]))
                weight.copy_(stands_for.reshape(rows.shape).transpose(1, 2))
                del tensors[name]
                tensors[f"{name}_blocks"] = parts["weight_packed"].reshape(*rows.shape[:2], -1, 16)
                tensors[f"{name}_scales"] = parts["weight_scale"].reshape(*rows.shape[:2], -1)
    save_file(tensors, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    settings = {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    checkpoint = open_directory(tmp_path)
    for parameter, tensor in parameters(model).items():
        np.testing.assert_array_equal(checkpoint.get(parameter, FLOAT32), tensor.detach().numpy())
    weights = pack(native_library, checkpoint, quantization="auto")
    experts = [layer.feed_forward for layer in weights.layers]
    stores = {matrix.layout.store for each in experts for matrix in each.matrices[1:]}
    assert stores == {Store.E2M1}
    native = on_native(native_library, checkpoint, quantization="auto", activation_quantization="none")
    check_answer(native, model.eval(), 1e-5)


@pytest.mark.parametrize("name", ["w8a8", "GPTQ 8 bits", "AWQ", "fp8 by channel"])
def test_a_quantized_vocabulary_is_packed_in_pieces(
    native_library: NativeLibrary, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wanted of a file is a few rows at once, whatever holds them."""
    write(tmp_path, WAYS[name], tiny(transformers.LlamaConfig(**SIZES | {"vocab_size": 224})))
    tensors = load_file(tmp_path / "model.safetensors")
    head = {"lm_head.weight": "lm_head", "model.embed_tokens.weight": "model.embed_tokens"}
    for parameter, stem in head.items():
        parts, _ = WAYS[name].write(tensors.pop(parameter))
        tensors |= {f"{stem}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint, read = open_directory(tmp_path), list[int]()
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    expected = [checkpoint.get(parameter, FLOAT32) for parameter in head]
    for weight in (checkpoint._quantized[parameter] for parameter in head):

        def watch(rows: slice, get: Callable[[slice], Codes] = weight.read) -> Codes:
            read.append(rows.stop - rows.start)
            return get(rows)

        object.__setattr__(weight, "read", watch)
    monkeypatch.setattr(packing, "_PIECE_NUMBERS", 32 * SIZES["hidden_size"])
    weights = pack(native_library, checkpoint, quantization="auto")
    assert set(read) == {32}
    for matrix, rows in zip((weights.lm_head, weights.embedding), expected, strict=True):
        assert relative_error(torch.tensor(rows_of(matrix)), torch.tensor(rows)) < 2e-3


def test_a_weight_may_have_three_dimensions() -> None:
    torch.manual_seed(0)
    parts, stands_for = mxfp4(torch.randn(3 * 8, 64))
    blocks, scales = parts["weight_packed"].reshape(3, 8, 2, 16), parts["weight_scale"].reshape(3, 8, 2)
    stored = {
        "experts.down_proj_blocks": Stored(blocks.numpy(), "U8"),
        "experts.down_proj_scales": Stored(scales.numpy(), "U8"),
        "experts.down_proj_bias": Stored(np.zeros((3, 8)), "F64"),
    }
    weight = gather(stored, Settings(quant_method="mxfp4"))["experts.down_proj.weight"]
    assert (weight.shape, weight.form) == ((3, 8, 64), "MXFP4")
    np.testing.assert_array_equal(weight.numbers(slice(8, 16), FLOAT32), stands_for[8:16])
    assert list(stored) == ["experts.down_proj_bias"]


def test_numbers_that_become_bfloat16_say_by_how_much(tmp_path: Path) -> None:
    write(tmp_path, WAYS["fp8 by channel"], tiny(transformers.LlamaConfig(**SIZES)))
    checkpoint = open_directory(tmp_path)
    lines = list(loading_remarks(checkpoint, checkpoint.names(), BFLOAT16))
    assert re.match(r".* fp8 .*bfloat16 .* 0\.1\d* %", lines[0])


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'.*GGUF"),
        ({"quant_method": "awq", "version": "gemv"}, "gemv"),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}},
            "rotates",
        ),
    ],
)
def test_what_is_not_read_goes_to_vllm(settings: dict[str, Any], needs: str, tmp_path: Path) -> None:
    write(tmp_path, WAYS["AWQ"]._replace(settings=settings), tiny(transformers.LlamaConfig(**SIZES)))
    with pytest.raises(NeedsVllm, match=needs):
        open_directory(tmp_path)


def test_bits_that_are_not_read(tmp_path: Path) -> None:
    way = WAYS["GPTQ"]._replace(settings=GPTQ | {"bits": 3})
    write(tmp_path, way, tiny(transformers.LlamaConfig(**SIZES)))
    with pytest.raises(NeedsVllm, match="3 bits"):
        open_directory(tmp_path)


def test_a_bias_of_zeros_that_the_model_has_not_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, WAYS["GPTQ"], tiny(transformers.LlamaConfig(**SIZES)))
    tensors = load_file(tmp_path / "model.safetensors")
    for value in (0.0, 1.0):
        bias = torch.full((SIZES["hidden_size"],), value)
        save_file(tensors | {"model.layers.0.mlp.down_proj.bias": bias}, tmp_path / "model.safetensors")
        if value:
            with pytest.raises(ModelLoadError, match=r": model\.layers\.0\.mlp\.down_proj\.bias"):
                open_directory(tmp_path)
        else:
            open_directory(tmp_path)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    write(tmp_path, WAYS["GPTQ"], tiny(transformers.LlamaConfig(**SIZES)))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"layers\.0\.mlp\.up_proj .*lacks 'scales'"):
        open_directory(tmp_path)
