"""Loops of a number that a kernel is given: the interpreter hands it over as an array of one element, which
NumPy from 2.4 on takes for no index."""

from __future__ import annotations

from typing import Any

import pytest
from triton.runtime import interpreter


def mend_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `range` take what the interpreter gives."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
