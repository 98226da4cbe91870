"""Fleets of Splitwise (Patel et al., ISCA 2024), by the measurements and rules of its simulator.

Parts of `fleet_papers.py`. Machines are DGX with BLOOM-176B (TP 8); the step times are those
of the table of Mutinifni/splitwise-sim: a step with prompts takes the time of its prompt tokens, 1.1 times
that beside decodes, as the simulator has it; a step of decodes that of its batch, as measured. At most 2,048
tokens and 512 requests a step (`sarathi`: longer prompts in parts). Lengths are drawn from the trace of
conversations, arrivals are Poisson's. Fleets have a fifth of the paper's machines, rounded within the same
power.

A rate is kept if all nine of the paper's objectives hold: the 50th, 90th and 99th percentile of TTFT, TBT and
E2E, as multiples of what the same request takes alone on an A100 machine. TBT is the mean of a request; in
`equal-power-gaps` each gap counts by itself.

`pools` tries the divisions of 40 machines that the paper's search tries, in fives
(`splitwise_hh_isopower.yaml` of its simulator), with two things as the simulator has them
(`performance_model.py`, `instance.py`): a step of n decodes takes the time that its table has for n tokens of
prompts, not for a batch of n, so that up to 128 take what one takes; and KV may have all memory beside 329 GB
of weights.
"""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from onbeat.core.fleet import PoolSizes
from onbeat.core.step import BatchShape
from onbeat.metrics.record import RequestRecord
from onbeat.perfmodel.predictor import Predictor
from onbeat.scheduler.cluster.fleet_config import FleetConfig
from onbeat.scheduler.cluster.pools import PoolRule
from onbeat.scheduler.config import SchedulerConfig
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import KVLink, ReplicaKind, SimulationConfig
from onbeat.workload.offered import OfferedLoad

OBJECTIVES = {"TTFT": (2.0, 3.0, 6.0), "TBT": (1.25, 1.5, 5.0), "E2E": (1.25, 1.5, 5.0)}
PERCENTILES = (50, 90, 99)
LINK_BYTES_PER_SECOND = 200e9
"""Eight InfiniBand HDR links of an A100 machine."""
MODEL = "bloom-176b"
KV_BYTES_PER_TOKEN = 2 * 70 * 14_336 * 2
KV_TOKENS = int((0.9 * 640e9 - 352e9) / KV_BYTES_PER_TOKEN)
"""Of 640 GB, 0.9 of them used, beside the weights."""
SIMULATOR_KV_TOKENS = int((8 * 80 * 2**30 - 329e9) / KV_BYTES_PER_TOKEN)
"""Of its simulator."""
MIXED_STEP = 1.1
SECONDS = 60.0
A100, H100, CAPPED = "a100-80gb", "h100-80gb", "h100-80gb-pcap"


@dataclass(frozen=True)
class Machine:
    """The step times of one kind of machine, seconds."""

    prompt_tokens: NDArray[np.float64]
    prompt_seconds: NDArray[np.float64]
    batches: NDArray[np.float64]
    token_seconds: NDArray[np.float64]

    def prompt(self, num_tokens: float) -> float:
        return _interpolated(num_tokens, self.prompt_tokens, self.prompt_seconds)

    def token(self, num_requests: float) -> float:
        return _interpolated(num_requests, self.batches, self.token_seconds)

    def step(self, shape: BatchShape) -> float:
        num_prompt_tokens = shape.num_new_tokens - shape.num_decodes
        if not num_prompt_tokens:
            return self.token(shape.num_decodes)
        return self.prompt(num_prompt_tokens) * (MIXED_STEP if shape.num_decodes else 1.0)

    def alone(self, num_prompt_tokens: int, num_output_tokens: int) -> tuple[float, float, float]:
        """Return TTFT, TBT and E2E of a request that nobody is beside."""
        ttft, tbt = self.prompt(num_prompt_tokens), self.token(1)
        return ttft, tbt, ttft + (num_output_tokens - 1) * tbt


