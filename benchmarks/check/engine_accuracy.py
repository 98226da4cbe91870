"""Predicted against published times per output token of vLLM, TensorRT-LLM and SGLang.

    python -m benchmarks.check.engine_accuracy                 # the tables, with the terms of the package
    python -m benchmarks.check.engine_accuracy --fit           # the terms, fitted to one half of the rows
    python -m benchmarks.check.engine_accuracy --extract FILE  # make benchmarks/data/engine_tpot.csv

The rows are the aggregated deployments in `silicon_sample.csv` of aiconfigurator-core 0.12.0 (Apache-2.0,
`pip download aiconfigurator-core==0.12.0`) whose model, device and number formats onbeat knows: end-to-end
measurements of TTFT and TPOT in a closed loop of so many clients. Choices:

* Deployments (engine, model, device, format, TP) are cut into halves: within an engine and format (experts:
  engine and model) they are ordered by TP and the SHA-256 of their name, and dealt out alternately, so that
  both halves have every format. Terms come from half 0; half 1 is held back. A fit the other way round is a
  check, and not used.
* TPOT of a row is a decode step of c requests at their mean context, and what the other c - 1 prompts add to
  it: each joins one step in `output` steps. c is the number of clients, or what KV memory holds. SGLang reads
  waiting prompts before anything else, in the order of arrival, so that half of them fall into others' TTFT.
* A row has the terms of its version; one that does not tell its version, the oldest terms of its engine. All
  dense rows of vLLM are of before 0.14, all of MiniMax-M2.5 newer: the newer terms are the older ones with
  the host time of a row that `engine_versions.py` fits to other data.
* 16-bit KV in SGLang and in vLLM's Qwen rows (their defaults), else the format of the weights.
* Left out: the 21 rows of vLLM with Llama 3.1 8B in FP8, whose clients' rate would take up to all of the data
  sheet's arithmetic (others: at most 53 %); rows of replicated attention; nvfp4, and models with latent or
  linear attention, which onbeat does not know.

"""

from __future__ import annotations

import argparse
import csv
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.check.engine_versions import fit_row_seconds
from benchmarks.harness.pages import REPOSITORY
from onbeat.core.step import BatchShape
from onbeat.perfmodel.device_spec import DeviceSpec, find_device
from onbeat.perfmodel.engines import BOUNDS, ENGINES, EngineTerms, engine_seconds, find_engine
from onbeat.perfmodel.memory import kv_capacity
from onbeat.perfmodel.model_spec import ModelSpec, find_model_spec
from onbeat.perfmodel.parallelism import Parallelism
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.roofline import roofline_seconds
from onbeat.perfmodel.shapes import shape_matrix

Vector = NDArray[np.float64]
Steps = Callable[["Deployment", Vector], Vector]
Terms = Mapping[tuple[str, bool], "EngineTerms"]
"""By engine, and whether they are the older ones."""

ROWS = REPOSITORY / "benchmarks" / "data" / "engine_tpot.csv"
MODELS = {
    "meta-llama/Llama-3.1-70B": "Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "Llama-3.1-8B",
    "Qwen/Qwen3-32B": "Qwen3-32B",
    "Qwen/Qwen3-235B-A22B-FP8": "Qwen3-235B-A22B",
    "MiniMaxAI/MiniMax-M2.5": "MiniMax-M2.5",
}
DEVICES = {"h100_sxm": "h100-sxm", "h200_sxm": "h200", "b200_sxm": "b200"}
BACKENDS = {"vllm": "vllm", "trtllm": "tensorrt-llm", "sglang": "sglang"}
OLDER = {"vllm": "vllm@0.6", "tensorrt-llm": "tensorrt-llm", "sglang": "sglang"}
NEWER_VLLM = (0, 14)
"""From which version on vLLM has the newer terms."""
IMPOSSIBLE = ("vllm", "Llama-3.1-8B")
PROMPTS_MET = {"vllm": 1.0, "tensorrt-llm": 1.0, "sglang": 0.5}
"""Share of the other prompts that a request's decodes wait for."""
DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Row:
    """One published measurement, as in the file; times in milliseconds."""

    model: str
    device: str
    engine: str
    version: str
    weights: str
    tensor: int
    concurrency: int
    input_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True)
