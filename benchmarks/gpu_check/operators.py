"""Stage C: the GPU engine's small operators against those in plain torch, in float32, on equal inputs."""

from __future__ import annotations

import sys

import numpy as np
import torch

from benchmarks.gpu_check.operator_bench import (
    BLOCK_SIZE,
    MAX_LEN,
    MAX_TOKENS,
    SHAPES,
    Bench,
    check_all,
    compare,
    wide,
)
from benchmarks.gpu_check.record import DEVICE, IS_REHEARSAL, expect, note
from onbeat.engine.torch.kernels import BestBuffers, DrawParams, LayerSpec, StepTensors
from onbeat.engine.torch.kv import LayerKVCache


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
            q = bench.poisoned(num_tokens, config.num_heads, config.head_dim)
            wide_q = q.float()
            bench.plain.rope_store(qkv.float(), step, _wide_layer(layer), wide_cache, wide_q)
            bench.quick.rope_store(qkv, step, layer, cache, q)
            title = f"rope_store {bench.name}, {num_tokens} tokens{', norms' if norms else ''}"
            compare(f"{title}: queries", q, wide_q)
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
        factors_H=layer.factors_H,
        sinks_N=None,
        query_norm=layer.query_norm and wide(layer.query_norm),
        key_norm=layer.key_norm and wide(layer.key_norm),
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
    for vocab_size in (1000,) if IS_REHEARSAL else (1000, 128256):
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
    note(f"draws that differ, of {total}", differing, at_most=0, shown=True)


if __name__ == "__main__":
    sys.exit(check_all((add_norm, rope_store, act_mul, best, draws), SHAPES[:2]))
