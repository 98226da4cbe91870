"""Published results on disaggregation, against simulated fleets.

    python -m benchmarks.papers.fleet_papers --shared DIR [PART ...]

DIR (or ONBEAT_SHARED) has `data/profiles/{distserve,splitwise}` and `data/groundtruth/distserve`. The parts:

* `distserve` (Zhong et al., OSDI 2024, section 6.2): goodput per GPU of OPT-13B, ShareGPT lengths scaled to
  the paper's means, placement (2,1,1,1) with its own coefficients and pool rule `distserve`, against one
  colocated GPU: vLLM as measured (prefill first), and the same coefficients as DistServe's under
  prefill-first, sarathi and `slo`. 90 % (`--level`) must meet TTFT 0.25 s and TPOT 0.1 s, and tighter TPOTs.
* `measured`: the authors' own runs of both on A100, as released: who met TTFT 0.25 s and these TPOTs.
* `placements`: the same loads and coefficients on other numbers of GPUs for prompts and for generation.
* `steps`: what steps take by the coefficients of both engines, on one GPU.
* `motivation` (its figure 1): prompts of 512 and outputs of 64 tokens, TTFT 0.4 s, TPOT 0.04 s; two prefill
  GPUs and one that generates, against one that does both.
* `transfer` (its section 6.3): bytes of 512 tokens, and how long copies take over NVLink.
* `power`, `equal-power`, `partitions`, `pools` (Splitwise, Patel et al., ISCA 2024): what its table says of
  H100 whose power is capped; fleets of equal power; the partition for another load; and how many of 40
  machines are for prompts (`splitwise_fleets.py`).

Llumnix (Sun et al., OSDI 2024) is in `llumnix_fleets.py`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.papers.distserve_replay import (
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
from benchmarks.papers.splitwise_fleets import SPLITWISE_PARTS
from onbeat.core.fleet import PoolSizes
from onbeat.core.handover import MoveVerb
from onbeat.core.slo import SLO
from onbeat.core.step import BatchShape
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.precision import Precision
from onbeat.scheduler.cluster.events import Answered, FleetAction, FleetEvent, MoveStep
from onbeat.scheduler.cluster.fleet_config import FleetConfig
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import KVLink, ReplicaKind, SimulationConfig
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass

TTFT = 0.25
TPOTS = (0.1, 0.075, 0.06, 0.05)


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


def run_colocated(
    published: Published, load: OfferedLoad, policy: str, *, tpot: float, tensor: int = 1
) -> Latencies:
    """Simulate one instance that does both, with DistServe's own coefficients."""
    scheduler = scheduler_config(policy, published.kv_tokens(OPT_13B, tensor=tensor), tokens=2048, seqs=256)
    classes = (SLOClass(name="all", slo=SLO(ttft=TTFT, tbt=tpot)),)
    load = replace(load, classes=classes, class_ids=np.zeros(len(load), dtype=np.int64))
    step_time = published.step_time("distserve", OPT_13B, tensor=tensor)
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
        return share(run_pools(published, make_load(rate), (2, 1)))

    found = {"DistServe": goodput(apart, 4.0, level) / 3}
    name = "vLLM, its own coefficients"
    found[name] = goodput(lambda rate: share(run_vllm(published, make_load(rate))), 1.5, level)
    for policy in ("prefill-first", "sarathi", "slo"):

        def alone(rate: float, policy: str = policy) -> float:
            return share(run_colocated(published, make_load(rate), policy, tpot=slo[1]))

        found[policy] = goodput(alone, 1.5, level)
    return found


