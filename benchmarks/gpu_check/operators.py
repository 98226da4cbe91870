"""Stage C: the GPU engine's quick operators against those in plain torch, in float32, on equal inputs.

The argument says which: `small` (norms, rotation, activation, best tokens, draws) or `attention`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gpu_check.ceilings import milliseconds
from gpu_check.models import CONFIGS
from gpu_check.record import DEVICE, IS_REHEARSAL, expect, note, seconds_left
from onbeat.engine.cuda.kernels import (
    BestBuffers,
    ChunkRows,
    DecodeRows,
    DrawParams,
    Kernels,
    KernelSizes,
    LayerSpec,
    Norm,
    StepTensors,
)
from onbeat.engine.cuda.reference import ReferenceKernels
from onbeat.engine.kv_cache import LayerKVCache
from onbeat.engine.layers.rotary import inverse_frequencies
from onbeat.engine.model_config import ModelConfig, model_config_from_hf
from tests.gpu.engines import fast_kernels, relative_error

LARGEST_ERROR = 1e-2
BLOCK_SIZE = 16
MAX_TOKENS = 64 if IS_REHEARSAL else 8192
MAX_LEN = 100 if IS_REHEARSAL else 8192
BF16 = torch.bfloat16


def config_of(num_heads: int, num_kv_heads: int, head_dim: int, window: int | None) -> ModelConfig:
    """Return a model with such heads."""
    own = {
        **CONFIGS["8b"],
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_size": num_heads * head_dim,
    }
    if window is not None:
        own |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
        own.pop("rope_scaling")
    return model_config_from_hf(own)


class Bench:
    """Both sets of operators for one shape, and inputs."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None) -> None:
        self.config = config_of(num_heads, num_kv_heads, head_dim, window)
        self.name = f"{head_dim}/{num_heads // num_kv_heads}{'' if window is None else ' window'}"
        self.device = torch.device(DEVICE)
        self.quick = self._kernels(BF16)
        self.plain = ReferenceKernels(self._sizes(torch.float32))
        self.generator = torch.Generator(DEVICE).manual_seed(1)
        self.layer = self.layer_spec()

    def layer_spec(self, *, norms: bool = False) -> LayerSpec:
        config = self.config
        query_norm, key_norm = (self.norm(config.head_dim) if norms else None for _ in range(2))
        return LayerSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            window=config.layer_window(0),
            frequencies_H=inverse_frequencies(config.layer_rope(0), config.head_dim).to(self.device),
            query_norm=query_norm,
            key_norm=key_norm,
        )

    def norm(self, width: int, *, scales_rounded: bool = True) -> Norm:
        scale = 1 + 0.1 * self.random(width, dtype=torch.float32)
        return Norm(scale.to(BF16) if scales_rounded else scale, 1e-5, scales_rounded)

    def random(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def poisoned(self, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=BF16, device=self.device)

    def cache(self, num_blocks: int) -> LayerKVCache:
        config = self.config
        shape = (num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        return LayerKVCache(self.random(*shape), self.random(*shape))

    def _sizes(self, dtype: torch.dtype) -> KernelSizes:
        return KernelSizes(
            config=self.config,
            dtype=dtype,
            device=self.device,
            block_size=BLOCK_SIZE,
            max_rows=256,
            max_tokens=MAX_TOKENS,
            max_row_blocks=-(-MAX_LEN // BLOCK_SIZE),
        )

    def _kernels(self, dtype: torch.dtype) -> Kernels:
        return ReferenceKernels(self._sizes(dtype)) if IS_REHEARSAL else fast_kernels(self._sizes(dtype))


def wide(norm: Norm | None) -> Norm | None:
    """Return a norm for float32, with the same scale."""
    return None if norm is None else Norm(norm.scale_D.float(), norm.eps, norm.scales_rounded)


def compare(name: str, actual: Tensor, expected: Tensor) -> None:
    """Note the error."""
    note(name, relative_error(actual, expected), at_most=LARGEST_ERROR)


def add_norm(bench: Bench) -> None:
    """Check norms of several widths and kinds."""
    for width in (576, 4096):
        for num_tokens in (1, 7, 128, MAX_TOKENS):
            for rounded in (True, False):
                norm = bench.norm(width, scales_rounded=rounded)
                x, residual, out = (bench.random(num_tokens, width) for _ in range(3))
                wide_residual, wide_out = residual.float(), out.float()
                bench.plain.add_norm(x.float(), wide_residual, wide(norm), wide_out)
                out.fill_(torch.nan)
                bench.quick.add_norm(x, residual, norm, out)
                compare(f"add_norm {num_tokens} x {width} {rounded}: out", out, wide_out)
                compare(f"add_norm {num_tokens} x {width} {rounded}: sum", residual, wide_residual)
        x = bench.random(5, width)
        expected = x.float()
        bench.plain.add_norm(None, x.float(), wide(norm), expected)
        bench.quick.add_norm(None, x, norm, x)
        compare(f"add_norm of {width} in place", x, expected)


def rope_store(bench: Bench) -> None:
    """Check the rotation, with and without norms of heads."""
    config = bench.config
    num_heads = config.num_heads + 2 * config.num_kv_heads
    for num_tokens in (1, 33, MAX_TOKENS):
        for norms in (False, True):
            layer = bench.layer_spec(norms=norms)
            cache = bench.cache(MAX_TOKENS // BLOCK_SIZE + 3)
            wide_cache = LayerKVCache(*(part.float() for part in cache))
            qkv = bench.random(num_tokens, num_heads * config.head_dim)
            slots = torch.randperm(
                len(cache.k_BKSH) * BLOCK_SIZE, generator=bench.generator, device=bench.device
            )
            positions = torch.randint(
                0, MAX_LEN, (num_tokens,), generator=bench.generator, device=bench.device
            )
            step = StepTensors(positions.int(), slots[:num_tokens].int())
            wide_qkv, q_width = qkv.float(), config.num_heads * config.head_dim
            bench.plain.rope_store(wide_qkv, step, _wide_layer(layer), wide_cache)
            bench.quick.rope_store(qkv, step, layer, cache)
            title = f"rope_store {bench.name}, {num_tokens} tokens{', norms' if norms else ''}"
            compare(f"{title}: queries", qkv[:, :q_width], wide_qkv[:, :q_width])
            compare(f"{title}: keys", cache.k_BKSH, wide_cache.k_BKSH)
            compare(f"{title}: values", cache.v_BKSH, wide_cache.v_BKSH)


def _wide_layer(layer: LayerSpec) -> LayerSpec:
    return LayerSpec(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        scale=layer.scale,
        window=layer.window,
        frequencies_H=layer.frequencies_H,
        query_norm=wide(layer.query_norm),
        key_norm=wide(layer.key_norm),
    )


def act_mul(bench: Bench) -> None:
    """Check both activations."""
    for activation in ("silu", "gelu_pytorch_tanh"):
        for num_tokens, width in ((1, 14336), (7, 1536), (MAX_TOKENS, 14336)):
            gate_up, out = bench.random(num_tokens, 2 * width), bench.poisoned(num_tokens, width)
            expected = torch.empty(num_tokens, width, device=bench.device)
            bench.plain.act_mul(gate_up.float(), activation, expected)
            bench.quick.act_mul(gate_up, activation, out)
            compare(f"act_mul {activation} {num_tokens} x {width}", out, expected)


def best(bench: Bench) -> None:
    """Check the most likely tokens, with ties and NaN."""
    for num_rows, vocab_size in ((1, 128256), (32, 128256), (5, 1000)):
        logits = bench.random(num_rows, vocab_size, dtype=torch.float32)
        logits[0, 7] = logits[0, 900] = 50.0
        if num_rows > 3:
            logits[3, 100] = torch.nan
        found, known = (_best_buffers(bench, num_rows) for _ in range(2))
        bench.quick.best(logits, found)
        bench.plain.best(logits, known)
        expect(f"best of {num_rows} x {vocab_size}: ids", torch.equal(found.ids_R, known.ids_R))
        same = torch.equal(found.peaks_R.nan_to_num(-1e30), known.peaks_R.nan_to_num(-1e30))
        expect(f"best of {num_rows} x {vocab_size}: peaks", same)


def _best_buffers(bench: Bench, num_rows: int) -> BestBuffers:
    ids = torch.full((num_rows,), -7, dtype=torch.int32, device=bench.device)
    return BestBuffers(ids, torch.zeros(num_rows, device=bench.device))


def draws(bench: Bench) -> None:
    """Check draws against plain ones, under all rules mixed."""
    if not hasattr(bench.plain, "draw"):
        note("draw", "the plain operators have none")
        return
    num_rows, rng = 64, np.random.default_rng(0)
    total = differing = 0
    for vocab_size in (1000, 128256):
        for scale in (1.0, 4.0):
            logits = scale * bench.random(num_rows, vocab_size, dtype=torch.float32)
            values = {
                "temperatures_R": rng.choice([0.0, 0.3, 1.0, 1.5], num_rows),
                "top_ks_R": rng.choice([0, 1, 20, 500], num_rows).astype(np.int32),
                "top_ps_R": rng.choice([1.0, 0.95, 0.5], num_rows),
                "min_ps_R": rng.choice([0.0, 0.02, 0.3], num_rows),
                "numbers_R": rng.random(num_rows),
            }
            params = DrawParams(**{key: torch.from_numpy(value).to(DEVICE) for key, value in values.items()})
            found = _best_buffers(bench, num_rows)
            bench.plain.best(logits, found)
            quick, plain = (torch.full_like(found.ids_R, -7) for _ in range(2))
            bench.quick.draw(logits, params, found, quick)
            bench.plain.draw(logits, params, found, plain)
            total += num_rows
            differing += int((quick != plain).sum())
    note(f"draws that differ, of {total}", differing, at_most=0)


def attend_decodes(bench: Bench) -> None:
    """Check decodes of many lengths, and time them."""
    config, rng = bench.config, np.random.default_rng(0)
    num_columns = -(-MAX_LEN // BLOCK_SIZE)
    for num_rows in (1, 5, 32, 128):
        lens = rng.integers(1, MAX_LEN + 1, num_rows)
        lens[0] = MAX_LEN
        lens[-1] = 1 if num_rows > 1 else MAX_LEN
        rows, cache = _decode_rows(bench, lens, num_columns)
        q, out = _queries(bench, num_rows)
        bench.quick.attend_decodes(q, cache, rows, bench.layer, out)
        expected = torch.empty(out.shape, device=bench.device)
        wide_cache = LayerKVCache(*(each.float() for each in cache))
        for start in range(0, num_rows, 16):  # plain ones gather keys in float32
            part = slice(start, start + 16)
            few = DecodeRows(rows.table_RW[part], rows.lens_R[part])
            bench.plain.attend_decodes(q[part].float(), wide_cache, few, bench.layer, expected[part])
        compare(f"decodes {bench.name}, {num_rows} rows, lengths 1 to {MAX_LEN}", out, expected)
    if IS_REHEARSAL:
        return
    for num_rows, length in ((1, 512), (8, 512), (32, 512), (128, 512), (1, 4096), (32, 2048), (128, 2048)):
        rows, cache = _decode_rows(bench, np.full(num_rows, length), num_columns)
        q, out = _queries(bench, num_rows)
        took = milliseconds(
            lambda q=q, rows=rows, out=out, cache=cache: bench.quick.attend_decodes(
                q, cache, rows, bench.layer, out
            )
        )
        moved = 4 * num_rows * length * config.num_kv_heads * config.head_dim
        note(f"decodes {bench.name}, {num_rows} x {length}", took * 1e3, "us")
        note(f"decodes {bench.name}, {num_rows} x {length}", moved / took / 1e9, "TB/s")


def _decode_rows(bench: Bench, lens: np.ndarray, num_columns: int) -> tuple[DecodeRows, LayerKVCache]:
    """Return rows whose blocks lie anywhere in a cache of just enough."""
    blocks_of = -(-lens // BLOCK_SIZE)
    order = np.random.default_rng(1).permutation(int(blocks_of.sum()))
    table = np.zeros((len(lens), num_columns), np.int32)
    start = 0
    for row, num_blocks in enumerate(blocks_of.tolist()):
        table[row, :num_blocks] = order[start : start + num_blocks]
        start += num_blocks
    rows = DecodeRows(torch.from_numpy(table).to(DEVICE), torch.from_numpy(lens.astype(np.int32)).to(DEVICE))
    return rows, bench.cache(start + 1)


def _queries(bench: Bench, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return queries as a view of the projection's output, and a poisoned output."""
    config = bench.config
    num_heads = config.num_heads + 2 * config.num_kv_heads
    q = bench.random(num_tokens, num_heads, config.head_dim)[:, : config.num_heads]
    return q, bench.poisoned(num_tokens, config.num_heads, config.head_dim)


CHUNKS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((1, 1),),
    ((7, 70), (1, 33), (64, 64), (200, 200), (16, 3000)),
    ((2048, 2048),),
    ((512, 8192), (512, 512)),
)
"""New tokens and context of each row, of several steps."""


def attend_chunks(bench: Bench) -> None:
    """Check chunks of several lengths, with cached tokens before them, and time prompts."""
    steps = [(min(new, 30), min(context, MAX_LEN)) for new, context in CHUNKS[1]] if IS_REHEARSAL else None
    for rows in (tuple(steps),) if steps else CHUNKS:
        plan_rows, cache, num_tokens = _chunk_rows(bench, rows)
        q, out = _queries(bench, num_tokens)
        quick = bench.quick.plan_chunks(plan_rows, bench.layer)
        bench.quick.attend_chunks(q, cache, quick, bench.layer, out)
        expected = torch.empty(out.shape, device=bench.device)
        plain = bench.plain.plan_chunks(plan_rows, bench.layer)
        wide_cache = LayerKVCache(*(each.float() for each in cache))
        bench.plain.attend_chunks(q.float(), wide_cache, plain, bench.layer, expected)
        compare(f"chunks {bench.name}, {rows}", out, expected)
    if IS_REHEARSAL:
        return
    for length in (512, 2048, 8192):
        plan_rows, cache, _ = _chunk_rows(bench, ((length, length),))
        q, out = _queries(bench, length)
        plan = bench.quick.plan_chunks(plan_rows, bench.layer)
        took = milliseconds(
            lambda q=q, out=out, plan=plan, cache=cache: bench.quick.attend_chunks(
                q, cache, plan, bench.layer, out
            )
        )
        flops = 2 * length**2 * bench.config.num_heads * bench.config.head_dim
        note(f"chunk {bench.name}, {length}", flops / took / 1e9, "TFLOP/s")


def _chunk_rows(bench: Bench, rows: tuple[tuple[int, int], ...]) -> tuple[ChunkRows, LayerKVCache, int]:
    lens, contexts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    num_blocks = -(-contexts // BLOCK_SIZE)
    ids = np.random.default_rng(2).permutation(int(num_blocks.sum())).astype(np.int32)
    return ChunkRows(lens, contexts, num_blocks, ids), bench.cache(len(ids) + 1), int(lens.sum())


SMALL = (add_norm, rope_store, act_mul, best, draws)
ATTENTION = (attend_decodes, attend_chunks)
SHAPES = ((32, 8, 128, None), (9, 3, 64, None), (4, 2, 64, None), (4, 2, 64, 100), (4, 2, 256, 100))
"""Query heads, KV heads, head width, window."""


@torch.inference_mode()
def main() -> int:
    which = sys.argv[1]
    problems = 0
    for shape in SHAPES[:2] if which == "small" else SHAPES:
        try:
            bench = Bench(*shape)
        except Exception as error:
            traceback.print_exc()
            expect(f"operators for {shape}", passed=False, text=f"{type(error).__name__}: {error}")
            problems += 1
            continue
        note(f"operators for {bench.name}", bench.quick.name)
        for check in SMALL if which == "small" else ATTENTION:
            if seconds_left() < 4:
                note("not checked, for want of time", f"{check.__name__} {bench.name}")
            elif not _passes(check, bench):
                problems += 1
        if not IS_REHEARSAL:
            torch.cuda.empty_cache()
    return 1 if problems else 0


def _passes(check: Callable[[Bench], None], bench: Bench) -> bool:
    """Run a check; a device that has failed ends the process, for nothing can run on it any more."""
    try:
        check(bench)
        if not IS_REHEARSAL:
            torch.cuda.synchronize()
    except Exception as error:
        traceback.print_exc()
        first = str(error).partition("\n")[0]
        expect(f"{check.__name__} {bench.name}", passed=False, text=f"{type(error).__name__}: {first}")
        if not IS_REHEARSAL:
            torch.cuda.synchronize()
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
