"""Builds the native CPU engine: a hook of `pip install`, or by hand with `python hatch_build.py`.

A wheel has all instruction sets. An editable install and a build by hand have those that this machine runs.
Where there is no compiler, onbeat installs all the same, and computes with torch if that is installed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ModuleNotFoundError:  # started by hand, outside of a build
    BuildHookInterface = object

ROOT = Path(__file__).resolve().parent
LIBRARY = "src/onbeat/engine/native/libonbeat_native.so"
CACHE = "build/native"
"""Objects by content, so that only what changed is compiled again."""

COMMON_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"),
    *("-pthread", "-Wall", "-Wextra"),
)
LINK_FLAGS = ("-shared", "-pthread")
# Not with a sanitizer, whose own symbols come from the program that loads the library.
STRICT_LINK_FLAGS = ("-Wl,-z,defs",)
# At -O1 temporaries stay, all of which are watched: GCC 12 takes over four times as long as at -O2.
_WATCHED = ("-O2", "-g1", "-fno-omit-frame-pointer")
SANITIZERS = {
    "address": (*_WATCHED, "-fsanitize=address", "-fno-sanitize-address-use-after-scope"),
    "thread": (*_WATCHED, "-fsanitize=thread"),
    "undefined": (*_WATCHED, "-fsanitize=undefined", "-fno-sanitize-recover=undefined"),
}

# Weakest first, and before them what all have in common. Of an inline function of the standard library that
# several units hold, the linker keeps that of its first object: it must be one that every processor runs.
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX512BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
AMX_FLAGS = ("-mamx-tile", "-mamx-bf16")
AMX_PROBE = 'void probe() { asm volatile("tdpbf16ps %tmm0, %tmm1, %tmm2"); }'
"""What a compiler and an assembler that know AMX compile: GCC from 11 on, binutils from 2.35 on."""
X86_INSTRUCTION_SETS = {
    "portable": (),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512vnni": (*_AVX512, "-mavx512vnni"),  # the library calls it avx512, too
    "avx512bf16": _AVX512BF16,
    "amx": (*_AVX512BF16, *AMX_FLAGS),
}
OTHER_INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {"portable": ()}
PER_INSTRUCTION_SET = "kernels.cpp"
CHOOSES_INSTRUCTION_SET = "instruction_sets.cpp"


class BuildFailed(Exception):
    """The library could not be built; the message says why, and what would help."""


class Unit(NamedTuple):
    """One call of the compiler."""

    source: Path
    name: str
    flags: tuple[str, ...]


class Compiler(NamedTuple):
    """What compiles, and its version line."""

    command: tuple[str, ...]
    version: str


def find_compiler() -> Compiler:
    """Return $CXX, or g++.

    Raises
    ------
    BuildFailed : it is not there or does not run.
    """
    command = tuple(shlex.split(os.environ.get("CXX", ""))) or ("g++",)
    if shutil.which(command[0]) is None:
        raise BuildFailed(f"there is no C++ compiler {command[0]!r}; install g++, or name one in $CXX")
    version = _run([*command, "--version"]).partition("\n")[0]
    return Compiler(command, version)


def build_library(
    root: Path,
    output: Path,
    *,
    sanitizer: str | None = None,
    only: Collection[str] = (),
    warn: Callable[[str], None] | None = None,
) -> bool:
    """Compile what is new, and link; return whether there was anything to do.

    Parameters
    ----------
    root : the source tree.
    output : the library's file.
    sanitizer : a key of `SANITIZERS`; the program that loads the library must then preload its runtime.
    only : instruction sets beside the portable one; none: all that there are.
    warn : is told which instruction set the compiler cannot build; None writes it to stderr.

    Raises
    ------
    BuildFailed : without a compiler, or where it reports an error.
    """
    compiler = find_compiler()
    extra = SANITIZERS[sanitizer] if sanitizer else ()
    variant = f"{sanitizer}-" if sanitizer else ""
    fault = amx_fault(compiler) if not only or "amx" in only else ""
    if fault:
        (warn or _write_line)(
            f"The native CPU engine of onbeat is built without the instruction set amx: {fault}"
        )
    units = translation_units(root / "native", has_amx=not fault, only=only)
    cache = root / CACHE
    headers = _digest_of_headers(root / "native")
    objects = {}
    for unit in units:
        unit = unit._replace(flags=(*COMMON_FLAGS, *extra, *unit.flags))
        # Not where the headers lie, which are in it themselves: a copy of the tree has the same objects.
        flags = [flag for flag in unit.flags if not flag.startswith("-I")]
        digest = _digest(compiler.version, *flags, headers, unit.source.read_text(encoding="utf-8"))
        objects[cache / f"{variant}{unit.name}-{digest}.o"] = unit
    own = shlex.split(
        os.environ.get("LDFLAGS", "")
    )  # such as -static-libstdc++, for wheels that others install
    link = (*compiler.command, *LINK_FLAGS, *(extra or STRICT_LINK_FLAGS), *own)
    digest = _digest(*link, *(path.name for path in objects))
    stamp = cache / f"{variant}{output.name}.stamp"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two builds at once one finds what the other has made
        if output.is_file() and stamp.is_file() and stamp.read_text() == digest:
            return False
        missing = [path for path in objects if not path.is_file()]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda path: _compile(compiler, objects[path], path), missing))
        _make([*link, *map(str, objects)], output)
        stamp.write_text(digest)
        _remove_old_objects(cache, variant, units, keep=objects.keys())
        return True


def amx_fault(compiler: Compiler) -> str:
    """Return why the compiler builds nothing for AMX; empty where it does, or where no processor has it."""
    if not _is_x86():
        return ""
    command = [*compiler.command, *AMX_FLAGS, "-x", "c++", "-c", "-o", "/dev/null", "-"]
    run = subprocess.run(command, input=AMX_PROBE, capture_output=True, text=True, check=False)
    if run.returncode == 0:
        return ""
    said = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[0]
    return f"{compiler.version} does not know it ({said}); g++ 11 or newer with binutils 2.35 or newer does"


def sets_of_this_machine() -> list[str]:
    """Return the instruction sets that the processor here runs, by what the compiler finds of it.

    One for AVX-512 BF16 counts as one for AMX, too: whether the system lets a process use tiles is asked, and
    told, by the library.

    Raises
    ------
    BuildFailed : without a compiler, or where it does not know this processor.
    """
    if not _is_x86():
        return list(OTHER_INSTRUCTION_SETS)
    command = [*find_compiler().command, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    macros = set(re.findall(r"#define __(\w+)__ ", _run(command)))
    return [
        name
        for name, flags in X86_INSTRUCTION_SETS.items()
        if macros.issuperset(
            flag.removeprefix("-m").replace("-", "_").upper() for flag in flags if flag not in AMX_FLAGS
        )
    ]


def _write_line(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def translation_units(native: Path, *, has_amx: bool = True, only: Collection[str] = ()) -> list[Unit]:
    """Return every call of the compiler, in the order of the link.

    Parameters
    ----------
    native : the directory of the sources.
    has_amx : whether the compiler knows AMX.
    only : as of `build_library`.

    Raises
    ------
    BuildFailed : there are no sources.
    """
    sources = sorted((native / "src").glob("*.cpp"))
    if not sources:
        raise BuildFailed(f"there are no C++ sources in {native / 'src'}")
    sets = dict(X86_INSTRUCTION_SETS if _is_x86() else OTHER_INSTRUCTION_SETS)
    if not has_amx:
        sets.pop("amx", None)
    if only:
        sets = {name: flags for name, flags in sets.items() if name in ("portable", *only)}
    shared = (f"-I{native / 'include'}", f"-I{native / 'src'}")
    # Only one unit knows which there are, so that a build of more sets compiles the others no second time.
    built = (*(("-DOB_HAVE_X86=1",) if _is_x86() else ()), *(f"-DOB_HAVE_{name.upper()}=1" for name in sets))
    units = [
        Unit(path, path.stem, (*shared, *built) if path.name == CHOOSES_INSTRUCTION_SET else shared)
        for path in sources
        if path.name != PER_INSTRUCTION_SET
    ]
    kernels = native / "src" / PER_INSTRUCTION_SET
    for name, flags in sets.items():
        units.append(Unit(kernels, f"{kernels.stem}_{name}", (*shared, *flags, *_names(name))))
    return units


def _names(instruction_set: str) -> tuple[str, str]:
    """Return what the code is to call a set: its namespace, and the name that users see."""
    return f"-DOB_NAMESPACE={instruction_set}", f"-DOB_INSTRUCTION_SET={instruction_set.removesuffix('vnni')}"


def _compile(compiler: Compiler, unit: Unit, path: Path) -> None:
    _make([*compiler.command, *unit.flags, "-c", str(unit.source)], path)


def _make(command: Sequence[str], path: Path) -> None:
    """Run a command that writes a file; nobody sees half of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        _run([*command, "-o", str(partial)])
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _run(command: Sequence[str]) -> str:
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        said = "\n".join(run.stderr.strip().splitlines()[:20])
        raise BuildFailed(f"{shlex.join(command)} failed with exit code {run.returncode}:\n{said}")
    return run.stdout


