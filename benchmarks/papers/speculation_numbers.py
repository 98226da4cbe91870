"""What each number in the choice of drafts is worth: mean latency with others in its place, in simulation.

    python -m benchmarks.papers.speculation_numbers [--scale 0.5]

TurboSpec's two deployments at 4 and 16 requests/s: drafts that are accepted at 0.5, 0.7 or 0.9 throughout,
and drafts that turn between 0.2 and 0.9 with every 100th request. Printed is the mean latency over that with
the numbers as they are, in the geometric mean over deployments and rates, and at worst; above 1 the other
value is slower. The folder of public data is named by ONBEAT_SHARED.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from unittest import mock

import numpy as np

from benchmarks.harness.intervals import geometric_mean
from benchmarks.harness.pages import markdown_table
from benchmarks.papers.linear import turbospec_speculation
from benchmarks.papers.speculation_study import turbospec
from benchmarks.papers.speculation_study.plan import shared_folder
from onbeat.perfmodel.predictor import Predictor
from onbeat.scheduler.replica.speculation import acceptance, goodput
from onbeat.simulator.draft_acceptance import Acceptance, RequestDrafts
from onbeat.simulator.simulate import simulate

RATES = (4, 16)
SECONDS = 30
"""Of arrivals."""
Change = Callable[[float], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurningAcceptance(Acceptance):
    """Acceptance that changes with the place of a request in the load."""

    turns: tuple[float, ...]
    block: int = 100
    """Requests of one rate."""

    def draw(self, row: int, num_output_tokens: int, **options: object) -> RequestDrafts:
        """Return the luck of one request. See `Acceptance.draw`."""
        rate = self.turns[row // self.block % len(self.turns)]
        return Acceptance(rate=rate).draw(row, num_output_tokens, **options)  # type: ignore[arg-type]


LOADS: Mapping[str, Acceptance] = {
    **{f"{rate:g}": Acceptance(rate=rate) for rate in turbospec.ACCEPTANCES},
    "turning": TurningAcceptance(turns=(0.2, 0.9)),
}


def kept(value: float) -> AbstractContextManager[object]:
    return mock.patch.object(goodput, "AcceptanceRates", partial(acceptance.AcceptanceRates, kept=value))


def initial(value: float) -> AbstractContextManager[object]:
    def make_rates(_configured: float) -> acceptance.AcceptanceRates:
        return acceptance.AcceptanceRates(value)

    return mock.patch.object(goodput, "AcceptanceRates", make_rates)


NUMBERS: Mapping[str, tuple[float, Change, tuple[float, ...]]] = {
    "KEPT": (acceptance.KEPT, kept, (0.8, 0.9, 0.95, 0.99, 1.0)),
    "LEAST_TRIES": (
        acceptance.LEAST_TRIES,
        lambda value: mock.patch.object(acceptance, "LEAST_TRIES", value),
        (2.0, 4.0, 64.0),
    ),
    "PROBE_SHARE": (
        goodput.PROBE_SHARE,
        lambda value: mock.patch.object(goodput, "PROBE_SHARE", value),
        (0.0, 0.001, 0.02, 0.1),
    ),
    "initial_acceptance": (0.7, initial, (0.3, 0.5, 0.9)),
}
"""Name -> what it is, how to change it, other values."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of requests")
    args = parser.parse_args()
    before = latencies(args.scale, nullcontext())
    print(markdown_table(["number", "is", "instead", *LOADS, "worst"], rows(before, args.scale)))


def rows(before: Mapping[tuple[str, int, str], float], scale: float) -> Iterator[list[object]]:
    """Yield a line for each other value."""
    for name, (value, change, others) in NUMBERS.items():
        for other in others:
            found = latencies(scale, change(other))
            ratios = {key: latency / before[key] for key, latency in found.items()}
            means = [
                geometric_mean([ratio for key, ratio in ratios.items() if key[2] == load]) for load in LOADS
            ]
            yield [name, f"{value:g}", f"{other:g}", *(f"{mean:.3f}" for mean in means),
                   f"{max(ratios.values()):.3f}"]  # fmt: skip


def latencies(scale: float, change: AbstractContextManager[object]) -> dict[tuple[str, int, str], float]:
    """Return (server, rate, load) -> mean latency, seconds."""
    with change:
        return {
            (server, rate, load): latency(turbospec.SERVERS[server], rate, LOADS[load], scale)
            for server, rate, load in product(turbospec.SERVERS, RATES, LOADS)
        }


def latency(server: turbospec.Server, rate: int, of_drafts: Acceptance, scale: float) -> float:
    """Return the mean latency of a load with adaptive drafts, seconds."""
    seconds = turbospec_speculation(
        shared_folder() / turbospec.COEFFICIENTS,
        model=server.model,
        tensor=server.tensor,
        method=server.method,
    )
    drafts = turbospec.speculation_of(turbospec.ADAPTIVE, server)
    config = turbospec.make_config(drafts, acceptance=0.5, seed=0)
    load = turbospec.make_load(rate, round(scale * SECONDS * rate), seed=0)
    result = simulate(load, replace(config, acceptance=of_drafts), Predictor(seconds))
    return float(np.mean([record.e2e for record in result.records]))


if __name__ == "__main__":
    main()
