"""What the error of a predicted first token is made of, and what nothing known at the arrival could mend.

    python benchmarks/fleet_prediction.py --shared DIRECTORY --cells chat "64 x 4k, 75" --every 16 --draws 3

The loads and fleets are those of `fleet_routing.py`. At every n-th choice of the router `slo` this process is
copied (fork); in the copies nobody comes any more, and they end with the first token of the request that was
sent. In one each stream ends when it will (`true lengths`), in `--draws` others it generates as many tokens
more as a request of the load that is at least as long (`drawn lengths`, the median of these copies). Errors
are against what came in the run itself.
"""

from __future__ import annotations

import argparse
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from fleet_routing import CELLS, SETTINGS, TUNING_SEEDS, make_config, make_load
from harness.copies import branch
from harness.pages import markdown_table

from onbeat.metrics.record import RequestRecord
from onbeat.scheduler.cluster.events import Arrived, FleetAction, FleetEvent, Send
from onbeat.simulator.client import Clients
from onbeat.simulator.deliveries import Deliveries
from onbeat.simulator.fleet_loop import FleetLoop
from onbeat.simulator.setup import build_simulation
from onbeat.simulator.simulate import simulate

HEADER = ["load", "choices", "predicted", "true lengths", "drawn lengths", "lost their turn"]


class Forecasts:
    """Copies a run at its choices, and keeps what the copies find.

    Parameters
    ----------
    lengths : output tokens of the load's requests.
    every, num_draws : see the command's options.
    """

    def __init__(self, lengths: Any, every: int, num_draws: int) -> None:
        self.loop: FleetLoop | None = None
        self.found: dict[str, tuple[float, float, list[float]]] = {}
        """Request -> when it was sent, its predicted first token, and those of the copies, seconds."""
        self._lengths, self._every, self._num_draws = lengths, every, num_draws
        self._num_choices = 0
        self._is_copy = False
        self._watched: tuple[RequestRecord, float, int] | None = None

    def on_decision(self, event: FleetEvent, now: float, actions: Sequence[FleetAction]) -> None:
        """Copy the run before a request is sent, if it is its turn."""
        sends = [action for action in actions if isinstance(action, Send)]
        if self._is_copy or not isinstance(event, Arrived) or not sends:
            return
        sent = sends[0]
        self._num_choices += 1
        if self._num_choices % self._every or sent.predicted_ttft is None:
            return
        copies: list[float] = []
        for draw in range(1 + self._num_draws):
            first_token = self._copy(sent.request_id, now, draw)
            if self._is_copy:
                return
            copies.append(first_token)
        self.found[sent.request_id] = (now, sent.predicted_ttft, copies)

    def _copy(self, request_id: str, now: float, draw: int) -> float:
        """Return the seconds until the first token in a copy; in the copy itself, return at once."""
        assert self.loop is not None
        came = branch()
        if isinstance(came, bytes):
            return float(struct.unpack("d", came)[0]) if came else float("nan")
        self._is_copy = True
        self._watched = (self.loop._open[request_id].record, now, came)
        self.loop._clients.next_time = float("inf")
        if draw:
            self._draw(now, np.random.default_rng([self._num_choices, draw]))
        return 0.0

    def _draw(self, now: float, rng: np.random.Generator) -> None:
        """Give each stream that runs another length, of those that it can still have."""
        assert self.loop is not None
        for replica in self.loop._replicas.values():
            replica.interrupt(now)
            for state in replica.scheduler.running:
                num_tokens = state.num_output_tokens + state.num_in_flight_tokens
                longer = self._lengths[self._lengths > num_tokens]
                length = int(rng.choice(longer)) if len(longer) else num_tokens + 1
                state.max_total_tokens = state.num_prompt_tokens + length

    def end_if_found(self) -> None:
        """End a copy with the first token that it was made for."""
        if self._watched is not None:
            record, sent, writer = self._watched
            if len(record.delivery_times):
                os.write(writer, struct.pack("d", record.delivery_times[0] - sent))
                os._exit(0)

    def end_copy(self) -> None:
        """End a copy that has come to the end of the run, or failed."""
        if self._is_copy:
            os._exit(1)


def measure(cell: str, seed: int, shared: Path, every: int, num_draws: int) -> list[tuple[Any, ...]]:
    """Return (actual, predicted, true lengths, drawn lengths, lost its turn) of the choices looked at."""
    load = make_load(CELLS[cell], seed, shared)
    forecasts = Forecasts(np.asarray(load.num_output_tokens), every, num_draws)
    start, take, find_next = FleetLoop.run, Deliveries.take, Clients._find_next

    def run(loop: FleetLoop) -> None:
        forecasts.loop = loop
        start(loop)

    def taken(deliveries: Deliveries, *args: Any) -> Any:
        finished = take(deliveries, *args)
        forecasts.end_if_found()
        return finished

    def next_found(clients: Clients, now: float) -> None:
        if not forecasts._is_copy:
            find_next(clients, now)

    with (
        patch.object(FleetLoop, "run", run),
        patch.object(Deliveries, "take", taken),
        patch.object(Clients, "_find_next", next_found),
    ):
        try:
            config, step_time = make_config(CELLS[cell], "slo", seed), build_simulation(SETTINGS).step_time
            result = simulate(load, config, step_time, on_decision=forecasts.on_decision)
        finally:
            forecasts.end_copy()
    rows = []
    for record in result.records:
        if record.request_id in forecasts.found and len(record.delivery_times):
            sent, predicted, (true, *drawn) = forecasts.found[record.request_id]
            actual = record.delivery_times[0] - sent
            rows.append((actual, predicted, true, float(np.nanmedian(drawn)), record.is_relegated))
    return rows


def main() -> None:
    """Print a table of errors, P50 / P90."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=os.environ.get("ONBEAT_SHARED"))
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=tuple(CELLS))
    parser.add_argument("--seeds", type=int, nargs="+", default=TUNING_SEEDS)
    parser.add_argument("--every", type=int, default=16, help="look at one choice of so many")
    parser.add_argument("--draws", type=int, default=3)
    args = parser.parse_args()
    table = []
    for cell in args.cells:
        rows = [
            row for seed in args.seeds for row in measure(cell, seed, args.shared, args.every, args.draws)
        ]
        actual, *guesses, lost = np.array(rows).T
        shown = [cell, str(len(rows))]
        for guess in guesses:
            errors = np.abs(guess / actual - 1)
            shown.append(f"{100 * np.nanmedian(errors):.0f} / {100 * np.nanquantile(errors, 0.9):.0f}")
        table.append([*shown, f"{100 * lost.mean():.0f} %"])
        print(table[-1], flush=True)
    print(markdown_table(HEADER, table))


if __name__ == "__main__":
    main()
