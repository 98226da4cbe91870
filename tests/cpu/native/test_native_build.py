"""How the native engine's library is built: what is compiled anew, and what happens without a compiler."""

from __future__ import annotations

import ctypes
import platform
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cpu.native import quant_kernels

KERNELS = """
#include "kernels.h"
namespace OB_NAMESPACE { int answer() { return ANSWER; } }
"""
API = """
namespace portable { int answer(); }
extern "C" __attribute__((visibility("default"))) int answer() { return portable::answer(); }
"""


@pytest.fixture(scope="module")
def hatch_build() -> ModuleType:
    return quant_kernels.hatch_build()


@pytest.fixture
def tree(tmp_path: Path, hatch_build: ModuleType) -> Path:
    """A source tree with a tiny native library."""
    (tmp_path / "native/src").mkdir(parents=True)
    (tmp_path / "native/include").mkdir()
    (tmp_path / "native/include/kernels.h").write_text("#define ANSWER 42\n")
    (tmp_path / "native/src/kernels.cpp").write_text(KERNELS)
    (tmp_path / "native/src/api.cpp").write_text(API)
    (tmp_path / hatch_build.LIBRARY).parent.mkdir(parents=True)
    return tmp_path


def objects(tree: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (tree / "build/native").glob("*.o")}


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@needs_compiler
def test_only_what_changed_is_compiled_again(hatch_build: ModuleType, tree: Path) -> None:
    output = tree / hatch_build.LIBRARY
    assert hatch_build.build_library(tree, output)
    assert ctypes.CDLL(str(output)).answer() == 42
    first = objects(tree)
    assert not hatch_build.build_library(tree, output)
    assert objects(tree) == first

    (tree / "native/src/api.cpp").write_text(API.replace("::answer();", "::answer() + 1;"))
    assert hatch_build.build_library(tree, output)
    second = objects(tree)
    assert len(second) == len(first), "objects of older sources stay behind"
    assert {name for name in second if name not in first} == {
        name for name in second if name.startswith("api-")
    }
    output.unlink()
    assert hatch_build.build_library(tree, output)
    assert objects(tree) == second


@needs_compiler
def test_a_copy_of_the_tree_only_links(hatch_build: ModuleType, tree: Path) -> None:
    hatch_build.build_library(tree, tree / hatch_build.LIBRARY)
    copy = shutil.copytree(tree, tree / "copy")
    (copy / hatch_build.LIBRARY).unlink()
    assert hatch_build.build_library(copy, copy / hatch_build.LIBRARY)
    assert objects(copy) == objects(tree)


@needs_compiler
def test_an_editable_install_has_the_sets_of_this_machine_and_a_wheel_adds_the_others(
    hatch_build: ModuleType, tree: Path
) -> None:
    hatch_build.add_to_wheel(tree, {"artifacts": []}, print, stays_here=True)
    own = objects(tree)
    built = {name[:-19].removeprefix("kernels_") for name in own if name.startswith("kernels_")}
    assert built == set(hatch_build.sets_of_this_machine())
    assert built - {"amx"} == set(quant_kernels.instruction_sets())
    hatch_build.add_to_wheel(tree, {"artifacts": []}, print)
    assert own.items() <= objects(tree).items(), "nothing is compiled twice"
    has_amx = not hatch_build.amx_fault(hatch_build.find_compiler())
    assert len(objects(tree)) == len(hatch_build.translation_units(tree / "native", has_amx=has_amx))


@needs_compiler
def test_a_header_changes_everything(hatch_build: ModuleType, tree: Path) -> None:
    output = tree / hatch_build.LIBRARY
    hatch_build.build_library(tree, output)
    first = objects(tree)
    (tree / "native/include/kernels.h").write_text("#define ANSWER 43\n")
    assert hatch_build.build_library(tree, output)
    assert not objects(tree).keys() & first.keys()


@needs_compiler
def test_an_error_of_the_compiler_is_shown_and_the_old_library_stays(
    hatch_build: ModuleType, tree: Path
) -> None:
    output = tree / hatch_build.LIBRARY
    hatch_build.build_library(tree, output)
    (tree / "native/src/api.cpp").write_text("int answer() { return nothing; }")
    with pytest.raises(hatch_build.BuildFailed, match="nothing"):
        hatch_build.build_library(tree, output)
    assert output.is_file()
    assert [path.name for path in output.parent.iterdir()] == [output.name], "no half of a library"


@needs_compiler
def test_a_wheel_with_the_library_is_one_of_this_platform(hatch_build: ModuleType, tree: Path) -> None:
    build_data: dict[str, Any] = {"pure_python": True, "artifacts": []}
    warnings: list[str] = []
    hatch_build.add_to_wheel(tree, build_data, warnings.append)
    assert warnings == []
    assert build_data["pure_python"] is False
    assert build_data["tag"].startswith("py3-none-linux_")
    assert build_data["artifacts"] == ["src/onbeat/engine/native/libonbeat_native.so"]


def test_without_a_compiler_the_wheel_stays_pure_and_says_what_to_do(
    hatch_build: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler -m64")
    stale = tree / hatch_build.LIBRARY
    stale.write_bytes(b"of older sources")
    build_data: dict[str, Any] = {"pure_python": True, "artifacts": []}
    warnings: list[str] = []
    hatch_build.add_to_wheel(tree, build_data, warnings.append)
    assert build_data == {"pure_python": True, "artifacts": []}
    (warning,) = warnings
    assert "'/no/such/compiler'" in warning
    assert "install g++" in warning
    assert not stale.exists()


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the processor is no x86")
def test_a_compiler_that_does_not_know_amx_builds_the_rest_and_it_is_said(
    hatch_build: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tree / "old-g++"
    old.write_text(
        '#!/bin/sh\ncase "$*" in *-mamx-tile*) echo "unrecognized option -mamx-tile" >&2; exit 1;; esac\n'
        'exec g++ "$@"\n'
    )
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    warnings: list[str] = []
    hatch_build.add_to_wheel(tree, {"artifacts": []}, warnings.append)
    (warning,) = warnings
    assert "set amx" in warning
    assert "-mamx-tile" in warning
    assert "g++ 11 or newer" in warning
    assert ctypes.CDLL(str(tree / hatch_build.LIBRARY)).answer() == 42
    assert not [name for name in objects(tree) if name.startswith("kernels_amx")]
    assert [name for name in objects(tree) if name.startswith("kernels_avx512bf16")]


def test_a_tree_without_sources_is_named(hatch_build: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(hatch_build.BuildFailed, match="no C\\+\\+ sources"):
        hatch_build.translation_units(tmp_path / "native")


def test_the_weakest_instruction_set_comes_first_in_the_link(hatch_build: ModuleType, tree: Path) -> None:
    """Of an inline function in several objects the linker keeps the first, which every processor must run."""
    units = hatch_build.translation_units(tree / "native")
    assert [unit.name for unit in units][:2] == ["api", "kernels_portable"]
    for unit in units[:2]:
        assert not [flag for flag in unit.flags if flag.startswith("-m")]
