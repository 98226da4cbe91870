"""The model path on a CUDA device computes what it computes on the CPU."""

from __future__ import annotations

import pytest
import torch

from onbeat.engine.device import Device, detect_device, free_memory
from onbeat.engine.torch.weights import load_weights
from tests.cpu.engine.forwards import on_torch
from tests.cpu.engine.naive_attention import Case, Row, naive_attention, run_paged
from tests.cpu.engine.step_driver import StepDriver
from tests.cpu.engine.tiny_models import FAMILIES, StateCheckpoint, hf_tiny_model, random_prompt, tiny_model

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
ROWS = [Row(0, 1), Row(250, 1), Row(31, 1), Row(70, 7), Row(0, 200), Row(100, 64)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=str
)
@pytest.mark.parametrize("window", [None, 20])
def test_attention_equals_attention_request_by_request(
    dtype: torch.dtype, tolerance: float, window: int | None
) -> None:
    case = Case(ROWS, heads=(6, 2), head_dim=64, block_size=16, window=window, seed=0)
    actual = run_paged(case, dtype, CUDA).double()
    torch.testing.assert_close(actual, naive_attention(case, dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.parametrize("chunk", [7, 1000])
def test_greedy_tokens_equal_the_reference(name: str, chunk: int) -> None:
    tiny = tiny_model(name)
    checkpoint = StateCheckpoint(hf_tiny_model(name, torch.float64))
    driver = StepDriver(on_torch(load_weights(checkpoint, dtype=torch.float64, device=CUDA)))
    for length in (1, 17, 100, 197):
        driver.add(random_prompt(length), 10)
    driver.run(chunk)
    for live in driver.requests.values():
        token_ids, logits = tiny.reference(live.request.prompt_token_ids, 10)
        assert live.output_token_ids == token_ids
        # The norms inside are float32, whose sums run in another order there.
        torch.testing.assert_close(torch.stack(live.logits).cpu(), logits, rtol=0, atol=1e-4)


def test_detection_finds_the_device_and_its_memory() -> None:
    assert detect_device().device.type == "cuda"
    assert free_memory(Device("cuda")).num_bytes > 0
