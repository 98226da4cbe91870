"""DistServe's measured runs against the simulator: the recorded issue times and lengths, replayed.

    python -m benchmarks.papers.distserve_replay --shared DIR [--paper]

DIR holds the released data of DistServe (Zhong et al., OSDI 2024; LLMServe/DistServe) under
`data/groundtruth/distserve` and `data/profiles/distserve`. Step times come from the coefficients of its
main branch, `profiler-a100-80g.{distserve,vllm}.json`, with the engine overhead of its simulator (2 ms and
0.1 us a token of context, each step). A request is good with TTFT <= 200 ms and TPOT <= 100 ms, both.

Choices, each from the released evaluation scripts unless it says otherwise:

* vLLM: policy prefill-first, 16,384 tokens and 1,024 requests a step; KV capacity from `max_num_tokens.csv`.
* DistServe (`--pool-rule distserve`), prefill: whole prompts in order of arrival, at most 8,192 tokens a step
  (`hybrid-only` on a replica that has no decodes; its limit of 128 prompts a step never binds, and streams
  that wait for room keep their slots here, so there are 1,024). Decode: every running request each step, at
  most 1,024 (`hybrid-only`); KV room for the tokens that are there, pulled over NVLink (300 GB/s); when the
  room runs out, the last comer is preempted and computes its KV again (DistServe swaps it).
* Placement c21d11: prefill on two GPUs (TP 2), decode on one, with the KV that the memory table gives each.
  The 50,000 in the authors' simulator (`decode_max_tokens`) are the most tokens of one decode iteration, in
  which each request has one: no limit that these runs come to, and none on the KV that is held.

Of the runs named c21d12 nobody says what the placement is. They are replayed with the readings that its name
allows, four GPUs of which two generate: in two pipeline stages (PP 2), and sharing each layer (TP 2); and
PP 2 with decode steps that take longer than by the coefficients (`--only c21d12` runs these alone).

`--paper` adds OPT-66B of the paper's table 2, with drawn arrivals.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.linear import linear_closure
from onbeat.core.fleet import PoolSizes
from onbeat.metrics.record import RequestRecord
from onbeat.perfmodel.predictor import Predictor
from onbeat.scheduler.cluster.fleet_config import FleetConfig
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import KVLink, ReplicaKind, SimulationConfig
from onbeat.workload.offered import OfferedLoad

OPT_13B, OPT_66B = "facebook/opt-13b", "facebook/opt-66b"
KV_BYTES_PER_TOKEN = {OPT_13B: 2 * 40 * 5120 * 2, OPT_66B: 2 * 64 * 9216 * 2}
NVLINK_BYTES_PER_SECOND = 300e9
CONTEXT = 2048
BLOCK_SIZE = 16
TTFT, TPOT = 0.2, 0.1
"""Objectives of OPT-13B, seconds."""


@dataclass(frozen=True)
class Latencies:
    """Of the requests of one run, seconds."""

    ttft: NDArray[np.float64]
    tpot: NDArray[np.float64]

    def attainment(self, ttft: float = TTFT, tpot: float = TPOT) -> float:
        """Return the percentage of requests that meet both objectives."""
        return 100.0 * float(np.mean((self.ttft <= ttft) & (self.tpot <= tpot)))

    @property
    def ttft_p50(self) -> float:
        return float(np.median(self.ttft))

    @property
    def tpot_p50(self) -> float:
        return float(np.median(self.tpot))


@dataclass(frozen=True)
class MeasuredRun:
    """One run on real GPUs."""

    load: OfferedLoad
    latencies: Latencies


class Published:
    """The released measurements and coefficients."""

    def __init__(self, shared: Path) -> None:
        self.profiles = shared / "data" / "profiles" / "distserve"
        path = shared / "data" / "groundtruth" / "distserve" / "opt13b_sharegpt_measured_requests.csv.gz"
        self._rows: dict[str, list[dict[str, str]]] = {}
        with gzip.open(path, "rt", newline="") as file:
            for row in csv.DictReader(file):
                self._rows.setdefault(row["run"], []).append(row)

    def run(self, name: str) -> MeasuredRun:
        """Return a run in order of its issue times."""
        rows = sorted(self._rows[name], key=lambda row: float(row["issue_time_s"]))

        def column(key: str) -> NDArray[np.float64]:
            return np.array([float(row[key]) for row in rows])

        load = OfferedLoad(
            name=name,
            num_prompt_tokens=column("prompt_len").astype(np.int64),
            num_output_tokens=column("output_len").astype(np.int64),
            arrivals=column("issue_time_s") - column("issue_time_s")[0],
        )
        return MeasuredRun(load, Latencies(column("ttft_ms") / 1e3, column("tpot_ms") / 1e3))

    def step_time(
        self, engine: str, model: str, *, tensor: int, pipeline: int = 1, slower: float = 1.0
    ) -> Predictor:
        """Return step times by the coefficients, or so many times as long."""
        path = self.profiles / f"profiler-a100-80g.{engine}.json"
        seconds = linear_closure(path, model=model, tensor=tensor, pipeline=pipeline)
        return Predictor(seconds if slower == 1.0 else lambda shape: slower * seconds(shape))

    def kv_tokens(self, model: str, *, tensor: int, pipeline: int = 1) -> int:
        """Return the KV capacity that was measured on A100-80G."""
        key = (model, str(tensor), str(pipeline))
        with (self.profiles / "max_num_tokens.csv").open(newline="") as file:
            sizes = {(row["model"], row["tp"], row["pp"]): row for row in csv.DictReader(file)}
        return int(sizes[key]["max_num_tokens"])


def scheduler_config(
    policy: str, kv_tokens: int, *, tokens: int, seqs: int, stages: int = 1
) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=kv_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_model_len=CONTEXT,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        policy=policy,
        enable_prefix_caching=False,
        num_micro_batches=stages,
    )


def run_vllm(published: Published, load: OfferedLoad, *, model: str = OPT_13B, tensor: int = 1) -> Latencies:
    """Simulate one colocated instance."""
    kv_tokens = published.kv_tokens(model, tensor=tensor)
    config = SimulationConfig(
        scheduler=scheduler_config("prefill-first", kv_tokens, tokens=16_384, seqs=1024)
    )
    return latencies_of(simulate(load, config, published.step_time("vllm", model, tensor=tensor)).records)


def run_distserve(
    published: Published,
    load: OfferedLoad,
    *,
    model: str = OPT_13B,
    placement: tuple[int, int, int, int] = (2, 1, 1, 1),
    slower_decodes: float = 1.0,
) -> Latencies:
    """Simulate one prefill and one decode instance; the placement is (prefill TP, PP, decode TP, PP)."""
    prefill_tp, prefill_pp, decode_tp, decode_pp = placement
    prefill = scheduler_config(
        "hybrid-only",
        published.kv_tokens(model, tensor=prefill_tp, pipeline=prefill_pp),
        tokens=8192,
        seqs=1024,
        stages=prefill_pp,
    )
    decode = scheduler_config(
        "hybrid-only",
        published.kv_tokens(model, tensor=decode_tp, pipeline=decode_pp),
        tokens=65_536,
        seqs=1024,
        stages=decode_pp,
    )
    prefill_time = published.step_time("distserve", model, tensor=prefill_tp, pipeline=prefill_pp)
    decode_time = published.step_time(
        "distserve", model, tensor=decode_tp, pipeline=decode_pp, slower=slower_decodes
    )
    config = SimulationConfig(
        scheduler=prefill,
        fleet=FleetConfig(
            disaggregate=PoolSizes(prefill=1, decode=1), pool_rule="distserve", router="least-outstanding"
        ),
        kinds=(
            ReplicaKind(scheduler=prefill, step_time=prefill_time),
            ReplicaKind(scheduler=decode, step_time=decode_time),
        ),
        kv_link=KVLink(bytes_per_token=KV_BYTES_PER_TOKEN[model], bandwidth=NVLINK_BYTES_PER_SECOND),
    )
    return latencies_of(simulate(load, config, prefill_time).records)


def latencies_of(records: Iterable[RequestRecord]) -> Latencies:
    """Return TTFT and TPOT; a single token has no interval to miss."""
    pairs = [(record.ttft, record.tpot or 0.0) for record in records]
    return Latencies(np.array([ttft for ttft, _ in pairs]), np.array([tpot for _, tpot in pairs]))


def draw_load(published: Published, rate: float, num_requests: int, *, seed: int) -> OfferedLoad:
    """Draw Poisson arrivals, and lengths of the recorded ShareGPT requests scaled to the paper's means."""
    recorded = published.run("distserve-c21d12-1600-16").load
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, len(recorded), num_requests)

    def scaled(lengths: NDArray[np.int64], mean: float) -> NDArray[np.int64]:
        wanted = np.rint(lengths[rows] * (mean / float(lengths.mean())))
        return np.asarray(np.maximum(wanted, 1), dtype=np.int64)

    prompts = np.minimum(scaled(recorded.num_prompt_tokens, 755.5), CONTEXT - 1)
    outputs = np.minimum(scaled(recorded.num_output_tokens, 200.3), CONTEXT - prompts)
    arrivals = np.cumsum(rng.exponential(1 / rate, num_requests))
    return OfferedLoad(
        name=f"{rate:g} req/s", num_prompt_tokens=prompts, num_output_tokens=outputs, arrivals=arrivals
    )


