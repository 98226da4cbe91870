"""The loads that every server gets: chats of drawn lengths, some with long prompts among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onbeat.bench.bench_load import every_nth
from onbeat.bench.session import RequestOffer
from onbeat.workload.arrivals import LogNormalLength
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.prompts import FreshPrompts, PromptWriter

# Log-normal like the lengths of ShareGPT conversations; clipped, the means are about 190 in and 150 out.
PROMPTS = LogNormalLength(mean=200, sigma=0.8, low=8, high=1024)
OUTPUTS = LogNormalLength(mean=150, sigma=0.6, low=8, high=400)
LONG_PROMPT_TOKENS = 1500
LONG_SHARE = 1 / 8
MIN_REQUESTS = 12
QUICK_REQUESTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One load: a closed loop of `concurrency` requests at a time."""

    name: str
    concurrency: int
    long_share: float = 0.0
    """Of the requests, with prompts of `LONG_PROMPT_TOKENS`."""
    num_requests: int

    def offer(self, writer: PromptWriter, *, seed: int) -> RequestOffer:
        """Return the requests: lengths follow from the seed, words from the writer."""
        rng, size = np.random.default_rng([seed, 0]), self.num_requests
        prompts, outputs = PROMPTS.draw(size, rng), OUTPUTS.draw(size, rng)
        prompts[every_nth(size, self.long_share)] = LONG_PROMPT_TOKENS
        load = OfferedLoad(name=self.name, num_prompt_tokens=prompts, num_output_tokens=outputs)
        return RequestOffer(load, FreshPrompts(writer=writer, num_tokens=prompts.tolist()))


def make_cells(
    concurrencies: Sequence[int], *, per_slot: int, interference: int | None, least: int = MIN_REQUESTS
) -> list[Cell]:
    """Return the loads of a round.

    Parameters
    ----------
    per_slot : requests for each of the concurrent ones.
    interference : concurrency of the load with long prompts; None leaves it out.
    least : requests of a load at least.
    """
    cells = [
        Cell(name=f"{level}", concurrency=level, num_requests=max(least, per_slot * level))
        for level in concurrencies
    ]
    if interference is not None:
        cells.append(
            Cell(
                name=f"{interference}, long prompts",
                concurrency=interference,
                long_share=LONG_SHARE,
                num_requests=max(least, per_slot * interference),
            )
        )
    return cells
