"""Stage A: what the machine and its packages are; ends the run where nothing can come of the other stages."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys

import torch

from benchmarks.gpu_check.record import IS_REHEARSAL, expect, note

PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "numpy", "scipy", "safetensors", "flashinfer-python"),
    *(
        "apache-tvm-ffi",
        "fastapi",
        "starlette",
        "pydantic",
        "uvicorn",
        "msgspec",
        "pyzmq",
        "aiohttp",
        "pytest",
    ),
    *("typing-extensions", "hypothesis", "uvloop", "anyio"),
)
MODULES = (
    "onbeat.cli.main",
    "onbeat.cli.serve",
    "onbeat.server.app",
    "onbeat.engine.start",
    "onbeat.bench.runner",
)
OPERATORS = ("aten.mm.dtype", "aten.rms_norm", "aten._scaled_dot_product_efficient_attention")


def main() -> int:
    note("python", platform.python_version(), shown=True)
    note("cores", os.cpu_count() or 0)
    for name in PACKAGES:
        try:
            note(
                name, importlib.metadata.version(name), shown=name in ("torch", "triton", "flashinfer-python")
            )
        except importlib.metadata.PackageNotFoundError:
            note(name, "not there")
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        properties = torch.cuda.get_device_properties(0)
        note("card", properties.name, shown=True)
        note("compute capability", f"{properties.major}.{properties.minor}")
        note("multiprocessors", properties.multi_processor_count)
        note("memory", properties.total_memory / 2**30, "GiB")
        note("CUDA of torch", str(torch.version.cuda))
        query = "driver_version,clocks.sm,clocks.mem,utilization.gpu,memory.used,power.draw"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        seen = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
        note("nvidia-smi", (seen.stdout or seen.stderr).strip().replace("\n", " "))
    expect("torch finds a CUDA device", has_cuda or IS_REHEARSAL)
    are_there = [_import(name) for name in (*MODULES, *(("flashinfer",) if has_cuda else ()))]
    for name in OPERATORS:
        found = torch.ops
        try:
            for part in name.split("."):
                found = getattr(found, part)
            note(name, "there")
        except AttributeError:
            note(name, "not there")
    return 0 if all(are_there) and (has_cuda or IS_REHEARSAL) else 1


def _import(name: str) -> bool:
    """Import a module, and return whether that works."""
    try:
        importlib.import_module(name)
    except Exception as error:
        expect(f"import {name}", passed=False, text=f"{type(error).__name__}: {error}")
        return False
    expect(f"import {name}", passed=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