def crossing(rates: Sequence[float], attainments: Sequence[float], level: float = 90.0) -> float | None:
    """Return the rate at which attainment falls below a level (linear between points), if it does."""
    for (rate, high), (next_rate, low) in pairwise(zip(rates, attainments, strict=True)):
        if high >= level > low:
            return rate + (high - level) / (high - low) * (next_rate - rate)
    return None


@dataclass(frozen=True)
class PaperCase:
    """A system of the paper's table 2: measured attainment by rate."""

    name: str
    measured: dict[float, float]


VLLM_66B = PaperCase(
    "vLLM, TP 4", {1.0: 97.0, 1.5: 65.5, 2.0: 52.8, 2.5: 44.9, 3.0: 36.7, 3.5: 27.8, 4.0: 23.6}
)
DISTSERVE_66B = PaperCase("DistServe-Low (4,1,2,2)", {1.0: 100.0, 1.5: 100.0, 2.0: 99.3, 2.5: 87.3})


def simulate_66b(
    published: Published, case: PaperCase, rates: Sequence[float], *, num_requests: int, seeds: int
) -> list[Latencies]:
    """Simulate a system at several rates, the requests of all seeds together."""
    found = []
    for rate in rates:
        runs = []
        for seed in range(seeds):
            load = draw_load(published, rate, num_requests, seed=seed)
            if case is VLLM_66B:
                runs.append(run_vllm(published, load, model=OPT_66B, tensor=4))
            else:
                runs.append(run_distserve(published, load, model=OPT_66B, placement=(4, 1, 2, 2)))
        found.append(
            Latencies(np.concatenate([run.ttft for run in runs]), np.concatenate([run.tpot for run in runs]))
        )
    return found


