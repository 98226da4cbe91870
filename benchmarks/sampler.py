"""Time of one sampling step by feature: python benchmarks/sampler.py [--threads 1] [--vocab-size 49152].

Logits fall with the logarithm of a token's rank, about as those of a language model do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from onbeat.core.request import SamplingParams
from onbeat.engine.sampler import Sampler, SamplingRow

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, 5 logprobs": {"temperature": 0.0, "num_logprobs": 5},
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "temperature": {"temperature": 0.8},
    "temperature, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "temperature, top-k 50": {"temperature": 0.8, "top_k": 50},
    "temperature, min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
}


def measure(params: dict[str, Any], logits: torch.Tensor, repeats: int) -> float:
    """Return the median seconds of a step; the copy that keeps the logits fresh is not counted."""
    num_rows, vocab_size = logits.shape
    prompt, output = list(range(100, 400)), list(range(200))
    rows = [SamplingRow(SamplingParams(seed=seed, **params), prompt, output) for seed in range(num_rows)]
    sampler = Sampler(vocab_size, logits.device)
    scratch = torch.empty_like(logits)
    times = []
    for _ in range(repeats + 1):  # the first warms up
        scratch.copy_(logits)
        start = time.perf_counter()
        sampler.sample(scratch, rows)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--num-rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    for num_rows in args.num_rows:
        ranks = torch.rand(num_rows, args.vocab_size, generator=generator).argsort(dim=-1) + 1
        logits = 20.0 - 1.4 * ranks.log() + torch.randn(ranks.shape, generator=generator) * 0.3
        for name, params in CASES.items():
            seconds = measure(params, logits, args.repeats)
            print(f"{num_rows:4d} rows  {name:26s} {seconds * 1e6:9.0f} us")


if __name__ == "__main__":
    main()
