"""Published step times of engines, and the deployments that they were measured on."""

from __future__ import annotations

import csv
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.pages import REPOSITORY
from onbeat.core.step import BatchShape
from onbeat.perfmodel.device_spec import DeviceSpec, Parallelism, find_device
from onbeat.perfmodel.engines import EngineTerms, engine_parameters, find_engine
from onbeat.perfmodel.fitted import FitTarget
from onbeat.perfmodel.memory import kv_capacity
from onbeat.perfmodel.model_spec import ModelSpec, find_model_spec
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.roofline import roofline_seconds
from onbeat.perfmodel.shapes import NEW_TOKENS, SEQUENCES, shape_matrix

Vector = NDArray[np.float64]
Steps = Callable[["Deployment", Vector], Vector]


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


def engine_seconds(
    matrix: NDArray[np.float64], engine: EngineTerms, target: FitTarget
) -> NDArray[np.float64]:
    """Return what `make_engine_roofline` says of each row of a shape matrix, seconds [N]."""
    steps = roofline_seconds(matrix, target, engine_parameters(engine, target))
    return np.where(matrix[:, NEW_TOKENS] > 0, steps + engine.row_seconds * matrix[:, SEQUENCES], 0.0)


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

    @property
    def target(self) -> FitTarget:
        """What computes its steps."""
        return FitTarget(
            model=self.spec, device=self.device_spec, parallelism=self.parallelism, precision=self.precision
        )


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
        target = self.deployment.target
        memory = kv_capacity(target, block_size=16, max_num_batched_tokens=8192, gpu_memory_utilization=0.9)
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
