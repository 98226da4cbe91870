"""Stage E: logits of Llama-3.1-8B's shapes, of the GPU engine and of the reference engine, on equal weights.

Both compute in bfloat16 and so round differently. Each is compared with the reference engine in float32: the
GPU engine may be no worse than the reference engine is, but for a little.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Iterator

import torch

from benchmarks.gpu_check.models import model_config
from benchmarks.gpu_check.record import DEVICE, IS_REHEARSAL, expect, note, seconds_left
from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.torch.weights import load_weights
from onbeat.engine.weights.dummy import DummyCheckpoint
from tests.cpu.engine.forwards import MakeForward, on_torch
from tests.gpu.engines import on_gpu_engine, relative_error, run_fixed

MARGIN = 1.5
"""How many times the reference engine's own error is allowed."""
MAX_LEN = 4096
Logits = dict[str, list[torch.Tensor]]


class RoundedCheckpoint(DummyCheckpoint):
    """The weights of bfloat16, in whatever type."""

    def get_on(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make a parameter; see `DummyCheckpoint.get_on`."""
        return super().get_on(name, torch.bfloat16, device).to(dtype)


def cases(config: ModelConfig) -> dict[str, tuple[list[list[int]], int, int]]:
    """Return prompts, tokens behind each, and the chunk length, by name."""
    generator = torch.Generator().manual_seed(5)

    def prompt(length: int) -> list[int]:
        return torch.randint(0, config.vocab_size, (length,), generator=generator).tolist()

    scale = 20 if IS_REHEARSAL else 1
    return {
        "3 prompts": ([prompt(length // scale) for length in (33, 512, 700)], 16, 1024),
        "in chunks": ([prompt(length // scale) for length in (300, 512)], 4, 100),
        "64 rows, one of them long": (
            [prompt(1 + 37 * i % 90) for i in range(63)] + [prompt(2000 // scale)],
            3,
            1024,
        ),
    }


def run_all(make: MakeForward, config: ModelConfig) -> Logits:
    """Return the logits of each case's prompts."""
    found: Logits = {}
    for name, (prompts, num_tokens, chunk) in cases(config).items():
        logits, _ = run_fixed(
            make, prompts, num_tokens=num_tokens, chunk=chunk, max_model_len=MAX_LEN, max_num_seqs=64
        )
        found[name] = [each.cpu() for each in logits]
    return found


def torch_logits(config: ModelConfig, dtype: torch.dtype) -> Logits:
    """Return those of the reference engine."""
    start = time.monotonic()
    model = load_weights(RoundedCheckpoint(config), dtype=dtype, device=torch.device(DEVICE))
    found = run_all(on_torch(model), config)
    note(f"reference in {dtype}", time.monotonic() - start, "s")
    return found


def gpu_logits(config: ModelConfig) -> Iterator[tuple[str, Logits]]:
    """Yield those of the GPU engine, by how it runs steps with prompts."""
    weights = load_weights(RoundedCheckpoint(config), torch.bfloat16, torch.device(DEVICE))
    for name, pieces in (("GPU engine", False), ("GPU engine, in pieces", True)):
        if pieces and not IS_REHEARSAL and seconds_left() < 20:
            expect(f"{name}: compared", passed=False, text="no time left")
            return
        start = time.monotonic()
        make = on_gpu_engine(
            weights,
            fast=not IS_REHEARSAL,
            pieces=pieces,
            max_num_seqs=64,
            max_model_len=MAX_LEN,
            max_num_batched_tokens=64 * 1024,
        )
        try:
            yield name, run_all(make, config)
        except Exception as error:
            traceback.print_exc()
            expect(f"{name}: runs", passed=False, text=f"{type(error).__name__}: {error}"[:300])
        note(name, time.monotonic() - start, "s")
        gc.collect()  # a forward pass and its graphs refer to each other
        empty()


def empty() -> None:
    """Give back what is not used any more."""
    if not IS_REHEARSAL:
        torch.cuda.empty_cache()


def main() -> int:
    config = model_config("8b")
    exact = torch_logits(config, torch.float32)
    empty()
    reference = torch_logits(config, torch.bfloat16)
    empty()
    for engine, quick in gpu_logits(config):
        for name, expected in exact.items():
            own = max(relative_error(a, b) for a, b in zip(reference[name], expected, strict=True))
            found = max(relative_error(a, b) for a, b in zip(quick[name], expected, strict=True))
            between = max(relative_error(a, b) for a, b in zip(quick[name], reference[name], strict=True))
            note(f"{name}: reference engine's error", own)
            note(f"{name}: {engine}: error", found, at_most=MARGIN * own, shown=True)
            note(f"{name}: {engine}: difference from the reference engine", between)
            _same_best(f"{name}: {engine}", quick[name], expected)
    return 0


def _same_best(name: str, actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Expect the same best token wherever its lead is more than the largest error of any logit."""
    wrong = clear = 0
    for a, b in zip(actual, expected, strict=True):
        top = b.topk(2, dim=-1)
        error = (a - b).abs().amax(dim=-1)
        is_clear = top.values[:, 0] - top.values[:, 1] > 2 * error
        clear += int(is_clear.sum())
        wrong += int((is_clear & (a.argmax(-1) != top.indices[:, 0])).sum())
    total = sum(len(each) for each in expected)
    equal = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in zip(actual, expected, strict=True))
    text = f"{equal} of {total} equal; {clear} lead clearly, {wrong} of them differ"
    expect(f"{name}: best tokens", wrong == 0, text, shown=True)


if __name__ == "__main__":
    sys.exit(main())
