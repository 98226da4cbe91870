"""Finding the native engine's library, and what is said where it cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onbeat.engine.native import library
from onbeat.engine.native.library import ABI_VERSION, VARIABLE, NativeLibrary, NotLoaded, load_library


def reason() -> str:
    loaded = load_library()
    assert isinstance(loaded, NotLoaded)
    return loaded.reason


def test_a_build_without_the_library_names_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(library, "BUILT_LIBRARY", tmp_path / "libonbeat_native.so")
    assert "(install g++, " in reason()


def test_a_named_library_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "other.so"))
    assert f"(${VARIABLE} " in reason()


def test_a_file_that_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.so").write_bytes(b"no library")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "broken.so"))
    assert "loaded" in reason()


def test_a_library_of_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(Path(torch.__file__).parent / "lib/libc10.so"))
    assert "ob_abi_version" in reason()


def test_another_version_of_the_interface(
    native_library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "ABI_VERSION", 99)
    assert f" {ABI_VERSION}, not 99 " in reason()


def test_every_processor_has_the_portable_instructions(native_library: NativeLibrary) -> None:
    sets = native_library.instruction_sets
    assert sets[-1] == "portable"
    assert native_library.withheld == "" or "amx" not in sets
    assert set(sets) <= {"amx", "avx512bf16", "avx512", "avx2", "portable"}
