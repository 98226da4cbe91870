import pytest
import torch

from onbeat.core.request import SamplingParams
from onbeat.engine.sampler import SampledTokens, Sampler, SamplingRow

pytestmark = pytest.mark.gpu

CASES = (
    SamplingParams(temperature=0.0, num_logprobs=3),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(top_k=20, num_logprobs=0),
    SamplingParams(min_p=0.02),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, logit_bias=((7, 4.0),)),
    SamplingParams(allowed_token_ids=(3, 500, 999), min_tokens=4, stop_token_ids=(3,)),
)


def sample(device: str, logits: torch.Tensor) -> SampledTokens:
    rows = [SamplingRow(params, [1, 2, 3], [3, 4]) for params in CASES]
    return Sampler(logits.shape[1], torch.device(device)).sample(logits.to(device, copy=True), rows)


def test_cuda_samples_the_tokens_that_the_cpu_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = torch.randn(len(CASES), 1000, generator=generator, dtype=torch.float64) * 4
        logits[1, 5] = torch.nan
        on_cpu, on_cuda = sample("cpu", logits), sample("cuda", logits)
        assert on_cuda.token_ids == on_cpu.token_ids
        assert on_cuda.errors.keys() == on_cpu.errors.keys() == {1}
        reports = zip(on_cuda.logprobs, on_cpu.logprobs, strict=True)
        assert [a and a.top_token_ids for a, _ in reports] == [b and b.top_token_ids for b in on_cpu.logprobs]
