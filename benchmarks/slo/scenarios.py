"""The policy with deadlines in scenarios: below and above capacity, bursts, overload, what it predicts.

    python -m benchmarks.slo.scenarios [--only below above burst overload predictions formulas]
        [--set-up mistral] [--slo 1s-100ms] [--mode stream] [--seeds 5] [--write]

Poisson arrivals with lengths of the Azure conversation trace on one simulated replica. Capacity is the rate
up to which 90 % of a load that lasts are good under the policy itself. The folder of the traces is named by
ONBEAT_SHARED.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

from benchmarks.harness.pages import RESULTS
from benchmarks.slo.slo_study.cells import OBJECTIVES, SET_UPS
from benchmarks.slo.slo_study.formulas import formulas
from benchmarks.slo.slo_study.predictions import accuracy
from benchmarks.slo.slo_study.replica import Stage
from benchmarks.slo.slo_study.scenarios import (
    SUBJECT,
    Finding,
    above_capacity,
    below_capacity,
    burst,
    overload,
)
from onbeat.core.slo import SLO_MODES

SCENARIOS: dict[str, Callable[[Stage, float], Finding]] = {
    "below": below_capacity,
    "above": above_capacity,
    "burst": burst,
    "overload": overload,
    "predictions": accuracy,
    "formulas": formulas,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=tuple(SCENARIOS), default=tuple(SCENARIOS))
    parser.add_argument("--set-up", choices=tuple(SET_UPS), default="mistral")
    parser.add_argument(
        "--slo",
        choices=[name for name in OBJECTIVES if name[0].isdigit() and "-" in name],
        default="1s-100ms",
    )
    parser.add_argument("--mode", choices=SLO_MODES, default="stream")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--capacity", type=float, help="requests/s, instead of a search for it")
    parser.add_argument("--write", action="store_true", help="also into benchmarks/results")
    args = parser.parse_args(argv)
    parts = [f"# Scenarios of the policy with deadlines\n\n{time.strftime('%Y-%m-%d')}."]
    stage = Stage(set_up=args.set_up, slo=args.slo, mode=args.mode, seeds=args.seeds)
    capacity = args.capacity or stage.capacity(SUBJECT)
    parts[0] += (
        f" {args.set_up}, {args.slo}, {args.mode}; Poisson arrivals, lengths of the Azure conversation "
        f"trace, {args.seeds} seeds, 95 % intervals. Capacity (90 % of a load that lasts under `{SUBJECT}`): "
        f"{capacity:.2f} requests/s."
    )
    print(parts[0], flush=True)
    for name in args.only:
        started = time.perf_counter()
        parts.append(SCENARIOS[name](stage, capacity).markdown())
        print(f"\n{parts[-1]}\n({time.perf_counter() - started:.0f} s)", flush=True)
    if args.write:
        path = RESULTS / f"{time.strftime('%Y-%m-%d')}-slo-scenarios.md"
        path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        print(f"written: {path}")


if __name__ == "__main__":
    main()
