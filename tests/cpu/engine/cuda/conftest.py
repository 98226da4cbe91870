"""Kernels in Triton are interpreted: that is settled when triton is imported for the first time."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
