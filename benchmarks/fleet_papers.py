"""Published results on disaggregation and live migration, against simulated fleets.

    python benchmarks/fleet_papers.py --shared DIR [PART ...]

DIR (or ONBEAT_SHARED) has `data/profiles/{distserve,splitwise}` and `data/groundtruth/distserve`. The parts:

* `distserve` (Zhong et al., OSDI 2024, section 6.2): goodput per GPU of OPT-13B, ShareGPT lengths scaled to
  the paper's means, placement (2,1,1,1) with its own coefficients and pool rule `distserve`, against one
  colocated GPU: vLLM as measured (prefill first), and the same coefficients as DistServe's under
  prefill-first, sarathi and `slo`. 90 % (`--level`) must meet TTFT 0.25 s and TPOT 0.1 s, and tighter TPOTs.
* `motivation` (its figure 1): prompts of 512 and outputs of 64 tokens, TTFT 0.4 s, TPOT 0.04 s; two prefill
  GPUs and one that generates, against one that does both.
* `transfer` (its section 6.3): bytes of 512 tokens, and how long copies take over NVLink.
* `power`, `equal-power`, `partitions` (Splitwise, Patel et al., ISCA 2024): what its table says of H100 whose
  power is capped; fleets of equal power; and the partition for another load (`splitwise_fleets.py`).
* `llumnix` (Sun et al., OSDI 2024): 16 A10G with Llama-2-7B, 13,616 tokens of KV each, gamma arrivals (CV 4),
  lengths M-M, 16 Gbit/s a replica; and, as `stops`, for how long a stream stands still, by its length.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import numpy as np
from distserve_replay import (
    KV_BYTES_PER_TOKEN,
    NVLINK_BYTES_PER_SECOND,
    OPT_13B,
    OPT_66B,
    Latencies,
    Published,
    draw_load,
    latencies_of,
    run_distserve,
    run_vllm,
    scheduler_config,
)
from numpy.typing import NDArray
from splitwise_fleets import SPLITWISE_PARTS

from onbeat.core.handover import MoveVerb
from onbeat.core.options import make
from onbeat.core.slo import SLO
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.precision import Precision
from onbeat.scheduler.cluster.events import Answered, FleetAction, FleetEvent, MoveStep
from onbeat.simulator.config import FleetChange, FleetTimes, KVLink, ReplicaKind, SimulationConfig
from onbeat.simulator.setup import ReplicaSettings, Simulation, build_simulation
from onbeat.simulator.simulate import simulate
from onbeat.workload.arrivals import gamma_arrivals
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass

TTFT = 0.25
TPOTS = (0.1, 0.075, 0.06, 0.05)
MEDIUM = ((0.0, 4), (0.5, 32), (0.8, 173), (0.95, 1288), (0.99, 4208), (1.0, 6000))
"""Quantiles of Llumnix's medium lengths; the least is a guess, and the longest the paper's 6k."""


def goodput(attained: Callable[[float], float], start: float, level: float) -> float:
    """Return the highest rate with enough good requests, to 4 %; 0 below a 32nd of the start."""
    low, high, rate = 0.0, 0.0, start
    while not (low and high):
        if attained(rate) >= level:
            low, rate = rate, rate * 1.5
        else:
            high, rate = rate, rate / 1.5
        if rate < start / 32:
            return 0.0
    while high > 1.04 * low:
        middle = (low * high) ** 0.5
        if attained(middle) >= level:
            low = middle
        else:
            high = middle
    return low


# --- DistServe ----------------------------------------------------------------------------------------


def run_colocated(published: Published, load: OfferedLoad, policy: str, *, tpot: float) -> Latencies:
    """Simulate one GPU with DistServe's own coefficients."""
    scheduler = scheduler_config(policy, published.kv_tokens(OPT_13B, tensor=1), tokens=2048, seqs=256)
    classes = (SLOClass(name="all", slo=SLO(ttft=TTFT, tbt=tpot)),)
    load = replace(load, classes=classes, class_ids=np.zeros(len(load), dtype=np.int64))
    step_time = published.step_time("distserve", OPT_13B, tensor=1)
    return latencies_of(simulate(load, SimulationConfig(scheduler=scheduler), step_time).records)


