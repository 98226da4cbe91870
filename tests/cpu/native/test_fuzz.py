"""Random models and steps: with the library as it is, and with one that watches every access to memory."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from onbeat.engine.native.library import VARIABLE, CallStatus, NativeLibrary
from tests.cpu.native.amx_kernels import compile_units, emulated_units
from tests.cpu.native.fuzz_sizes import draw_sizes
from tests.cpu.native.fuzz_steps import Engine, draw_step, fuzz
from tests.cpu.native.quant_kernels import instruction_sets
from tests.cpu.native.test_forward import relative_error

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("seed", range(3))
def test_random_steps(native_library: NativeLibrary, seed: int) -> None:
    assert fuzz(native_library, seconds=1.0, seed=seed) >= 20


@pytest.mark.parametrize("seed", range(24))
def test_rows_that_nobody_asks_for_change_no_other(native_library: NativeLibrary, seed: int) -> None:
    """The last layer leaves them out where most are such; any may be asked for, in any order, twice too."""
    rng = np.random.default_rng(seed)
    sizes = draw_sizes(rng)
    engine = Engine(native_library, sizes, np.random.default_rng(seed))
    fields = draw_step(sizes, rng)
    num_tokens = fields["num_tokens"]

    def run(samples: NDArray[np.int64], hidden: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(samples)
        logits = np.full((count, sizes.vocab), np.nan, np.float32)
        states = np.full((len(hidden), sizes.hidden), np.nan, np.float32)
        own = {
            "num_samples": count,
            "sample_tokens": samples,
            "logits": logits,
            "num_hidden": len(hidden),
            "hidden_tokens": hidden,
            "hidden": states,
            "best_ids": np.empty(count, np.int64),
            "best_logits": np.empty(count, np.float32),
        }
        assert engine.step(**{**fields, **own}) == CallStatus.OK
        return torch.from_numpy(logits), torch.from_numpy(states)

    every = np.arange(num_tokens)
    logits, states = run(every, every)
    error = 0.03 if sizes.is_bfloat16 or sizes.layout.group else 1e-4
    for count in (0, 1, num_tokens // 6, num_tokens // 2):
        asked, given = rng.integers(0, num_tokens, count), rng.integers(0, num_tokens, count // 2)
        some_logits, some_states = run(asked, given)
        for actual, expected in ((some_logits, logits[asked]), (some_states, states[given])):
            assert len(actual) == 0 or relative_error(actual, expected) < error
    engine.close()


RUNTIMES = {
    "address": ("libasan.so", {"ASAN_OPTIONS": "detect_leaks=0"}),  # the interpreter's own
    # The interpreter and NumPy are not watched, and what they do to memory tells nothing.
    "thread": ("libtsan.so", {"TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1"}),
    "undefined": ("libubsan.so", {"UBSAN_OPTIONS": "print_stacktrace=1"}),
}
"""Sanitizer -> what a program that loads its library preloads, and its settings."""


def build_product(directory: Path, sanitizer: str) -> Path:
    """Build it with one instruction set of each width of registers that this processor has."""
    best, *others = instruction_sets()
    sets = [best, *(name for name in others if name == "avx2")]
    library = directory / f"libonbeat_native-{sanitizer}.so"
    build = [sys.executable, str(ROOT / "hatch_build.py"), "--sanitize", sanitizer, "--output", str(library)]
    build += ["--sets", "portable", *sets]
    subprocess.run(build, check=True, capture_output=True)
    return library


def build_tiles(directory: Path, sanitizer: str) -> Path:
    """Build the kernels for AMX with emulated tiles, whose loads and stores are then watched, too."""
    return compile_units(emulated_units(), directory, sanitizer=sanitizer)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("sanitizer", RUNTIMES)
@pytest.mark.parametrize(
    "build",
    [
        build_product,
        pytest.param(
            build_tiles,
            marks=pytest.mark.skipif(platform.machine() != "x86_64", reason="the processor is no x86"),
        ),
    ],
)
def test_random_steps_do_nothing_that_a_sanitizer_reports(
    tmp_path: Path, build: Callable[[Path, str], Path], sanitizer: str
) -> None:
    """Stray accesses, what the language leaves undefined, and memory that threads use without waiting."""
    name, settings = RUNTIMES[sanitizer]
    find = ["g++", f"-print-file-name={name}"]
    runtime = subprocess.run(find, check=True, capture_output=True, text=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip(f"the compiler has no {name}")
    library = build(tmp_path, sanitizer)
    run = subprocess.run(
        [sys.executable, "-m", "tests.cpu.native.fuzz_steps", "20", "0"],
        cwd=ROOT,
        env={
            **os.environ,
            **settings,
            VARIABLE: str(library),
            "LD_PRELOAD": runtime,
            "PYTHONMALLOC": "malloc",  # an array's end is then where its memory ends
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "steps" in run.stdout
