"""Which runs a command makes: sweeps over a load, and published studies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onbeat.bench.bench_config import DatasetConfig, LoadConfig, RunConfig
from onbeat.core.errors import ConfigError


def concurrency_sweep(base: RunConfig, levels: Sequence[int]) -> list[RunConfig]:
    """Return one closed-loop run per concurrency."""
    return [
        replace(
            base,
            load=LoadConfig(max_concurrency=level),
            title=f"{base.title} c={level}".strip(),
            series=base.title,
        )
        for level in levels
    ]


def rate_sweep(base: RunConfig, rates: Sequence[float]) -> list[RunConfig]:
    """Return one open-loop run per request rate, other settings of the load unchanged."""
    return [
        replace(
            base,
            load=replace(base.load, request_rate=rate),
            title=f"{base.title} {rate:g} req/s".strip(),
            series=base.title,
        )
        for rate in rates
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlcStudy:
    """The load of MLCEngine's study: fixed concurrencies and fixed rates over three data sets.

    The study reports mean and P90 of TPOT and TTFT against output tokens/s per GPU.

    References
    ----------
    MLC community, "Optimizing and Characterizing High-Throughput Low-Latency LLM Inference in MLCEngine",
    2024.
    """

    concurrencies: tuple[int, ...] = (1, 4, 8, 10, 16, 20, 30, 64)
    rates: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0)
    num_prompts: int = 500

    # Mean lengths of ShareGPT conversations, for the stand-in when no ShareGPT file is given.
    conversation_input_len: int = 306
    conversation_output_len: int = 500

    def runs(self, *, scale: float, sharegpt: Path | None) -> list[RunConfig]:
        """Return all runs of the study.

        Parameters
        ----------
        scale : multiplies the number of requests and every length, in (0, 1]; levels stay. Each run has at
            least twice as many requests as its concurrency, so that the level is reached.
        sharegpt : a ShareGPT file, whose lengths are never scaled; None draws conversation-like lengths.
        """
        if not 0 < scale <= 1:
            raise ConfigError(f"--preset-scale must lie in (0, 1], got {scale:g}")
        runs: list[RunConfig] = []
        for name, dataset in self._datasets(scale, sharegpt).items():
            base = RunConfig(dataset=dataset, load=LoadConfig(), title=name)
            runs += [
                replace(run, num_prompts=self._num_prompts(scale, run.load.max_concurrency or 1))
                for run in concurrency_sweep(base, self.concurrencies)
            ]
            runs += [
                replace(run, num_prompts=self._num_prompts(scale, 1)) for run in rate_sweep(base, self.rates)
            ]
        return runs

    def _num_prompts(self, scale: float, concurrency: int) -> int:
        return max(2 * concurrency, round(self.num_prompts * scale))

    def _datasets(self, scale: float, sharegpt: Path | None) -> dict[str, DatasetConfig]:
        chat = (
            DatasetConfig(name="sharegpt", path=sharegpt)
            if sharegpt is not None
            else DatasetConfig(
                name="conversation",
                input_len=self.conversation_input_len,
                output_len=self.conversation_output_len,
                length_scale=scale,
            )
        )
        return {
            "ShareGPT" if sharegpt is not None else "ShareGPT-like": chat,
            "100/500": DatasetConfig(input_len=100, output_len=500, length_scale=scale),
            "1000/500": DatasetConfig(input_len=1000, output_len=500, length_scale=scale),
        }