def print_row(run: str, rule: str, measured: Latencies, simulated: Latencies) -> None:
    cells = [f"{measured.attainment():.1f}", f"{simulated.attainment():.1f}"]
    cells.append(f"{simulated.attainment() - measured.attainment():+.1f}")
    for name in ("ttft_p50", "tpot_p50"):
        before, after = getattr(measured, name), getattr(simulated, name)
        cells += [f"{before * 1e3:.1f}", f"{after * 1e3:.1f}", f"{100 * (after / before - 1):+.1f} %"]
    print(f"| {run} | {rule} | " + " | ".join(cells) + " |")


def print_head() -> None:
    print(
        "| run (requests, req/s) | rule | attained % | simulated | pp | TTFT P50 ms | simulated | error "
        "| TPOT P50 ms | simulated | error |"
    )
    print("|---|---|" + "---:|" * 9)


def print_13b(published: Published) -> None:
    print_head()
    for suffix in ("300-3", "300-4.5", "450-4.5", "300-10.5", "300-12", "1050-10.5", "1200-12"):
        run = published.run(f"distserve-c21d11-{suffix}")
        simulated = run_distserve(published, run.load)
        print_row(f"DistServe c21d11 {suffix}", "distserve", run.latencies, simulated)
    for suffix in ("100-1", "150-1.5", "100-2", "200-2", "350-3.5", "400-4"):
        run = published.run(f"vllm-{suffix}")
        print_row(f"vLLM {suffix}", "prefill-first", run.latencies, run_vllm(published, run.load))