def capped(machine: Machine) -> Machine:
    """Return a machine whose power is capped, as the table has it: prompts take 1.3 times as long."""
    return replace(machine, prompt_seconds=1.3 * machine.prompt_seconds)


def _interpolated(size: float, sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> float:
    """Return the time of a size; beyond the largest, by the last two."""
    if size > sizes[-1]:
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        return float(seconds[-1] + slope * (size - sizes[-1]))
    return float(np.interp(size, sizes, seconds))


def read_rows(shared: Path) -> list[dict[str, str]]:
    path = shared / "data" / "profiles" / "splitwise" / "perf_model.csv.gz"
    with gzip.open(path, "rt", newline="") as file:
        return list(csv.DictReader(file))


def read_machine(shared: Path, hardware: str, *, as_simulator: bool = False) -> Machine:
    """Return the means of the rows of one kind of machine.

    Parameters
    ----------
    as_simulator : take batches of decodes for so many tokens of prompts.
    """
    prompts: dict[int, list[float]] = defaultdict(list)
    tokens: dict[int, list[float]] = defaultdict(list)
    for row in read_rows(shared):
        if (row["model"], row["tensor_parallel"], row["hardware"]) == (MODEL, "8", hardware):
            batch = int(row["batch_size"])
            # Batches of more tokens than a step has here took longer than a prompt of that length.
            if batch * int(row["prompt_size"]) <= 2048 or batch == 1:
                prompts[batch * int(row["prompt_size"])].append(float(row["prompt_time"]) / 1e3)
            rows = batch * int(row["prompt_size"]) if as_simulator else batch
            tokens[rows].append(float(row["token_time"]) / 1e3)
    sizes, batches = sorted(prompts), sorted(tokens)
    typical = median if as_simulator else fmean
    token_seconds = [typical(tokens[each]) for each in batches]
    return Machine(
        np.array(sizes, dtype=float),
        np.maximum.accumulate([fmean(prompts[each]) for each in sizes]),
        np.array(batches, dtype=float),
        np.array(token_seconds) if as_simulator else np.maximum.accumulate(token_seconds),
    )


@dataclass(frozen=True)
class Design:
    """Machines of a fleet: for prompts, and that generate; all do both where there are none for prompts."""

    name: str
    prompt: str
    token: str
    sizes: tuple[int, int]
    rule: PoolRule = "splitwise"
    kv_tokens: int = KV_TOKENS

    @property
    def num_machines(self) -> int:
        return sum(self.sizes)


BASELINE = Design("A100, mixed", A100, A100, (0, 14))
EQUAL_POWER = (
    BASELINE,
    Design("H100, mixed", H100, H100, (0, 8)),
    Design("AA 9 + 5", A100, A100, (9, 5)),
    Design("HH 5 + 3", H100, H100, (5, 3)),
    Design("HA 5 + 5", H100, A100, (5, 5)),
    Design("HHcap 5 + 4", H100, CAPPED, (5, 4)),
)
"""An H100 machine takes 1.75 times the power of an A100 one, a capped one 0.7 of its own."""
PARTITIONS = tuple(
    Design(f"{sizes[0]} + {sizes[1]}, {rule}", H100, H100, sizes, rule)
    for rule in ("splitwise", "distserve")
    for sizes in ((5, 3), (7, 1))
)
"""For conversations, and for code; with a mixed pool and without."""


CONVERSATIONS, CODE = "conv", "code"
DIVISIONS = ((5, 3), (4, 4), (6, 2), (7, 1), (3, 5))
"""Of a fifth of 40 machines: for prompts, for generation."""
DIVIDED = (
    (CONVERSATIONS, 24.0, True, SIMULATOR_KV_TOKENS),
    (CODE, 20.0, True, SIMULATOR_KV_TOKENS),
    (CONVERSATIONS, 22.0, True, KV_TOKENS),
    (CONVERSATIONS, 16.0, False, KV_TOKENS),
)
"""Load, rate at which a search starts, whose steps of decodes, KV."""


def draw_load(shared: Path, rate: float, trace: str) -> OfferedLoad:
    """Draw requests of a trace; those of a lower rate begin those of a higher one."""
    with gzip.open(shared / "data" / "traces" / f"azure2023_{trace}.csv.gz", "rt", newline="") as file:
        rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    lengths = np.array([row for row in rows if 0 < row[0] <= 8192 and row[1] > 1])
    num_requests = round(rate * SECONDS)
    rng = np.random.default_rng(4)
    drawn = lengths[rng.integers(0, len(lengths), num_requests)]
    gaps = np.random.default_rng(5).exponential(1.0, num_requests)
    return OfferedLoad(
        name=f"{trace} at {rate:g}/s",
        num_prompt_tokens=drawn[:, 0],
        num_output_tokens=drawn[:, 1],
        arrivals=np.cumsum(gaps) / rate,
    )


def simulate_fleet(design: Design, machines: dict[str, Machine], load: OfferedLoad) -> list[RequestRecord]:
    scheduler = SchedulerConfig(
        num_blocks=design.kv_tokens // 16,
        block_size=16,
        max_model_len=16_384,
        max_num_seqs=512,
        max_num_batched_tokens=2048,
        policy="sarathi",
        enable_prefix_caching=False,
    )
    prompt, token = (
        ReplicaKind(scheduler=scheduler, step_time=Predictor(machines[name].step))
        for name in (design.prompt, design.token)
    )
    num_prefill = design.sizes[0]
    pools = None
    if num_prefill:
        pools = PoolSizes(prefill=num_prefill, decode=design.num_machines - num_prefill)
    config = SimulationConfig(
        scheduler=scheduler,
        fleet=FleetConfig(
            replicas=design.num_machines,
            router="least-outstanding",
            disaggregate=pools,
            pool_rule="adaptive" if pools is None else design.rule,
        ),
        kinds=(prompt,) * num_prefill + (token,) if num_prefill else (),
        kv_link=(
            KVLink(bytes_per_token=KV_BYTES_PER_TOKEN, bandwidth=LINK_BYTES_PER_SECOND)
            if num_prefill
            else None
        ),
    )
    return list(simulate(load, config, token.step_time).records)


def slow_downs(
    records: Sequence[RequestRecord], reference: Machine, *, by_gap: bool
) -> dict[str, NDArray[np.float64]]:
    """Return, for each objective, the percentiles of what requests take against what they take alone."""
    found: dict[str, list[float]] = {name: [] for name in OBJECTIVES}
    for record in records:
        taken = (record.ttft, record.tpot, record.end - record.arrival)
        alone = reference.alone(record.num_prompt_tokens, record.num_output_tokens)
        for name, seconds, of_alone in zip(OBJECTIVES, taken, alone, strict=True):
            assert seconds is not None
            found[name].append(seconds / of_alone)
    if by_gap:
        gaps = np.concatenate([np.diff(record.delivery_times) for record in records])
        found["TBT"] = (gaps / reference.token(1)).tolist()
    return {name: np.percentile(each, PERCENTILES) for name, each in found.items()}


def capacity(
    design: Design,
    machines: dict[str, Machine],
    shared: Path,
    start: float,
    *,
    by_gap: bool,
    trace: str = CONVERSATIONS,
) -> tuple[float, dict[str, NDArray[np.float64]]]:
    """Return the highest rate at which all nine objectives hold, to 4 %, and the slow-downs there."""
    low, high, rate = 0.0, 0.0, start
    at_low: dict[str, NDArray[np.float64]] = {}
    while not (low and high) or high > 1.04 * low:
        load = draw_load(shared, rate, trace)
        records = simulate_fleet(design, machines, load)
        found = slow_downs(records, machines[A100], by_gap=by_gap)
        if all(np.all(found[name] <= limits) for name, limits in OBJECTIVES.items()):
            low, at_low = rate, found
        else:
            high = rate
        if low and high:
            rate = (low * high) ** 0.5
        elif low:
            rate *= 1.4
        else:
            rate /= 1.4
        if rate < start / 32:
            break
    return low, at_low


def print_capacities(
    shared: Path,
    designs: Sequence[Design],
    start: float,
    *,
    by_gap: bool = False,
    trace: str = CONVERSATIONS,
    as_simulator: bool = False,
) -> None:
    """Print the rate of each fleet, and its ratio to the first."""
    machines = {name: read_machine(shared, name, as_simulator=as_simulator) for name in (A100, H100)}
    machines[CAPPED] = capped(machines[H100])
    heads = " | ".join(f"{name} P50, P90, P99" for name in OBJECTIVES)
    print(f"| machines | requests/s | to the first | {heads} |")
    print("|---|---:|---:|" + "---|" * len(OBJECTIVES))
    first = 0.0
    for design in designs:
        rate, found = capacity(design, machines, shared, start, by_gap=by_gap, trace=trace)
        first = first or rate
        cells = [", ".join(f"{each:.2f}" for each in found[name]) if found else "-" for name in OBJECTIVES]
        print(f"| {design.name} | {rate:.1f} | {rate / first:.2f} | {' | '.join(cells)} |", flush=True)


def equal_power(shared: Path) -> None:
    print_capacities(shared, EQUAL_POWER, 8.0)


def equal_power_gaps(shared: Path) -> None:
    print_capacities(shared, EQUAL_POWER, 8.0, by_gap=True)


def partitions(shared: Path) -> None:
    print_capacities(shared, PARTITIONS, 10.0)


def pools(shared: Path) -> None:
    """Print the rates of divisions, with steps as measured and as the paper's simulator takes them."""
    for trace, start, as_simulator, kv_tokens in DIVIDED:
        steps = "as its simulator takes them" if as_simulator else "as measured"
        print(f"\n{trace}, steps of decodes {steps}, KV of {kv_tokens:,} tokens a machine\n")
        designs = [
            Design(f"{5 * sizes[0]} : {5 * sizes[1]}", H100, H100, sizes, kv_tokens=kv_tokens)
            for sizes in DIVISIONS
        ]
        print_capacities(shared, designs, start, trace=trace, as_simulator=as_simulator)


def power(shared: Path) -> None:
    """Print how capped machines compare with others, in the rows that both were measured in."""
    columns = ("prompt_time", "token_time")
    rows: dict[tuple[str, ...], dict[str, list[tuple[float, ...]]]] = defaultdict(lambda: defaultdict(list))
    for row in read_rows(shared):
        key = tuple(row[name] for name in ("model", "prompt_size", "batch_size", "tensor_parallel"))
        rows[key][row["hardware"]].append(tuple(float(row[name]) for name in columns))
    for index, name in enumerate(columns):
        ratios = [
            fmean(each[index] for each in found[CAPPED]) / fmean(each[index] for each in found[H100])
            for found in rows.values()
            if {H100, CAPPED} <= found.keys()
        ]
        print(
            f"{name}, capped : not: median {median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f} "
            f"({len(ratios)} points)"
        )
    for prompts, tokens in ((25, 15), (35, 5)):
        machines = prompts + tokens
        print(
            f"{prompts} machines for prompts, {tokens} capped ones that generate: "
            f"{(prompts + 0.7 * tokens) / machines - 1:+.1%} of the rated power of {machines} uncapped"
        )


SPLITWISE_PARTS: dict[str, Callable[[Path], None]] = {
    "power": power,
    "equal-power": equal_power,
    "equal-power-gaps": equal_power_gaps,
    "partitions": partitions,
    "pools": pools,
}