def compare(
    published: Published,
    make_load: Callable[[float], OfferedLoad],
    *,
    slo: tuple[float, float],
    level: float,
    is_pair: bool,
) -> dict[str, float]:
    """Return the goodput per GPU of each system, requests per second."""

    def share(latencies: Latencies) -> float:
        return latencies.attainment(*slo)

    def apart(rate: float) -> float:
        if is_pair:
            return share(run_distserve(published, make_load(rate)))
        return share(run_two_and_one(published, make_load(rate)))

    found = {"DistServe": goodput(apart, 4.0, level) / 3}
    name = "vLLM, its own coefficients"
    found[name] = goodput(lambda rate: share(run_vllm(published, make_load(rate))), 1.5, level)
    for policy in ("prefill-first", "sarathi", "slo"):

        def alone(rate: float, policy: str = policy) -> float:
            return share(run_colocated(published, make_load(rate), policy, tpot=slo[1]))

        found[policy] = goodput(alone, 1.5, level)
    return found


def run_two_and_one(published: Published, load: OfferedLoad) -> Latencies:
    """Simulate two GPUs for prompts and one that generates."""
    kv_tokens = published.kv_tokens(OPT_13B, tensor=1)
    step_time = published.step_time("distserve", OPT_13B, tensor=1)
    prefill = scheduler_config("hybrid-only", kv_tokens, tokens=2048, seqs=1024)
    decode = scheduler_config("hybrid-only", kv_tokens, tokens=65_536, seqs=1024)
    config = SimulationConfig(
        scheduler=prefill,
        num_replicas=3,
        num_prefill=2,
        pool_rule="distserve",
        router="least-outstanding",
        kinds=(
            *(ReplicaKind(scheduler=prefill, step_time=step_time),) * 2,
            ReplicaKind(scheduler=decode, step_time=step_time),
        ),
        kv_link=KVLink(bytes_per_token=KV_BYTES_PER_TOKEN[OPT_13B], bandwidth=NVLINK_BYTES_PER_SECOND),
    )
    return latencies_of(simulate(load, config, step_time).records)


def equal_load(rate: float, *, num_requests: int, prompt: int, output: int) -> OfferedLoad:
    gaps = np.random.default_rng(1).exponential(1.0, num_requests)
    return OfferedLoad(
        name="equal",
        num_prompt_tokens=np.full(num_requests, prompt),
        num_output_tokens=np.full(num_requests, output),
        arrivals=np.cumsum(gaps) / rate,
    )


def print_rates(title: str, rows: Sequence[tuple[str, dict[str, float]]]) -> None:
    names = list(rows[0][1])
    print(f"| {title} | " + " | ".join(names) + " | ratio to " + " | ratio to ".join(names[1:]) + " |")
    print("|---|" + "---:|" * (2 * len(names) - 1))
    for label, found in rows:
        ratios = [f"{found['DistServe'] / found[name]:.2f}" if found[name] else "-" for name in names[1:]]
        print(f"| {label} | " + " | ".join(f"{found[name]:.2f}" for name in names) + " | ", end="")
        print(" | ".join(ratios) + " |")


def distserve(published: Published, num_requests: int, level: float) -> None:
    rows = []
    for tpot in TPOTS:
        found = compare(
            published,
            lambda rate: draw_load(published, rate, num_requests, seed=0),
            slo=(TTFT, tpot),
            level=level,
            is_pair=True,
        )
        rows.append((f"{tpot * 1e3:g} ms", found))
    print_rates("TPOT; goodput per GPU, requests/s", rows)


def motivation(published: Published, num_requests: int, level: float) -> None:
    found = compare(
        published,
        lambda rate: equal_load(rate, num_requests=num_requests, prompt=512, output=64),
        slo=(0.4, 0.04),
        level=level,
        is_pair=False,
    )
    print_rates("512 in, 64 out; goodput per GPU, requests/s", [("TTFT 0.4 s, TPOT 0.04 s", found)])


