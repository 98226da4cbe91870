"""Steps of the native engine beside llama.cpp's on one GGUF file, in interleaved rounds and without servers.

    python -m benchmarks.serve.native_steps FILE.gguf DIRECTORY/llama-batched-bench

Tokens are random, so rows choose different experts. Prompts are of 512 tokens; decodes follow one of 128.
`reads` is the time of a decode over that in which torch reads the bytes that it needs: of experts, those
that rows choose where all are as likely. Needs a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from operator import truediv
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.harness.pages import machine, markdown_table, middle
from benchmarks.serve.peers.machine import measure_limits
from onbeat.engine.dtypes import BFLOAT16
from onbeat.engine.input_batch import AttentionBatch, StepInputs
from onbeat.engine.native.forward import NativeForward, NativeModel
from onbeat.engine.native.layouts import WeightLayouts
from onbeat.engine.native.library import NativeLibrary, load_library
from onbeat.engine.native.packing import ExpertWeights, NativeWeights, WeightPacker
from onbeat.engine.native.structures import NativeOptions
from onbeat.engine.weights.open import GgufCheckpoint

PROMPT, CONTEXT, STEPS, BLOCK, BLOCKS, THREADS, ROWS = 512, 128, 24, 16, 64, 2, (0, 1, 8, 32)
"""Rows are those of decodes; 0 is a prompt."""


class Ours:
    """The engine with a file's weights."""

    def __init__(self, path: Path, most_rows: int) -> None:
        self._rng, library = np.random.default_rng(0), cast(NativeLibrary, load_library())
        checkpoint = GgufCheckpoint(path)
        layouts = WeightLayouts(checkpoint, dtype=BFLOAT16, quantization="auto")
        self.weights = WeightPacker(library, checkpoint, layouts, num_threads=THREADS).pack()
        sizes: dict[str, Any] = {
            "num_blocks": most_rows * BLOCKS,
            "num_slots": most_rows,
            "num_threads": THREADS,
        }
        options = NativeOptions(dtype=BFLOAT16, block_size=BLOCK, **sizes)
        model = NativeModel(library, checkpoint.config, self.weights, options)
        self._forward = NativeForward(model)
        self._tables = np.arange(most_rows * BLOCKS, dtype=np.int32).reshape(-1, BLOCKS)

    def step(self, rows: int, cached: int, new: int) -> float:
        """Return the seconds of a step of rows that each have some tokens and get others."""
        positions, lens = np.tile(np.arange(cached, cached + new), rows), np.full(rows, new)
        slots = np.arange(rows).repeat(new)
        places = self._tables[slots, positions // BLOCK] * BLOCK + positions % BLOCK
        batch = AttentionBatch(lens, lens + cached, np.arange(rows), self._tables, places.astype(np.int64))
        tokens = self._rng.integers(0, self._forward.config.vocab_size, rows * new)
        inputs = StepInputs(tokens, positions, batch, sampling_tokens=lens.cumsum() - 1)
        return float(self._forward.run(inputs, wants_logits=False).seconds or 0.0)

    def speed(self, rows: int) -> float:
        """Return tokens/s of decodes; of a prompt where there are no rows."""
        self.step(rows or 1, 0, CONTEXT if rows else PROMPT)
        if not rows:
            return PROMPT / self.step(1, 0, PROMPT)
        return rows * STEPS / sum(self.step(rows, CONTEXT + index, 1) for index in range(STEPS))


def active_bytes(weights: NativeWeights, rows: int) -> float:
    """Return what a decode of some rows reads of the weights."""
    total = float(weights.num_bytes) - (
        weights.embedding.num_bytes if weights.embedding != weights.lm_head else 0
    )
    for part in (layer.feed_forward for layer in weights.layers):
        if isinstance(part, ExpertWeights):
            unread = (1 - part.num_per_token / len(part.experts)) ** rows
            total -= unread * sum(matrix.num_bytes for matrix in part.matrices)
    return total


def peer_speed(peer: Path, file: Path, rows: int) -> float:
    shape = ["-npp", CONTEXT, "-ntg", STEPS, "-pps", "-kvu"] if rows else ["-npp", PROMPT, "-ntg", 1]
    command = [peer, "-m", file, "-t", THREADS, "-c", 32768, "--output-format", "jsonl", "-npl", rows or 1]
    done = subprocess.run([*map(str, command + shape)], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout[done.stdout.index("{") :])["speed_tg" if rows else "speed_pp"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("peer", type=Path, help="llama-batched-bench")
    parser.add_argument("--rounds", type=int, default=3, help="in turns")
    args, rate = parser.parse_args(), measure_limits()["read_gb_per_s"]
    engine, table = Ours(args.file, max(ROWS)), []
    runs = [(n, engine.speed(n), peer_speed(args.peer, args.file, n)) for n in ROWS * args.rounds]
    for rows in ROWS:
        ours, theirs = zip(*(run[1:] for run in runs if run[0] == rows), strict=True)
        cells = middle(ours, 1), middle(theirs, 1), middle([*map(truediv, ours, theirs)])
        floor = active_bytes(engine.weights, rows) / 1e9 / rate
        table.append((rows or "prompt", *cells, middle([rows / speed / floor for speed in ours])))
    print(f"{machine()}, reads {rate:.1f} GB/s\n")
    print(markdown_table(("rows", "onbeat, tokens/s", "llama.cpp, tokens/s", "ratio", "reads"), table))


if __name__ == "__main__":
    main()