def print_two_stages(published: Published) -> None:
    """Print the runs of an unknown placement under several readings of it."""
    print_head()
    readings = (
        *(("PP 2", (2, 1, 1, 2), slower) for slower in (1.0, 1.25, 1.34)),
        ("TP 2", (2, 1, 2, 1), 1.0),
        ("one GPU", (2, 1, 1, 1), 1.0),
    )
    for name, placement, slower in readings:
        reading = name if slower == 1.0 else f"{name}, steps x {slower:g}"
        for suffix in ("400-4", "600-6", "1000-10", "1200-12", "1400-14", "1600-16"):
            run = published.run(f"distserve-c21d12-{suffix}")
            simulated = run_distserve(published, run.load, placement=placement, slower_decodes=slower)
            print_row(f"c21d12 {suffix}", reading, run.latencies, simulated)


def print_66b(published: Published, *, num_requests: int, seeds: int) -> None:
    """Print table 2 under both versions of the paper's objectives; rates are per instance, not per GPU."""
    objectives = ((0.4, 0.1), (2.5, 0.1), (2.5, 0.15))
    rates = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
    for case in (VLLM_66B, DISTSERVE_66B):
        names = " | ".join(f"{ttft:g} s, {tpot:g} s" for ttft, tpot in objectives)
        print(f"\n| {case.name}: req/s | measured % | {names} |")
        print("|---:|---:|" + "---:|" * len(objectives))
        found = simulate_66b(published, case, rates, num_requests=num_requests, seeds=seeds)
        attained = [[each.attainment(*slo) for slo in objectives] for each in found]
        for rate, values in zip(rates, attained, strict=True):
            cells = " | ".join(f"{value:.1f}" for value in values)
            print(f"| {rate:g} | {case.measured.get(rate, '')} | {cells} |")
        ends = [crossing(list(case.measured), list(case.measured.values()))]
        ends += [crossing(rates, [values[i] for values in attained]) for i in range(len(objectives))]
        print("| 90 % at | " + " | ".join("-" if end is None else f"{end:.2f}" for end in ends) + " |")


def main() -> None:
    import benchmarks.policies.register  # noqa: F401 - not where a test imports this file

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=os.environ.get("ONBEAT_SHARED"))
    parser.add_argument("--only", choices=("c21d12",), help="these runs alone")
    parser.add_argument("--paper", action="store_true", help="also OPT-66B of the paper's table 2")
    parser.add_argument("--num-requests", type=int, default=1000, help="of each drawn load")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    if args.shared is None:
        parser.error("give --shared, the folder that holds the published data (or set ONBEAT_SHARED)")
    published = Published(Path(args.shared))
    if args.only is None:
        print_13b(published)
        print()
    print_two_stages(published)
    if args.paper:
        print_66b(published, num_requests=args.num_requests, seeds=args.seeds)


if __name__ == "__main__":
    main()
