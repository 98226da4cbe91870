"""What planning costs inside vLLM: `schedule` and `update_from_output`, with onbeat and without.

    PYTHONPATH=.vllm/0.32.0:src:. .vllm/env-0.32.0/bin/python -m benchmarks.vllm.cost [--write]

Runs in the environment of `make test-vllm`. vLLM's own scheduler class is kept at a number of streams under a
virtual clock, once as it is and once with onbeat's plans; no model runs. `decodes`: every stream decodes, and
none ends. `turnover`: streams end and others take their place, and more wait. `async`: the next step is
planned while one runs.

Counted is the processor time of the thread, in turns of a few steps: load on the machine disturbs both sides
alike. Ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.version import __version__ as vllm_version

from benchmarks.harness.pages import machine, markdown_table, middle, publish
from onbeat.core.settled_memory import settled_memory
from tests.vllm.harness import Clock, Engine, make_request, make_scheduler, model_folder

CALLS = {"schedule": "schedule", "update_from_output": "update", "add_request": "add"}
OBJECTIVES: dict[str, Any] = {"slo_ttft_ms": 30_000.0, "slo_tbt_ms": 100.0}
"""Of all requests; steps of 256 decodes take 61 ms here, so that all can be in time."""
PROMPT_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Case:
    """A state in which the schedulers are kept."""

    name: str
    outputs: tuple[int, int]
    """Least and most output tokens of a request."""
    num_waiting: int = 0
    is_async: bool = False
    tells: bool = False
    """Whether onbeat tells what it does, as a server of `onbeat vllm serve` does."""


CASES = (
    Case(name="decodes", outputs=(3000, 3001)),
    Case(name="decodes, async", outputs=(3000, 3001), is_async=True),
    Case(name="decodes, telemetry", outputs=(3000, 3001), tells=True),
    Case(name="turnover, 128 wait", outputs=(100, 500), num_waiting=128),
    Case(name="turnover, 128 wait, async", outputs=(100, 500), num_waiting=128, is_async=True),
)


@dataclass
class Counted:
    """Microseconds a step of one round, and the rows of its steps."""

    schedule: float
    update: float
    add: float
    """Of one request; 0 if none came."""
    rows: float

    @property
    def step(self) -> float:
        return self.schedule + self.update


@dataclass
class Side:
    """A scheduler with its engine, kept at its number of streams.

    Attributes
    ----------
    spent : nanoseconds and calls of what is counted.
    """

    engine: Engine
    case: Case
    num_running: int
    spent: dict[str, list[int]] = field(default_factory=dict)
    num_rows: int = 0
    ids: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        for call in CALLS:
            self.spent[call] = [0, 0]
            setattr(self.engine.scheduler, call, self._timed(getattr(self.engine.scheduler, call), call))

    def run(self, num_steps: int) -> Counted:
        """Do some steps; return what they cost."""
        for spent in self.spent.values():
            spent[:] = [0, 0]
        self.num_rows = 0
        for _ in range(num_steps):
            self._fill()
            self.engine.step()
        add, num_added = self.spent["add_request"]
        return Counted(
            schedule=self.spent["schedule"][0] / num_steps / 1e3,
            update=self.spent["update_from_output"][0] / num_steps / 1e3,
            add=add / num_added / 1e3 if num_added else 0.0,
            rows=self.num_rows / num_steps,
        )

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        spent = self.spent[name]

        def timed(*arguments: Any) -> Any:
            begin = time.thread_time_ns()
            result = call(*arguments)
            spent[0] += time.thread_time_ns() - begin
            spent[1] += 1
            if name == "schedule":
                self.num_rows += len(result.num_scheduled_tokens)
            return result

        return timed

    def _fill(self) -> None:
        scheduler, (low, high) = self.engine.scheduler, self.case.outputs
        while len(scheduler.requests) < self.num_running + self.case.num_waiting:
            index = next(self.ids)
            num_output = low + index * 7919 % (high - low)
            request = make_request(
                f"r{index}", PROMPT_TOKENS, num_output, self.engine.clock.now, **OBJECTIVES
            )
            scheduler.add_request(request)


def make_side(folder: Path, case: Case, num_running: int, *, plug_in: bool) -> Side:
    """Return a scheduler with all its streams under way."""
    clock = Clock()
    scheduler = make_scheduler(
        folder,
        clock,
        plug_in=plug_in,
        is_async=case.is_async,
        num_blocks=260 * num_running,
        max_num_seqs=num_running,
        prefix_caching=True,
        options={"telemetry": f"ipc://{folder}/telemetry"} if case.tells else None,
    )
    side = Side(Engine(scheduler, clock, depth=2 if case.is_async else 1), case, num_running)
    while side.run(1).rows < num_running:
        pass
    side.run(40)
    return side


def compare(folder: Path, case: Case, args: argparse.Namespace) -> list[Any]:
    """Return the row of a case."""
    sides = [make_side(folder, case, args.running, plug_in=plug_in) for plug_in in (False, True)]
    rounds: list[list[Counted]] = []
    with settled_memory():
        for index in range(args.rounds):
            order = (0, 1) if index % 2 == 0 else (1, 0)
            counted = {each: sides[each].run(args.steps) for each in order}
            rounds.append([counted[0], counted[1]])
    plugin = sides[1].engine.scheduler.onbeat
    assert not plugin.num_faults, "onbeat failed, so that vLLM planned: the log says why"
    vllm, ours = ([each[side] for each in rounds] for side in (0, 1))
    return [
        case.name,
        *(_medians(side, call) for call in ("schedule", "update") for side in (vllm, ours)),
        middle([own.step / its.step for its, own in rounds]),
        *(_medians(side, "rows") for side in (vllm, ours)),
        *(_medians(side, "add") if case.num_waiting else None for side in (vllm, ours)),
    ]


def _medians(counted: list[Counted], name: str) -> float:
    return float(statistics.median(getattr(each, name) for each in counted))


def page(rows: list[list[Any]], args: argparse.Namespace) -> str:
    """Return the results as text."""
    header = ["case", "schedule: vLLM", "with onbeat", "update: vLLM", "with onbeat", "ratio of both"]
    header += ["rows: vLLM", "with onbeat", "add: vLLM", "with onbeat"]
    return "\n\n".join(
        (
            "# What planning costs inside vLLM",
            f"{time.strftime('%Y-%m-%d')}; vLLM {vllm_version}; {machine()}, shared with other work.",
            "    PYTHONPATH=.vllm/0.32.0:src:. .vllm/env-0.32.0/bin/python -m benchmarks.vllm.cost",
            f"vLLM's own scheduler class with {args.running} streams, as it is and under onbeat's plans. No "
            "model runs. The table shows microseconds of processor time: `schedule` and `update` of a step, "
            f"`add` of a request. Values are medians of {args.rounds} rounds of {args.steps} steps each. The "
            "two sides take turns. The ratio is that of `schedule` and `update` together, taken within a "
            "round, with least and most. Rows are requests in a step.",
            "In `decodes` every stream decodes and none ends. In `turnover` streams end, others take their "
            "place, and 128 more wait. With `async` a step is planned while another runs; with `telemetry` "
            "onbeat tells of each step, as `onbeat vllm serve` has it.",
            markdown_table(header, rows),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", type=int, default=256, help="streams at a time")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=20, help="of a side in a round")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="one of them (default: all)")
    parser.add_argument("--write", action="store_true", help="write the page of results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        folder = model_folder(Path(path) / "model")
        rows = [compare(folder, case, args) for case in CASES if args.case in (None, case.name)]
    publish(page(rows, args) + "\n", "vllm-plugin-cost", write=args.write)


if __name__ == "__main__":
    main()