def run_pools(published: Published, load: OfferedLoad, sizes: tuple[int, int]) -> Latencies:
    """Simulate so many GPUs for prompts and so many that generate, each alone."""
    kv_tokens = published.kv_tokens(OPT_13B, tensor=1)
    step_time = published.step_time("distserve", OPT_13B, tensor=1)
    prefill = scheduler_config("hybrid-only", kv_tokens, tokens=2048, seqs=1024)
    decode = scheduler_config("hybrid-only", kv_tokens, tokens=65_536, seqs=1024)
    num_prefill, num_decode = sizes
    config = SimulationConfig(
        scheduler=prefill,
        fleet=FleetConfig(
            disaggregate=PoolSizes(prefill=num_prefill, decode=num_decode),
            pool_rule="distserve",
            router="least-outstanding",
        ),
        kinds=(
            *(ReplicaKind(scheduler=prefill, step_time=step_time),) * num_prefill,
            *(ReplicaKind(scheduler=decode, step_time=step_time),) * num_decode,
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


PLACEMENTS = ((1, 1), (2, 1), (3, 2))
"""GPUs for prompts, and that generate; each has the whole model."""


def placements(published: Published, num_requests: int, level: float, ttft: float) -> None:
    """Print the goodput per GPU of several placements, and of instances that do both.

    Each has so many requests for each of its GPUs: what comes in the seconds before the first streams end
    is carried by any number of them.
    """
    apart = [f"{prompts} + {tokens}" for prompts, tokens in PLACEMENTS]
    names = [
        "TP 2 + 1",
        *apart,
        "both, prefill-first, TP 1",
        "TP 2",
        "both, vLLM's coefficients, TP 1",
        "TP 2",
    ]
    print(f"| TPOT; goodput per GPU, requests/s | {' | '.join(names)} |")
    print("|---|" + "---:|" * len(names))
    for tpot in TPOTS:
        systems: list[tuple[Callable[[OfferedLoad], Latencies], int]] = [
            (partial(run_distserve, published), 3),
            *((partial(run_pools, published, sizes=each), sum(each)) for each in PLACEMENTS),
            *(
                (partial(run_colocated, published, policy="prefill-first", tpot=tpot, tensor=each), each)
                for each in (1, 2)
            ),
            *((partial(run_vllm, published, tensor=each), each) for each in (1, 2)),
        ]
        rates = []
        for run, num_gpus in systems:

            def attained(
                rate: float,
                run: Callable[[OfferedLoad], Latencies] = run,
                tpot: float = tpot,
                num: int = num_requests * num_gpus,
            ) -> float:
                return run(draw_load(published, rate, num, seed=0)).attainment(ttft, tpot)

            rates.append(goodput(attained, 1.5 * num_gpus, level) / num_gpus)
        print(f"| {tpot * 1e3:g} ms | " + " | ".join(f"{rate:.2f}" for rate in rates) + " |", flush=True)


def steps(published: Published) -> None:
    """Print what steps take by each engine's own coefficients, and how many prompts are late alone."""
    lengths = draw_load(published, 1.0, 5000, seed=0).num_prompt_tokens.tolist()
    shapes = {f"prompt of {num}": _prompt(num) for num in (128, 512, 755, 2000)}
    shapes |= {f"{num} decodes of 850": BatchShape.of_decodes(num, 850 * num) for num in (1, 32, 64, 128)}
    print(f"| ms | {' | '.join(shapes)} | prompts that take over {TTFT:g} s alone | over 0.2 s |")
    print("|---|" + "---:|" * (len(shapes) + 2))
    for engine, tensor in (("vllm", 1), ("distserve", 1), ("distserve", 2)):
        step_time = published.step_time(engine, OPT_13B, tensor=tensor)
        cells = " | ".join(f"{1e3 * step_time.step_time(shape):.0f}" for shape in shapes.values())
        alone = np.array([step_time.step_time(_prompt(each)) for each in lengths])
        late = " | ".join(f"{np.mean(alone > limit):.1%}" for limit in (TTFT, 0.2))
        print(f"| {engine}, TP {tensor} | {cells} | {late} |")


def _prompt(num_tokens: int) -> BatchShape:
    shape = BatchShape()
    shape.add(0, num_tokens, samples=True)
    return shape


MEASURED = (
    *((f"vllm-{each}", 1) for each in ("100-1", "150-1.5", "200-2", "350-3.5", "400-4")),
    *((f"distserve-c21d11-{each}", 3) for each in ("300-3", "450-4.5", "1050-10.5", "1200-12")),
    *((f"distserve-c21d12-{each}", 4) for each in ("400-4", "600-6", "1000-10")),
)
"""Names of released runs, the longest of each rate, and their GPUs."""


def measured(published: Published) -> None:
    """Print who met the objectives in the authors' runs."""
    print(f"| run | requests/s per GPU | {' | '.join(f'{each * 1e3:g} ms' for each in TPOTS)} |")
    print("|---|---:|" + "---:|" * len(TPOTS))
    for name, num_gpus in MEASURED:
        latencies = published.run(name).latencies
        rate = float(name.rsplit("-", 1)[1]) / num_gpus
        cells = " | ".join(f"{latencies.attainment(TTFT, tpot):.1f} %" for tpot in TPOTS)
        print(f"| {name} | {rate:.2f} | {cells} |")


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=[])
    parser.add_argument("--shared", type=Path, default=os.environ.get("ONBEAT_SHARED"))
    parser.add_argument("--level", type=float, default=90.0, help="of DistServe, %% of the requests")
    parser.add_argument("--ttft", type=float, default=TTFT, help="of `placements`, seconds")
    parser.add_argument("--num-requests", type=int, default=500, help="of each drawn load")
    args = parser.parse_args()
    if args.shared is None:
        parser.error("give --shared, the folder that holds the published data (or set ONBEAT_SHARED)")
    shared = Path(args.shared)
    published = Published(shared)
    parts: dict[str, Callable[[], None]] = {
        "distserve": lambda: distserve(published, args.num_requests, args.level),
        "measured": lambda: measured(published),
        "placements": lambda: placements(published, args.num_requests, args.level, args.ttft),
        "steps": lambda: steps(published),
        "motivation": lambda: motivation(published, args.num_requests, args.level),
        "transfer": lambda: transfer(published),
        **{name: partial(part, shared) for name, part in SPLITWISE_PARTS.items()},
    }
    if unknown := set(args.parts) - parts.keys():
        parser.error(f"unknown part {unknown.pop()!r}; there are {', '.join(parts)}")
    for name in args.parts or parts:
        print(f"\n## {name}\n")
        parts[name]()


if __name__ == "__main__":
    main()
