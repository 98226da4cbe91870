"""What FlashInfer compiles its kernels with: the machine's CUDA toolkit and ninja, or packages of them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import sysconfig
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from onbeat.files import cache_dir

_DEFAULT_CUDA_HOME = "/usr/local/cuda"
_DRIVER = "libcuda.so.1"


def missing_tool() -> str | None:
    """Let FlashInfer find what it compiles with; return what lacks and what to do, or None.

    FlashInfer looks at `CUDA_HOME` and `PATH`, which are set where it would find nothing. It keeps
    what it finds when it is imported: call this before.
    """
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        return "FLASHINFER_DISABLE_JIT is set: unset it"
    if not _finds_nvcc():
        folders = _packaged_toolkits()
        if not folders:
            return (
                "nvcc is not found: pip install 'onbeat[gpu-build]', or install NVIDIA's CUDA toolkit "
                "and set CUDA_HOME to its folder"
            )
        os.environ["CUDA_HOME"] = str(linked_toolkit(folders))
    if shutil.which("ninja") is None:
        scripts = sysconfig.get_path("scripts")
        if shutil.which("ninja", path=scripts) is None:
            return "ninja is not found: pip install ninja"
        os.environ["PATH"] = os.pathsep.join((*filter(None, [os.environ.get("PATH")]), scripts))
    compiler = os.environ.get("CXX", "c++")
    return None if shutil.which(compiler) else f"the C++ compiler {compiler} is not found: install g++"


def _finds_nvcc() -> bool:
    """Return whether a compiler is where FlashInfer looks for one."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and shutil.which("nvcc"):
        return True
    return shutil.which("nvcc", path=f"{home or _DEFAULT_CUDA_HOME}/bin") is not None


def _packaged_toolkits() -> list[Path]:
    """Return where packages of one version of CUDA lie: the extra `gpu-build` brings nvcc among them."""
    spec = find_spec("nvidia")
    folders = [] if spec is None else [Path(each) for each in spec.submodule_search_locations or ()]
    versions = {path.parts[-3] for folder in folders for path in folder.glob("cu[0-9]*/bin/nvcc")}
    parts = [folder / max(versions) for folder in folders] if versions else []
    return [part for part in parts if part.is_dir()]


def linked_toolkit(folders: Sequence[Path]) -> Path:
    """Return a folder of links to all parts of a toolkit, laid out as FlashInfer's build expects them.

    Parameters
    ----------
    folders : with `bin`, `include`, `lib` and `nvvm`, as packages have them; of equal names the first counts.
    """
    name = hashlib.sha256(os.pathsep.join(map(str, folders)).encode()).hexdigest()[:12]
    home = cache_dir() / "cuda" / name
    parts = {"bin": "bin", "include": "include", "nvvm": "nvvm", "lib": "lib64"}
    for folder in reversed(folders):
        for part, place in parts.items():
            for path in (folder / part).glob("*"):
                _link(home / place / path.name, path)
                if ".so." in path.name:  # the linker looks for names without a version
                    _link(home / place / f"{path.name.partition('.so')[0]}.so", path)
    if (driver := _driver_library()) is not None:
        _link(home / "lib64" / "stubs" / "libcuda.so", driver)
    return home


def _link(link: Path, target: Path) -> None:
    """Make or renew a link, while other processes may use it or do the same."""
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)


def _driver_library() -> Path | None:
    """Return the file of the driver's library; None where there is no driver."""
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    files = [line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()]
    return next((Path(file) for file in files if "/libcuda.so" in file), None)
