"""Stage C: the GPU engine's attention against that in plain torch, in float32, on equal inputs."""

from __future__ import annotations

import sys
import time
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_check.ceilings import graph_milliseconds, milliseconds
from benchmarks.gpu_check.operator_bench import BF16, BLOCK_SIZE, MAX_LEN, SHAPES, Bench, check_all, compare
from benchmarks.gpu_check.record import DEVICE, IS_REHEARSAL, note
from onbeat.engine.backends.torch import fast_kernels
from onbeat.engine.torch.kernels import ChunkRows, DecodeRows
from onbeat.engine.torch.kv import LayerKVCache

TIMED_DECODES = ((1, 512), (8, 512), (32, 512), (128, 512), (1, 4096), (32, 4096), (128, 2048))
"""Rows and context."""


def attend_decodes(bench: Bench) -> None:
    """Check decodes of many lengths, and time them."""
    rng = np.random.default_rng(0)
    num_columns = -(-MAX_LEN // BLOCK_SIZE)
    for num_rows in (1, 5, 32, 128):
        lens = rng.integers(1, MAX_LEN + 1, num_rows)
        lens[0] = MAX_LEN
        lens[-1] = 1 if num_rows > 1 else MAX_LEN
        rows, cache = _decode_rows(bench, lens, num_columns)
        q, out = _queries(bench, num_rows)
        expected = torch.empty(out.shape, device=bench.device)
        wide_cache = LayerKVCache(*(each.float() for each in cache))
        for start in range(0, num_rows, 16):  # plain ones gather keys in float32
            part = slice(start, start + 16)
            few = DecodeRows(rows.table_RW[part], rows.lens_R[part])
            bench.plain.attend_decodes(q[part].float(), wide_cache, few, bench.layer, expected[part])
        _attend(bench, q, cache, lens, rows, out)
        compare(f"decodes {bench.name}, {num_rows} rows, lengths 1 to {MAX_LEN}", out, expected)
    if not IS_REHEARSAL:
        _time_decodes(bench)


def _attend(
    bench: Bench, q: Tensor, cache: LayerKVCache, lens: np.ndarray, rows: DecodeRows, out: Tensor
) -> None:
    """Plan decodes on the host, list their blocks on the device, and attend."""
    bench.quick.plan_decodes(lens.astype(np.int32), [bench.layer])
    bench.quick.start_decodes(rows)
    bench.quick.attend_decodes(q, cache, rows, bench.layer, out)


def _time_decodes(bench: Bench) -> None:
    """Time decodes inside of graphs, and their plans; small caches stay in the processor's."""
    for num_rows, length in TIMED_DECODES:
        name = f"decodes {bench.name}, {num_rows} x {length}"
        lens = np.full(num_rows, length)
        rows, cache = _decode_rows(bench, lens, -(-MAX_LEN // BLOCK_SIZE))
        q, out = _queries(bench, num_rows)
        _attend(bench, q, cache, lens, rows, out)
        torch.cuda.synchronize()
        start = time.perf_counter()
        bench.quick.plan_decodes(lens.astype(np.int32), [bench.layer])
        note(f"{name}: plan", (time.perf_counter() - start) * 1e6, "us")
        took = graph_milliseconds(partial(bench.quick.attend_decodes, q, cache, rows, bench.layer, out))
        note(name, took * 1e3, "us", shown=bench.config.head_dim == 128 and length in (512, 2048))
        moved = 4 * num_rows * length * bench.config.num_kv_heads * bench.config.head_dim
        note(f"{name}: KV read", moved / took / 1e9, "TB/s")


def by_fa3(bench: Bench) -> None:
    """Check and time the other kernel for chunks, for the first shape."""
    if bench.config.head_dim != 128 or IS_REHEARSAL:
        return
    bench.quick = fast_kernels(bench.sizes(BF16), "fa3")
    bench.name = f"{bench.name} fa3"
    attend_chunks(bench)


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
    """Return queries and a poisoned output."""
    shape = (num_tokens, bench.config.num_heads, bench.config.head_dim)
    return bench.random(*shape), bench.poisoned(*shape)


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
        took = milliseconds(partial(bench.quick.attend_chunks, q, cache, plan, bench.layer, out))
        flops = 2 * length**2 * bench.config.num_heads * bench.config.head_dim
        note(f"chunk {bench.name}, {length}", flops / took / 1e9, "TFLOP/s")


def _chunk_rows(bench: Bench, rows: tuple[tuple[int, int], ...]) -> tuple[ChunkRows, LayerKVCache, int]:
    lens, contexts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    num_blocks = -(-contexts // BLOCK_SIZE)
    ids = np.random.default_rng(2).permutation(int(num_blocks.sum())).astype(np.int32)
    return ChunkRows(lens, contexts, num_blocks, ids), bench.cache(len(ids) + 1), int(lens.sum())


if __name__ == "__main__":
    sys.exit(check_all((attend_decodes, attend_chunks, by_fa3), SHAPES))
