"""A program that runs made-up steps on made-up models: `python -m tests.cpu.native.fuzz_steps SECONDS SEED`.

It is meant for a library built with a sanitizer, which ends it at the first stray access; so it imports no
torch, whose own memory handling a sanitizer stumbles over. Every array that the library reads is as long as
it must be and no longer.
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any

import numpy as np

from onbeat.engine.native.library import (
    ACTIVATION_QUANTIZATIONS,
    ERROR_BYTES,
    MOST_QKV,
    LayerStructure,
    ModelStructure,
    NativeLibrary,
    NotLoaded,
    PackedMatrix,
    Source,
    StepStructure,
    Store,
    address,
    load_library,
)
from tests.cpu.native.fuzz_sizes import LinearSizes, Sizes, draw_linear, draw_sizes


class Engine:
    """A random model in the library."""

    def __init__(self, library: NativeLibrary, sizes: Sizes, rng: np.random.Generator) -> None:
        self._library = library
        self._rng = rng
        self._layout = sizes.layout
        self._kept: list[Any] = []
        self._functions = library.functions
        head_norms, norms_have_bias = int(rng.integers(3)), int(rng.integers(2))
        self._norm_size = sizes.hidden * (1 + norms_have_bias)
        self._is_ungated, is_parallel = (
            sizes.num_experts == 0 and int(rng.integers(4)) == 0 for _ in range(2)
        )
        others = [count for count in range(1, 4) if sizes.num_heads % count == 0]
        counts = [int(rng.choice(others)), sizes.num_kv_heads]
        shares_kv = sizes.widths[0] == sizes.widths[1] and counts[0] == counts[1] and int(rng.integers(2))
        shares_kv = shares_kv and sizes.linear is None
        layers = [
            self._layer(sizes, index, counts[index], head_norms, shares_kv=bool(index and shares_kv))
            for index in range(sizes.num_layers)
        ]
        numbers = [
            count * (width + -(-width // 16) * 16) for count, width in zip(counts, sizes.widths, strict=True)
        ]
        layers[1].place = 0 if shares_kv else numbers[0]
        self._layers = (LayerStructure * len(layers))(*layers)
        turning = [2 * int(rng.integers(1, width // 2 + 1)) for width in sizes.widths]
        self._ropes = (ctypes.c_void_p * 2)(*(self._vector(each // 2) for each in turning))
        self._rotary_dims = np.array(turning)
        own_inputs = sizes.num_layers * sizes.own_input
        embedding = self._matrix(sizes.vocab, sizes.hidden)
        self._model = ModelStructure(
            num_layers=sizes.num_layers,
            kv_numbers=numbers[0] if shares_kv else sum(numbers),
            num_tables=1,
            hidden_size=sizes.hidden,
            num_heads=sizes.num_heads,
            vocab_size=sizes.vocab,
            activation=int(rng.integers(2)),
            precision=Store.BF16 if sizes.is_bfloat16 else Store.F32,
            block_size=sizes.block_size,
            num_blocks=sizes.num_blocks,
            num_threads=int(rng.integers(1, 5)),
            activation_quantization=int(rng.choice(list(ACTIVATION_QUANTIZATIONS.values()))),
            batch_invariant=int(rng.integers(2)),
            rotary_dims=address(self._rotary_dims, np.int64),
            head_norms=head_norms,
            norms_center=int(rng.integers(2)),
            norms_have_bias=norms_have_bias,
            is_ungated=self._is_ungated,
            is_parallel=is_parallel,
            growth_context=int(rng.choice([0, 0, 7])),
            num_experts=sizes.num_experts,
            experts_per_token=int(rng.integers(1, sizes.num_experts + 1)) if sizes.num_experts else 0,
            expert_size=sizes.expert_size,
            normalizes_experts=int(rng.integers(2)),
            rms_norm_eps=1e-5,
            attention_scale=0.1,
            embedding_scale=1.0,
            query_growth=0.3,
            attention_softcap=float(rng.choice([0, 0, 3])),
            logits_softcap=float(rng.choice([0, 0, 3])),
            mixer_jitter=float(rng.choice([0, 0, 0.1])),
            residual_scale=0.5,
            embedding=embedding,
            lm_head=embedding if rng.integers(2) else self._matrix(sizes.vocab, sizes.hidden),
            final_norm=self._vector(self._norm_size),
            head_norm=self._vector(self._norm_size),
            layers=ctypes.addressof(self._layers),
            rope_frequencies=ctypes.addressof(self._ropes),
            rope_scales=self._vector(2),
            layer_input_size=sizes.own_input,
            layer_table=self._matrix(sizes.vocab, own_inputs) if own_inputs else None,
            layer_projection=self._matrix(own_inputs, sizes.hidden) if own_inputs else None,
            layer_input_norm=self._vector(sizes.own_input) if own_inputs else None,
            head_bias=self._vector(-(-sizes.vocab // 32) * 32) if rng.integers(2) else None,
        )
        if sizes.linear is not None:
            self._keep_states(sizes, sizes.linear)
            self._model.kv_numbers = numbers[1]
        error = ctypes.create_string_buffer(ERROR_BYTES)
        sets = library.instruction_sets
        name = sets[rng.integers(len(sets))]
        self._engine = self._functions.ob_engine_create(self._model, name.encode(), error, len(error))
        assert self._engine, error.value

    def _keep_states(self, sizes: Sizes, linear: LinearSizes) -> None:
        """Let the first layer keep a state."""
        first, model = self._layers[0], self._model
        outputs = linear.inputs + linear.values + 2 * linear.value_heads
        first.qkv = self._handles([outputs], sizes.hidden)
        first.qkv_bias = None
        first.o = self._matrix(sizes.hidden, linear.values)
        first.conv = self._vector(linear.conv_width * linear.inputs)
        first.decay = self._vector(linear.value_heads, sign=-1)
        first.dt_bias = self._vector(linear.value_heads)
        first.delta_norm = self._vector(linear.value_dim)
        self._layers[1].place = 0
        model.num_state_layers = 1
        for name in (
            "num_slots",
            "most_drafts",
            "key_heads",
            "value_heads",
            "key_dim",
            "value_dim",
            "conv_width",
        ):
            setattr(model, name, getattr(linear, name))
        model.alternates_values = int(self._rng.integers(2))

    def step(self, **fields: Any) -> int:
        step = StepStructure(
            **{
                name: address(value, value.dtype) if isinstance(value, np.ndarray) else value
                for name, value in fields.items()
            }
        )
        return int(self._functions.ob_engine_step(self._engine, ctypes.byref(step)))

    def scrub(self, block_ids: np.ndarray) -> int:
        return int(
            self._functions.ob_engine_scrub(self._engine, address(block_ids, np.int64), len(block_ids))
        )

    def close(self) -> None:
        self._functions.ob_engine_free(self._engine)
        for kept in self._kept:
            if isinstance(kept, PackedMatrix):
                kept.free()

    def _layer(
        self, sizes: Sizes, index: int, num_kv_heads: int, head_norms: int, *, shares_kv: bool
    ) -> LayerStructure:
        rng, width = self._rng, sizes.widths[index]
        query, kv = sizes.num_heads * width, num_kv_heads * width
        num_outputs = query if shares_kv else query + 2 * kv
        has_experts = bool(index % 2) and sizes.num_experts > 0
        extras: dict[str, Any] = self._own_input(sizes) if sizes.own_input else {}
        is_beside = has_experts and bool(rng.integers(2))
        if not has_experts or is_beside:
            extras |= self._feed_forward(sizes)
        if has_experts:
            extras |= self._experts(sizes)
        if is_beside:
            names = "router_norm", "expert_norm", "after_dense_norm", "after_experts_norm", "after_mlp_norm"
            extras |= {name: self._vector(self._norm_size) for name in names}
            extras["expert_factors"] = self._vector(sizes.num_experts)
        elif rng.integers(2):
            extras["after_mlp_norm"] = self._vector(self._norm_size)
        return LayerStructure(
            qkv=self._handles([query], sizes.hidden) if shares_kv else self._qkv(query, kv, sizes.hidden),
            o=self._matrix(sizes.hidden, query),
            **extras,
            qkv_bias=self._vector(num_outputs) if rng.integers(2) else None,
            o_bias=self._vector(sizes.hidden) if rng.integers(2) else None,
            attention_norm=self._vector(self._norm_size) if rng.integers(3) else None,
            mlp_norm=self._vector(self._norm_size) if rng.integers(3) else None,
            after_attention_norm=self._vector(self._norm_size) if rng.integers(2) else None,
            query_norm=self._vector(query if head_norms else width) if rng.integers(2) else None,
            key_norm=self._vector(kv if head_norms else width) if rng.integers(2) else None,
            value_norm=self._vector(width) if rng.integers(2) else None,
            scale=float(rng.choice([0, 0.7])),
            window=sizes.window * (index % 2),
            rope=index,
            num_kv_heads=num_kv_heads,
            head_dim=width,
            shares_kv=shares_kv,
        )

    def _own_input(self, sizes: Sizes) -> dict[str, Any]:
        return {
            "input_gate": self._matrix(sizes.own_input, sizes.hidden),
            "input_projection": self._matrix(sizes.hidden, sizes.own_input),
            "after_input_norm": self._vector(self._norm_size) if self._rng.integers(2) else None,
        }

    def _feed_forward(self, sizes: Sizes) -> dict[str, Any]:
        num_inner = (1 if self._is_ungated else 2) * sizes.intermediate
        return {
            "gate_up": self._matrix(num_inner, sizes.hidden),
            "gate_up_bias": self._vector(-(-num_inner // 32) * 32) if self._rng.integers(2) else None,
            "down_bias": self._vector(sizes.hidden) if self._rng.integers(2) else None,
            "down": self._matrix(sizes.hidden, sizes.intermediate),
        }

    def _experts(self, sizes: Sizes) -> dict[str, Any]:
        gate_up, down = (
            (ctypes.c_void_p * sizes.num_experts)(
                *(self._matrix(num_outputs, num_inputs) for _ in range(sizes.num_experts))
            )
            for num_outputs, num_inputs in (
                (2 * sizes.expert_size, sizes.hidden),
                (sizes.hidden, sizes.expert_size),
            )
        )
        self._kept += [gate_up, down]
        return {
            "router": self._matrix(sizes.num_experts, sizes.hidden),
            "expert_gate_up": ctypes.addressof(gate_up),
            "expert_down": ctypes.addressof(down),
        }

    def _qkv(self, query: int, kv: int, num_inputs: int) -> Any:
        """Return one to three matrices."""
        counts = [[query + 2 * kv], [query + kv, kv], [query, 2 * kv], [query, kv, kv]][self._rng.integers(4)]
        return self._handles(counts, num_inputs)

    def _handles(self, counts: list[int], num_inputs: int) -> Any:
        return (ctypes.c_void_p * MOST_QKV)(*(self._matrix(count, num_inputs) for count in counts))

    def _matrix(self, num_outputs: int, num_inputs: int) -> int | None:
        matrix = PackedMatrix(self._library, self._layout, num_outputs=num_outputs, num_inputs=num_inputs)
        rows = (self._rng.standard_normal((num_outputs, num_inputs)) / num_inputs**0.5).astype(np.float32)
        source = Source.F32
        if self._layout.store == Store.BF16:
            rows, source = (rows.view(np.uint32) >> 16).astype(np.uint16), Source.BF16
        assert matrix.pack(rows, source, self._rng.permutation(num_outputs), num_threads=2)
        self._kept.append(matrix)
        return matrix.handle

    def _vector(self, size: int, sign: int = 1) -> int | None:
        vector = sign * self._rng.uniform(0.1, 1.0, size).astype(np.float32)
        self._kept.append(vector)
        return address(vector, np.float32)


def draw_step(sizes: Sizes, rng: np.random.Generator) -> dict[str, Any]:
    """Return the fields of a valid step: rows of any length over scattered, partly shared blocks."""
    num_rows = int(rng.integers(1, 9))
    width = int(rng.integers(1, 1 + min(sizes.num_blocks // num_rows, 9)))
    contexts = rng.integers(1, width * sizes.block_size + 1, num_rows)
    queries = np.minimum(np.where(rng.random(num_rows) < 0.5, 1, rng.integers(1, 150, num_rows)), contexts)
    blocks = rng.permutation(sizes.num_blocks)[: num_rows * width].reshape(num_rows, width)
    tables = blocks.astype(np.int32)[rng.permutation(num_rows)]
    slots = rng.permutation(num_rows)
    rows = np.repeat(np.arange(num_rows), queries)
    ends = np.cumsum(queries)
    positions = np.arange(len(rows)) + np.repeat(contexts - ends, queries)
    in_block = positions % sizes.block_size
    slot_mapping = tables[slots[rows], positions // sizes.block_size].astype(np.int64) * sizes.block_size
    num_samples = int(rng.integers(0, num_rows + 1))
    samples = np.sort(rng.permutation(ends - 1)[:num_samples])
    wants_logits = bool(rng.integers(2))
    states = {} if sizes.linear is None else draw_states(sizes.linear, queries, contexts, rng)
    return states | {
        "num_tokens": len(rows),
        "token_ids": rng.integers(0, sizes.vocab, len(rows)),
        "positions": positions,
        "slot_mapping": slot_mapping + in_block,
        "num_rows": num_rows,
        "query_lens": queries,
        "context_lens": contexts,
        "slots": slots,
        "block_tables": tables,
        "num_block_tables": num_rows,
        "block_table_stride": width,
        "num_samples": num_samples,
        "sample_tokens": samples,
        "logits": np.full((num_samples, sizes.vocab), np.nan, np.float32) if wants_logits else None,
        "best_ids": np.full(num_samples, -1, np.int64),
        "best_logits": np.full(num_samples, np.nan, np.float32),
    }


def draw_states(
    linear: LinearSizes, queries: np.ndarray, contexts: np.ndarray, rng: np.random.Generator
) -> dict[str, Any]:
    """Return what states have yet to take in, what they shall not take in, and which are kept."""
    pending = rng.integers(0, np.minimum(linear.most_drafts, contexts - queries) + 1)
    untaken = rng.integers(0, np.minimum(linear.most_drafts, pending + queries) + 1)
    rows = np.flatnonzero((untaken < queries) & (rng.random(len(queries)) < 0.5))
    return {
        "pending": pending,
        "untaken": untaken,
        "num_kept": len(rows),
        "kept_rows": rows,
        "kept_tokens": rng.integers(1, (queries - untaken)[rows] + 1),
        "kept_slots": len(queries) + rng.permutation(linear.num_slots - len(queries))[: len(rows)],
    }


def check(fields: dict[str, Any], sizes: Sizes) -> None:
    """Check what a step has written."""
    assert np.isfinite(fields["best_logits"]).all()
    assert ((fields["best_ids"] >= 0) & (fields["best_ids"] < sizes.vocab)).all()
    logits = fields["logits"]
    if logits is not None and len(logits):
        np.testing.assert_array_equal(logits.argmax(axis=-1), fields["best_ids"])
        np.testing.assert_array_equal(logits.max(axis=-1), fields["best_logits"])


def spoil(fields: dict[str, Any], sizes: Sizes, rng: np.random.Generator) -> dict[str, Any]:
    """Return a copy with one value out of its range."""
    last = 2**63 - 1
    changes: list[tuple[str, int]] = [
        ("token_ids", sizes.vocab),
        ("token_ids", -1),
        ("slot_mapping", sizes.num_blocks * sizes.block_size),
        ("slot_mapping", -1),
        ("query_lens", 0),
        ("query_lens", 10_000),
        ("query_lens", last),
        ("context_lens", 0),
        ("context_lens", last),
        ("context_lens", 2**32 + 1),
        ("positions", -1),
        ("positions", last),
        ("slots", -1),
        ("slots", fields["num_block_tables"]),
        ("slots", last),
        ("block_tables", sizes.num_blocks),
        ("block_tables", -1),
        ("num_tokens", last),
        ("num_rows", -1),
        ("num_rows", last),
        ("num_samples", -1),
        ("num_samples", last),
        ("num_block_tables", 0),
        ("num_block_tables", last),
        ("block_table_stride", 0),
        ("block_table_stride", last),
        ("block_table_stride", -last),
    ]
    if sizes.linear is not None:
        most = sizes.linear.most_drafts
        changes += [("pending", -1), ("pending", most + 1), ("untaken", -1), ("untaken", most + 1)]
        changes += [("kept_tokens", 0), ("kept_tokens", 10_000)] if fields["num_kept"] else []
    name, value = changes[rng.integers(len(changes))]
    if isinstance(fields[name], int):
        return fields | {name: value}
    array = fields[name].copy()
    array.reshape(-1)[0 if name != "block_tables" else fields["slots"][0] * array.shape[1]] = value
    return fields | {name: array}


def fuzz(library: NativeLibrary, seconds: float, seed: int) -> int:
    """Run models of 20 steps until the time is up; return the number of steps."""
    rng = np.random.default_rng(seed)
    end = time.monotonic() + seconds
    num_steps = 0
    while time.monotonic() < end or not num_steps:
        sizes = draw_sizes(rng)
        sizes.linear = draw_linear(sizes, rng)
        engine = Engine(library, sizes, rng)
        for _ in range(20):
            fields = draw_step(sizes, rng)
            assert engine.step(**fields) == 0, (sizes, fields)
            check(fields, sizes)
            assert engine.step(**spoil(fields, sizes, rng)) == -1, "a malformed step was run"
            assert engine.scrub(rng.permutation(sizes.num_blocks)[:3]) == 0
            for outside in (-1, sizes.num_blocks, 2**62):
                assert engine.scrub(np.array([0, outside])) == -1, "a block that is not there was scrubbed"
            num_steps += 1
        engine.close()
    return num_steps


def main() -> int:
    library = load_library()
    if isinstance(library, NotLoaded):
        sys.stderr.write(f"{library.reason}\n")
        return 1
    sys.stdout.write(f"{fuzz(library, float(sys.argv[1]), int(sys.argv[2]))} steps\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
