"""What each idea of the policy is worth: capacities of variants that leave it out."""

from __future__ import annotations

from collections.abc import Sequence

from onbeat.planner.parallel import run_tasks
from slo_study.analysis import collect
from slo_study.cells import Cell
from slo_study.report import ALL_SHARES, SUBJECT, show_ratio, table
from slo_study.scenarios import Finding
from slo_study.store import Store
from slo_study.tasks import Plan, make_tasks, run_task
from slo_study.variants import VARIANTS

CELLS = (
    Cell("mistral", "azure-conv", "1s-50ms", "gap"),
    Cell("llama", "azure-code", "1s-100ms", "stream"),
    Cell("mistral", "poisson", "mix", "stream"),
)


def ablation(plan: Plan, *, jobs: int) -> Finding:
    """Search what is missing and show all variants beside the policy itself."""
    store = Store(plan.results)
    tasks = make_tasks(plan, store.read())

    def on_event(_index: int, lines: Sequence[object]) -> None:
        store.append(lines)  # type: ignore[arg-type]
        for line in lines:
            print(line.cell, line.policy, line.seed, line.capacity, flush=True)  # type: ignore[attr-defined]

    run_tasks(run_task, tasks, jobs=jobs, on_event=on_event)
    wanted = [SUBJECT, *VARIANTS]
    lines = [line for line in store.read() if line.policy in wanted and line.cell in plan.cells]
    rows = [[name] for name in wanted]
    header = ["policy"]
    for share in ALL_SHARES:
        for cell in collect(lines, share, tag=plan.tag or None):
            header += [f"{cell.cell}, {float(share) * 100:g} %", f"over `{SUBJECT}`"]
            for row, name in zip(rows, wanted, strict=True):
                interval = cell.interval(name)
                row.append("-" if interval is None else f"{interval.mean:.2f}")
                row.append(show_ratio(cell.ratio(name, SUBJECT)))
    return Finding(title="Ablation", text=table(header, rows), claims=())