def _digest_of_headers(native: Path) -> str:
    """Return a digest of everything that sources may include: few and small, so any change counts."""
    headers = sorted(path for path in native.rglob("*") if path.is_file() and path.suffix != ".cpp")
    return _digest(*(text for path in headers for text in (path.name, path.read_text(encoding="utf-8"))))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _remove_old_objects(cache: Path, variant: str, units: Sequence[Unit], keep: Collection[Path]) -> None:
    for unit in units:
        for path in cache.glob(f"{variant}{unit.name}-{'?' * 16}.o"):
            if path not in keep:
                path.unlink(missing_ok=True)


def add_to_wheel(
    root: Path, build_data: dict[str, Any], warn: Callable[[str], None], *, stays_here: bool = False
) -> None:
    """Build in place and put the library into the wheel: one of this platform then, for any Python 3.

    Parameters
    ----------
    build_data : what hatchling wants to know of a wheel; stays that of a pure one where nothing can be built.
    warn : is told why.
    stays_here : it is of an editable install: only instruction sets of this machine are built, in a third of
        the time.
    """
    output = root / LIBRARY
    try:
        build_library(root, output, only=sets_of_this_machine() if stays_here else (), warn=warn)
    except (BuildFailed, OSError) as error:
        output.unlink(missing_ok=True)  # one of older sources would do harm
        warn(
            f"The native CPU engine of onbeat is not built: {error}\n"
            "To have it, install g++ (version 10 or newer) and install onbeat again. Without it, onbeat "
            "computes with torch, several times slower: pip install 'onbeat[torch]'."
        )
        return
    platform_name = re.sub(r"[-.]", "_", sysconfig.get_platform())
    build_data["pure_python"] = False
    build_data["tag"] = f"py3-none-{platform_name}"
    build_data["artifacts"].append(LIBRARY)


class NativeEngineHook(BuildHookInterface):  # type: ignore[misc, unused-ignore]
    """Called by hatchling for each thing that it builds."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build for wheels, those of editable installs too."""
        if self.target_name == "wheel":
            is_editable = version == "editable"
            add_to_wheel(Path(self.root), build_data, self.app.display_warning, stays_here=is_editable)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build from the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Build the native CPU engine in place.")
    parser.add_argument("--sanitize", choices=sorted(SANITIZERS), help="a build for tests, elsewhere")
    parser.add_argument(
        "--sets", nargs="+", metavar="SET", help="instruction sets to build (default: those of this machine)"
    )
    parser.add_argument("--output", type=Path, help="where the library goes")
    args = parser.parse_args(arguments)
    default = f"{CACHE}/libonbeat_native-{args.sanitize}.so" if args.sanitize else LIBRARY
    output = args.output or ROOT / default
    try:
        only = args.sets or sets_of_this_machine()
        is_new = build_library(ROOT, output.absolute(), sanitizer=args.sanitize, only=only)
    except BuildFailed as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{'built' if is_new else 'up to date:'} {output}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
