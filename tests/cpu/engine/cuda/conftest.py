"""Kernels in Triton are interpreted where there is no GPU: that is settled when triton is first imported.

Where there is one, tests of the same process need them compiled (tests/gpu), and those that need them
interpreted are left out.
"""

from __future__ import annotations

import os

import torch

collect_ignore = []
if torch.cuda.is_available():
    collect_ignore += ["test_flashinfer_attention.py", "test_triton_draw.py", "test_triton_forward.py"]
    collect_ignore += ["test_triton_ops.py"]
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")