class Copies:
    """How long copies take, from the question to the answer."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._asked: dict[str, float] = {}

    def __call__(self, event: FleetEvent, now: float, actions: Sequence[FleetAction]) -> None:
        if isinstance(event, Answered) and event.verb is MoveVerb.PULL and event.move in self._asked:
            self.seconds.append(now - self._asked.pop(event.move))
        for each in actions:
            if isinstance(each, MoveStep) and each.verb is MoveVerb.PULL:
                self._asked[each.move] = now


def transfer(published: Published) -> None:
    for name, paper in ((OPT_66B, 1.208e9), (OPT_13B, 0.419e9)):
        precision = Precision(weights="fp16", kv="fp16", compute="fp16")
        num_bytes = 512 * find_model_spec(name).kv_bytes_per_token(precision)
        print(f"{name}: 512 tokens are {num_bytes / 1e9:.3f} GB (paper: {paper / 1e9:.3f})")
    copies = Copies()
    load = draw_load(published, 2.0, 500, seed=0)
    run_distserve(published, load, model=OPT_66B, placement=(4, 1, 2, 2), on_decision=copies)
    times = 1e3 * np.array(copies.seconds)
    print(
        f"OPT-66B, 2 requests/s, NVLink: {len(times)} copies, P50 {np.median(times):.1f}, P95 "
        f"{np.percentile(times, 95):.1f}, longest {times.max():.1f} ms (paper: 95 % below 30 ms)"
    )


# --- Llumnix ------------------------------------------------------------------------------------------


def medium_lengths(num: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw lengths whose logarithm is linear between the paper's quantiles."""
    shares, lengths = zip(*MEDIUM, strict=True)
    drawn = np.exp(np.interp(rng.random(num), shares, np.log(lengths)))
    return np.asarray(np.rint(drawn), dtype=np.int64)


def llumnix_fleet(router: str, *, moves: bool, num_replicas: int = 16) -> Simulation:
    """Return the fleet; its model was made for 4,096 tokens, but the paper's lengths go up to 12,000."""
    settings = make(
        ReplicaSettings,
        model="meta-llama/Llama-2-7b-hf",
        device="a10g",
        replicas=num_replicas,
        num_blocks=13_616 // 16,
        max_num_seqs=256,
        policy="prefill-first",
        enable_prefix_caching=False,
        router=router,
        kv_bandwidth=16e9 / 8 if moves else None,
        max_num_batched_tokens=12_288,
    )
    simulation = build_simulation(settings)
    config = simulation.config
    kinds = tuple(
        replace(each, scheduler=replace(each.scheduler, max_model_len=12_288)) for each in config.kinds
    )
    scheduler = replace(config.scheduler, max_model_len=12_288)
    return replace(simulation, config=replace(config, scheduler=scheduler, kinds=kinds))


def llumnix(num_requests: int, rates: Sequence[float]) -> None:
    print("| requests/s | router | moves | TTFT P50 s | mean | P99 | preempted | TPOT P99 ms | moved |")
    print("|---:|---|---|---:|---:|---:|---:|---:|---:|")
    for rate in rates:
        for router in ("least-outstanding", "slo"):
            for moves in (False, True):
                print_llumnix(num_requests, rate, router, moves=moves)


def print_llumnix(num_requests: int, rate: float, router: str, *, moves: bool) -> None:
    rng = np.random.default_rng(7)
    prompts, outputs = medium_lengths(num_requests, rng), medium_lengths(num_requests, rng)
    load = OfferedLoad(
        name="M-M",
        num_prompt_tokens=prompts,
        num_output_tokens=outputs,
        arrivals=gamma_arrivals(num_requests, rate=rate, burstiness=1 / 16, rng=rng),
    )
    simulation = llumnix_fleet(router, moves=moves)
    result = simulate(load, simulation.config, simulation.step_time)
    times = np.array([record.ttft for record in result.records if record.ttft is not None])
    tpots = np.array([record.tpot for record in result.records if record.tpot is not None])
    preempted = fmean(record.num_preemptions > 0 for record in result.records)
    moved = sum(count for why, count in result.decisions.items() if why.startswith("moved:"))
    cells = (
        *(f"{rate:g}", router, "yes" if moves else "no"),
        *(f"{each:.2f}" for each in (np.median(times), times.mean(), np.percentile(times, 99))),
        *(f"{preempted:.2%}", f"{1e3 * np.percentile(tpots, 99):.0f}", f"{moved}"),
    )
    print(f"| {' | '.join(cells)} |", flush=True)


