"""Where there is a GPU, tests of the same process need Triton's kernels compiled (tests/gpu); those that need
them interpreted are left out."""

from __future__ import annotations

import torch

collect_ignore = []
if torch.cuda.is_available():
    collect_ignore += ["test_flashinfer_attention.py", "test_triton_draw.py", "test_triton_forward.py"]
    collect_ignore += ["test_triton_ops.py"]
