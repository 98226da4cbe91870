"""The constants and structures of the Python side are those of the C header."""

from __future__ import annotations

import re
from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import pytest

from onbeat.engine.native import library
from onbeat.engine.native.library import LayerStructure, ModelStructure, StepStructure

HEADER = Path(__file__).parents[2] / "native/include/onbeat_native.h"
TYPES: dict[str, Any] = {"int32_t": c_int32, "int64_t": c_int64, "float": c_float, "double": c_double}


@pytest.fixture(scope="module")
def header() -> str:
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)


def fields_in(header: str, name: str) -> list[tuple[str, Any]]:
    """Return the fields of a C structure; every pointer is a void pointer, an array one of ctypes."""
    body = re.search(rf"typedef struct \{{([^}}]*)\}} {name};", header)
    assert body is not None
    fields: list[tuple[str, Any]] = []
    for declaration in body[1].split(";"):
        words = declaration.split()
        if not words:
            continue
        kind = next(word for word in words if word != "const")
        names = re.sub(rf"^\s*(const\s+)?{kind}", "", declaration)
        for part in names.split(","):
            declared = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", part.split()[-1].lstrip("*"))
            assert declared is not None
            field = c_void_p if "*" in part else TYPES[kind]
            fields.append((declared[1], field * int(declared[2]) if declared[2] else field))
    return fields


@pytest.mark.parametrize(
    ("name", "structure"),
    [("ob_layer", LayerStructure), ("ob_model", ModelStructure), ("ob_step", StepStructure)],
)
def test_fields(header: str, name: str, structure: type[Structure]) -> None:
    assert fields_in(header, name) == list(structure._fields_)


def test_constants(header: str) -> None:
    constants = {name: int(value) for name, value in re.findall(r"\b(OB_\w+)(?: =)? (-?\d+)\b", header)}
    for prefix, kinds in (("OB_STORE_", library.Store), ("OB_SOURCE_", library.Source)):
        found = {name.removeprefix(prefix): constants[name] for name in constants if name.startswith(prefix)}
        assert found == {kind.name: kind.value for kind in kinds}
    assert {kind.name: constants[f"OB_{kind.name}"] for kind in library.CallStatus} == {
        kind.name: kind.value for kind in library.CallStatus
    }
    assert constants["OB_ABI_VERSION"] == library.ABI_VERSION
    assert {
        "silu": constants["OB_ACTIVATION_SILU"],
        "gelu_pytorch_tanh": constants["OB_ACTIVATION_GELU_TANH"],
        "clamped_swiglu": constants["OB_ACTIVATION_CLAMPED_SWIGLU"],
    } == library.ACTIVATIONS
