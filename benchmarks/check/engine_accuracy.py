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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.check import engine_rows
from benchmarks.check.engine_versions import fit_row_seconds
from onbeat.perfmodel.engines import BOUNDS, ENGINES, EngineTerms
from onbeat.perfmodel.roofline import roofline_seconds

Terms = Mapping[tuple[str, bool], "EngineTerms"]
"""By engine, and whether they are the older ones."""

DEGREES = (1, 2, 4, 8)


def data_sheet(at: engine_rows.Deployment, matrix: engine_rows.Vector) -> engine_rows.Vector:
    """Return steps as the roofline has them without terms of an engine."""
    return roofline_seconds(matrix, at.target)


def with_terms(terms: EngineTerms) -> engine_rows.Steps:
    """Return the steps of an engine."""

    def steps(at: engine_rows.Deployment, matrix: engine_rows.Vector) -> engine_rows.Vector:
        return engine_rows.engine_seconds(matrix, terms, at.target)

    return steps


def of_package(at: engine_rows.Deployment, matrix: engine_rows.Vector) -> engine_rows.Vector:
    """Return steps with the terms that the package has."""
    return with_terms(at.terms)(at, matrix)


def of_fit(found: Terms) -> engine_rows.Steps:
    """Return steps with terms that were fitted."""

    def steps(at: engine_rows.Deployment, matrix: engine_rows.Vector) -> engine_rows.Vector:
        return with_terms(found[at.engine, at.is_older])(at, matrix)

    return steps


# Fitting

START = EngineTerms(
    row_seconds=1e-5,
    layer_ratio=1.0,
    expert_seconds=1e-7,
    all_reduce_seconds=1e-5,
    link_efficiency=0.6,
    gemm_ratio=1.0,
    narrow_gemm_ratio=1.0,
    narrow_weight_ratio=1.0,
    kv_ratio=1.0,
)
DENSE_TERMS = tuple(name for name in BOUNDS if name != "expert_seconds")
FLOOR = 1e-7
PRIOR_WEIGHT = 0.05
OUTLIER = 0.1


def fit_all(cases: Sequence[engine_rows.Case]) -> dict[tuple[str, bool], EngineTerms]:
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


def _loss(errors: engine_rows.Vector) -> float:
    return float(np.sum(np.sqrt(1 + (np.log1p(errors) / OUTLIER) ** 2) - 1))


def fit_dense(cases: Sequence[engine_rows.Case]) -> EngineTerms:
    """Robust least squares on the log error, with a weak prior at `START`."""
    start = np.log([getattr(START, name) for name in DENSE_TERMS])
    low = np.log([max(BOUNDS[name][0], FLOOR) for name in DENSE_TERMS])
    high = np.log([BOUNDS[name][1] for name in DENSE_TERMS])
    num_rows = sum(len(case.rows) for case in cases)

    def terms_at(logs: engine_rows.Vector) -> EngineTerms:
        values = np.clip(np.exp(logs), np.exp(low), np.exp(high))
        found: dict[str, Any] = dict(zip(DENSE_TERMS, map(float, values), strict=True))
        return replace(START, **found)

    def residuals(logs: engine_rows.Vector) -> engine_rows.Vector:
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


Chosen = Callable[[engine_rows.Deployment], bool]


def groups_of(cases: Iterable[engine_rows.Case]) -> list[tuple[str, Chosen]]:
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


def print_accuracy(
    fitted: Sequence[engine_rows.Case], held: Sequence[engine_rows.Case], swapped: Terms
) -> None:
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


def _pooled(cases: Sequence[engine_rows.Case], steps: engine_rows.Steps) -> engine_rows.Vector:
    return np.concatenate([case.errors(steps) for case in cases]) if cases else np.empty(0)


def _spread(errors: engine_rows.Vector) -> str:
    if not len(errors):
        return "-"
    size = np.abs(errors)
    return f"{percent(np.median(size))} / {percent(np.quantile(size, 0.9))}"


def percent(value: float, sign: str = "") -> str:
    return f"{100 * value:{sign}.1f}"


def print_deployments(fitted: Sequence[engine_rows.Case], held: Sequence[engine_rows.Case]) -> None:
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
        engine_rows.write_rows(engine_rows.extract(args.extract), engine_rows.ROWS)
        return
    fitted, held = engine_rows.halves(engine_rows.cases_of(engine_rows.read_rows()))
    if args.fit:
        print_terms(fit_all(fitted))
        return
    swapped = fit_all(held)
    print_accuracy(fitted, held, swapped)
    print()
    print_deployments(fitted, held)


if __name__ == "__main__":
    main()