class Deployment:
    """What several rows were measured on."""

    engine: str
    model: str
    device: str
    weights: str
    tensor: int
    is_older: bool
    """Whether the rows have the older terms of their engine, where it has two."""

    @property
    def terms(self) -> EngineTerms:
        """Those of the package."""
        return find_engine(OLDER[self.engine] if self.is_older else self.engine)

    def __str__(self) -> str:
        return f"{self.engine} {self.model} {self.device} {self.weights} TP {self.tensor}"

    @property
    def digest(self) -> str:
        return hashlib.sha256(str(self).encode()).hexdigest()

    @cached_property
    def spec(self) -> ModelSpec:
        return find_model_spec(self.model)

    @cached_property
    def device_spec(self) -> DeviceSpec:
        return find_device(self.device)

    @property
    def parallelism(self) -> Parallelism:
        return Parallelism(tensor=self.tensor)

    @property
    def precision(self) -> Precision:
        keeps_kv_wide = self.engine == "sglang" or (self.engine == "vllm" and "Llama" not in self.model)
        return Precision(self.weights, "bf16" if keeps_kv_wide else self.weights, self.weights)


class Case:
    """The rows of one deployment, and the batches that their TPOT is made of."""

    def __init__(self, deployment: Deployment, rows: Sequence[Row]) -> None:
        self.deployment, self.rows = deployment, rows
        self.measured = np.array([row.tpot_ms / 1e3 for row in rows])
        self.weight = np.array([(row.concurrency - 1) / row.output_tokens for row in rows])
        self.weight *= PROMPTS_MET[deployment.engine]
        contexts = [row.input_tokens + row.output_tokens // 2 for row in rows]
        batches = [
            max(1, min(row.concurrency, self._room // context))
            for row, context in zip(rows, contexts, strict=True)
        ]
        self.decodes = shape_matrix(
            BatchShape.of_decodes(batch, batch * context)
            for batch, context in zip(batches, contexts, strict=True)
        )
        self.mixed = shape_matrix(
            _with_prompt(batch - 1, context, row.input_tokens)
            for batch, context, row in zip(batches, contexts, rows, strict=True)
        )

    @property
    def _room(self) -> int:
        """Tokens that KV memory holds, as onbeat reckons."""
        at = self.deployment
        memory = kv_capacity(
            at.spec,
            at.device_spec,
            parallelism=at.parallelism,
            precision=at.precision,
            block_size=16,
            max_num_batched_tokens=8192,
            gpu_memory_utilization=0.9,
        )
        return memory.num_blocks * 16

    def predict(self, steps: Steps) -> Vector:
        """Return the TPOT of each row, seconds."""
        decode = steps(self.deployment, self.decodes)
        return decode + self.weight * (steps(self.deployment, self.mixed) - decode)

    def errors(self, steps: Steps) -> Vector:
        """Return (predicted - measured) / measured of each row."""
        return np.asarray(self.predict(steps) / self.measured - 1)


def _with_prompt(num_decodes: int, context: int, num_tokens: int) -> BatchShape:
    shape = BatchShape.of_decodes(num_decodes, num_decodes * context)
    shape.add(0, num_tokens, samples=True)
    return shape


def data_sheet(at: Deployment, matrix: Vector) -> Vector:
    """Return steps as the roofline has them without terms of an engine."""
    return roofline_seconds(
        matrix, at.spec, at.device_spec, parallelism=at.parallelism, precision=at.precision
    )


def with_terms(terms: EngineTerms) -> Steps:
    """Return the steps of an engine."""

    def steps(at: Deployment, matrix: Vector) -> Vector:
        return engine_seconds(
            matrix, terms, at.spec, at.device_spec, parallelism=at.parallelism, precision=at.precision
        )

    return steps


def of_package(at: Deployment, matrix: Vector) -> Vector:
    """Return steps with the terms that the package has."""
    return with_terms(at.terms)(at, matrix)


def of_fit(found: Terms) -> Steps:
    """Return steps with terms that were fitted."""

    def steps(at: Deployment, matrix: Vector) -> Vector:
        return with_terms(found[at.engine, at.is_older])(at, matrix)

    return steps


# Rows


def extract(source: Path) -> list[Row]:
    """Read the rows that can be predicted out of the published file."""
    rows = []
    with source.open(newline="") as file:
        for cells in csv.DictReader(file):
            tensor = int(cells["tp_size"] or 0)
            shards = int(cells["moe_tp_size"] or 1) * int(cells["moe_ep_size"] or 1)
            model, device = MODELS.get(cells["model_path"]), DEVICES.get(cells["system"])
            if (
                cells["mode"] != "agg"
                or model is None
                or device is None
                or cells["precision"] not in ("fp8", "")
                or (cells["attention_dp_size"] or "1") not in ("0", "1")
                or (find_model_spec(model).is_moe and shards != tensor)
            ):
                continue
            rows.append(
                Row(
                    model=model,
                    device=device,
                    engine=BACKENDS[cells["backend"]],
                    version=cells["backend_version"],
                    weights=cells["precision"] or "bf16",
                    tensor=tensor,
                    concurrency=int(cells["batch_size"]),
                    input_tokens=int(cells["isl"]),
                    output_tokens=int(cells["osl"]),
                    ttft_ms=round(float(cells["silicon_ttft_ms"]), 3),
                    tpot_ms=round(float(cells["silicon_tpot_ms"]), 4),
                )
            )
    return sorted(rows, key=lambda row: tuple(str(value) for value in asdict(row).values()))


def write_rows(rows: Iterable[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(Row))
        writer.writerows(asdict(row).values() for row in rows)


def read_rows(path: Path = ROWS) -> list[Row]:
    with path.open(newline="") as file:
        kinds = {"int": int, "float": float}
        return [
            Row(**{field.name: kinds.get(str(field.type), str)(cells[field.name]) for field in fields(Row)})
            for cells in csv.DictReader(file)
        ]


def cases_of(rows: Iterable[Row]) -> list[Case]:
    """Group rows by deployment, the impossible ones left out."""
    groups: dict[Deployment, list[Row]] = defaultdict(list)
    for row in rows:
        if (row.engine, row.model) != IMPOSSIBLE:
            version = [int(part) for part in re.findall(r"\d+", row.version)[:2]]
            is_older = row.engine != "vllm" or tuple(version) < NEWER_VLLM
            at = Deployment(row.engine, row.model, row.device, row.weights, row.tensor, is_older)
            groups[at].append(row)
    return [Case(deployment, group) for deployment, group in groups.items()]


def halves(cases: Iterable[Case]) -> tuple[list[Case], list[Case]]:
    """Deal the deployments out; see above."""
    strata: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        at = case.deployment
        strata[at.engine, at.model if at.spec.is_moe else at.weights].append(case)
    found: tuple[list[Case], list[Case]] = ([], [])
    for name, stratum in strata.items():
        first = int(hashlib.sha256("".join(name).encode()).hexdigest(), 16) % 2
        ordered = sorted(stratum, key=lambda case: (case.deployment.tensor, case.deployment.digest))
        for index, case in enumerate(ordered):
            found[(index + first) % 2].append(case)
    return found


# Fitting

START = EngineTerms(
    row_seconds=1e-5,
    layer_seconds=8e-6,
    expert_seconds=1e-7,
    all_reduce_seconds=1e-5,
    link_efficiency=0.6,
    gemm_efficiency=0.75,
    narrow_gemm_efficiency=0.75,
    kv_bandwidth_efficiency=0.7,
)
DENSE_TERMS = tuple(name for name in BOUNDS if name != "expert_seconds")
FLOOR = 1e-7
PRIOR_WEIGHT = 0.05
OUTLIER = 0.1


def fit_all(cases: Sequence[Case]) -> dict[tuple[str, bool], EngineTerms]:
    """Fit every engine's terms to its dense models, and then one number for experts to all that have some."""
    found = {}
    for engine in ENGINES:
        own = [case for case in cases if case.deployment.engine == engine]
        found[engine, True] = fit_dense([case for case in own if not case.deployment.spec.is_moe])
    found["vllm", False] = replace(found["vllm", True], row_seconds=fit_row_seconds()[0])
    experts = [case for case in cases if case.deployment.spec.is_moe]

    def with_experts(value: float) -> dict[tuple[str, bool], EngineTerms]:
        return {name: replace(terms, expert_seconds=value) for name, terms in found.items()}

    grid = np.linspace(0, 1e-6, 201)
    losses = [sum(_loss(case.errors(of_fit(with_experts(value)))) for case in experts) for value in grid]
    return with_experts(float(grid[int(np.argmin(losses))]))


def _loss(errors: Vector) -> float:
    return float(np.sum(np.sqrt(1 + (np.log1p(errors) / OUTLIER) ** 2) - 1))


def fit_dense(cases: Sequence[Case]) -> EngineTerms:
    """Robust least squares on the log error, with a weak prior at `START`."""
    start = np.log([getattr(START, name) for name in DENSE_TERMS])
    low = np.log([max(BOUNDS[name][0], FLOOR) for name in DENSE_TERMS])
    high = np.log([BOUNDS[name][1] for name in DENSE_TERMS])
    num_rows = sum(len(case.rows) for case in cases)

    def terms_at(logs: Vector) -> EngineTerms:
        values = np.clip(np.exp(logs), np.exp(low), np.exp(high))
        found: dict[str, Any] = dict(zip(DENSE_TERMS, map(float, values), strict=True))
        return replace(START, **found)

    def residuals(logs: Vector) -> Vector:
        steps = with_terms(terms_at(logs))
        errors = [np.log(case.predict(steps) / case.measured) for case in cases]
        return np.concatenate([*errors, PRIOR_WEIGHT * np.sqrt(num_rows / 100) * (logs - start)])

    found = least_squares(residuals, start, bounds=(low, high), loss="soft_l1", f_scale=OUTLIER)
    return terms_at(found.x)


# Tables


def print_terms(found: Terms) -> None:
    for (engine, is_older), terms in found.items():
        print(f"{engine}:" if is_older else f"{engine}, newer:")
        for name in BOUNDS:
            print(f"  {name}: {getattr(terms, name):.3g}")


Chosen = Callable[[Deployment], bool]


def groups_of(cases: Iterable[Case]) -> list[tuple[str, Chosen]]:
    """Return what rows may have in common, and how to tell: dense models first, then those with experts."""
    at_hand = [case.deployment for case in cases]

    def dense(**wanted: object) -> Chosen:
        return lambda at: not at.spec.is_moe and all(getattr(at, key) == wanted[key] for key in wanted)

    def experts(**wanted: object) -> Chosen:
        return lambda at: at.spec.is_moe and all(getattr(at, key) == wanted[key] for key in wanted)

    groups = [("**dense models**", dense())]
    groups += [(f"TP {tp}", dense(tensor=tp)) for tp in DEGREES]
    for engine in ENGINES:
        groups.append((f"**{engine}**", dense(engine=engine)))
        groups += [(f"{engine}, TP {tp}", dense(engine=engine, tensor=tp)) for tp in DEGREES]
    for key in ("model", "device", "weights"):
        values = sorted({getattr(at, key) for at in at_hand if not at.spec.is_moe})
        groups += [(value, dense(**{key: value})) for value in values]
    groups.append(("**models with experts**", experts()))
    groups += [(f"experts, TP {tp}", experts(tensor=tp)) for tp in DEGREES[1:]]
    pairs = sorted({(at.engine, at.model) for at in at_hand if at.spec.is_moe})
    groups += [(f"{engine}, {model}", experts(engine=engine, model=model)) for engine, model in pairs]
    return groups


def print_accuracy(fitted: Sequence[Case], held: Sequence[Case], swapped: Terms) -> None:
    """Print errors before and after, by what rows have in common."""
    other_way = of_fit(swapped)
    print(
        "| | rows | data sheets | with terms | signed | rows | data sheets | with terms | fitted otherwise |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, chosen in groups_of(chain(fitted, held)):
        test = [case for case in held if chosen(case.deployment)]
        train = [case for case in fitted if chosen(case.deployment)]
        after = _pooled(test, of_package)
        cells = [
            str(len(after)),
            _spread(_pooled(test, data_sheet)),
            _spread(after),
            percent(np.median(after), "+") if len(after) else "-",
            str(sum(len(case.rows) for case in train)),
            *(_spread(_pooled(train, steps)) for steps in (data_sheet, of_package, other_way)),
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def _pooled(cases: Sequence[Case], steps: Steps) -> Vector:
    return np.concatenate([case.errors(steps) for case in cases]) if cases else np.empty(0)


def _spread(errors: Vector) -> str:
    if not len(errors):
        return "-"
    size = np.abs(errors)
    return f"{percent(np.median(size))} / {percent(np.quantile(size, 0.9))}"


def percent(value: float, sign: str = "") -> str:
    return f"{100 * value:{sign}.1f}"


def print_deployments(fitted: Sequence[Case], held: Sequence[Case]) -> None:
    print("| deployment | half | rows | data sheets: median (signed) % | with terms: median (signed) % |")
    print("|---|---|---:|---:|---:|")
    parts = [(case, half) for half, cases in (("fitted", fitted), ("held back", held)) for case in cases]
    for case, half in sorted(parts, key=lambda part: str(part[0].deployment)):
        cells = []
        for steps in (data_sheet, of_package):
            errors = case.errors(steps)
            cells.append(f"{percent(np.median(np.abs(errors)))} ({percent(np.median(errors), '+')})")
        print(f"| {case.deployment} | {half} | {len(case.rows)} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--extract", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.extract:
        write_rows(extract(args.extract), ROWS)
        return
    fitted, held = halves(cases_of(read_rows()))
    if args.fit:
        print_terms(fit_all(fitted))
        return
    swapped = fit_all(held)
    print_accuracy(fitted, held, swapped)
    print()
    print_deployments(fitted, held)


if __name__ == "__main__":
    main()
