"""Where there is a GPU, tests of the same process need Triton's kernels compiled (tests/gpu); those that need
them interpreted are left out."""

from __future__ import annotations

import pytest
import torch

from onbeat.engine.backends import torch as cuda_backend

collect_ignore = []
if torch.cuda.is_available():
    collect_ignore += ["test_flashinfer_attention.py", "test_triton_draw.py", "test_triton_forward.py"]
    collect_ignore += ["test_triton_ops.py"]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand for an H100 with all that the GPU engine needs."""
    monkeypatch.setattr(cuda_backend, "compute_capability", lambda _: (9, 0))
    monkeypatch.setattr(cuda_backend, "find_spec", lambda name: name)
    monkeypatch.setattr(cuda_backend, "unbuilt_kernel", lambda *_: (None, None))