def print_stops() -> None:
    """Print for how long a stream stands still that leaves a draining replica, by its length."""
    print("| prompt | usual gap ms | gaps of five moves, in usual gaps | mean ms | copies | prefill s |")
    print("|---:|---:|---|---:|---:|---:|")
    for num_tokens in (1000, 2000, 4000, 8000):
        found = [one_stop(num_tokens, 8.0 + 0.11 * number) for number in range(5)]
        gaps, usual = [gap for gap, _, _, _ in found], fmean(gap for _, gap, _, _ in found)
        print(
            f"| {num_tokens:,} | {usual * 1e3:.1f} | {', '.join(f'{gap / usual:.1f}' for gap in gaps)} | "
            f"{fmean(gaps) * 1e3:.1f} | {max(copies for _, _, copies, _ in found)} | {found[0][3]:.2f} |"
        )


def one_stop(num_tokens: int, when: float) -> tuple[float, float, int, float]:
    """Return the gap of a move, the usual one, the copies, and the time of the prompt."""
    simulation = llumnix_fleet("least-outstanding", moves=True, num_replicas=2)
    config = replace(
        simulation.config,
        fleet_changes=(FleetChange(when, "drain", 0),),
        fleet_times=FleetTimes(drain=300.0),
    )
    load = OfferedLoad(
        name="one and others",
        num_prompt_tokens=np.array([num_tokens, 200, 200, 200]),
        num_output_tokens=np.full(4, 800),
        arrivals=np.array([0.0, 0.03, 0.06, 0.1]),
    )
    copies: list[str] = []

    def watch(_event: FleetEvent, _now: float, actions: Sequence[FleetAction]) -> None:
        steps = [each for each in actions if isinstance(each, MoveStep)]
        copies.extend(each.request_id for each in steps if each.verb is MoveVerb.PULL)

    (record, *_) = simulate(load, config, simulation.step_time, on_decision=watch).records
    gaps = [b - a for a, b in pairwise(record.delivery_times)]
    assert record.ttft is not None
    return max(gaps[5:]), median(gaps), copies.count("0"), record.ttft


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=[])
    parser.add_argument("--shared", type=Path, default=os.environ.get("ONBEAT_SHARED"))
    parser.add_argument("--level", type=float, default=90.0, help="of DistServe, %% of the requests")
    parser.add_argument("--num-requests", type=int, default=500, help="of each drawn load")
    parser.add_argument(
        "--rates", type=float, nargs="*", default=[30.0, 60.0, 70.0, 80.0], help="of llumnix, requests/s"
    )
    args = parser.parse_args()
    if args.shared is None:
        parser.error("give --shared, the folder that holds the published data (or set ONBEAT_SHARED)")
    shared = Path(args.shared)
    published = Published(shared)
    parts: dict[str, Callable[[], None]] = {
        "distserve": lambda: distserve(published, args.num_requests, args.level),
        "motivation": lambda: motivation(published, args.num_requests, args.level),
        "transfer": lambda: transfer(published),
        **{name: partial(part, shared) for name, part in SPLITWISE_PARTS.items()},
        "stops": print_stops,
        "llumnix": lambda: llumnix(6 * args.num_requests, args.rates),
    }
    if unknown := set(args.parts) - parts.keys():
        parser.error(f"unknown part {unknown.pop()!r}; there are {', '.join(parts)}")
    for name in args.parts or parts:
        print(f"\n## {name}\n")
        parts[name]()


if __name__ == "__main__":
    main()
