"""The tables of the study, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite

from onbeat.core.slo import SLO_MODES
from onbeat.planner.paired import Interval, geometric_mean
from slo_study.analysis import CellResults, Ratio, best_everywhere, collect, mean_ratio
from slo_study.cells import BOUND, STATIC_POLICIES, WORKLOADS
from slo_study.store import Line
from slo_study.tasks import SHARES

SUBJECT = "slo"
OTHERS = ("niyama", "fastserve")
EDF_BUDGETS = ("edf-256", "edf-512", "edf-1024", "edf-2048")
"""With one objective for all, the order by deadlines is that of the arrivals, and edf is sarathi."""
GROUPS = {"one objective for all": lambda slo: slo != "mix", "class mix": lambda slo: slo == "mix"}
ALL_SHARES = tuple(f"{share:g}" for share in SHARES)


class Study:
    """All cells at all shares, and the one hand-tuned policy that is best over those that bind."""

    def __init__(self, lines: Sequence[Line], *, tag: str | None = None) -> None:
        self.cells = {share: collect(lines, share, tag=tag) for share in ALL_SHARES}
        binding = [cell for cells in self.cells.values() for cell in cells if cell.binds]
        self.one_static = best_everywhere(binding)

    def rivals(self, cell: CellResults) -> dict[str, str | None]:
        """Return column -> policy that the subject is compared with."""
        named: dict[str, str | None] = {
            "best static of the cell": cell.best_static(),
            "one static": self.one_static,
        }
        edf = cell.best_of(EDF_BUDGETS) if cell.cell.slo == "mix" else None
        if edf is not None:
            named["best edf of the cell"] = edf
        return named | {name: name for name in OTHERS if name in cell.policies}


def markdown(study: Study, note: str) -> str:
    """Return the whole report."""
    parts = ["# Capacity within latency objectives: the study", note, *_summary(study)]
    for share in ALL_SHARES:
        cells = study.cells[share]
        percent = f"{float(share) * 100:g} %"
        parts += [f"## Ratios at {percent}", *_ratios(study, cells)]
        parts += [f"## Capacities at {percent}, requests/s", *_capacities(cells)]
    return "\n\n".join(parts) + "\n"


def _summary(study: Study) -> Iterator[str]:
    yield (
        f"## `{SUBJECT}` against the others\n\nGeometric means over the cells that bind (number of cells in "
        f"brackets). The one static setting that is best over all of them is `{study.one_static}`."
    )
    columns = [f"{group}, {float(share) * 100:g} %" for group in GROUPS for share in ALL_SHARES]
    names = dict.fromkeys(
        name for cells in study.cells.values() for cell in cells for name in study.rivals(cell)
    )
    rows = [[name, *(_mean_over(study, name, group, share) for group in GROUPS for share in ALL_SHARES)]
            for name in names]  # fmt: skip
    for sustained in (False, True):
        label = "bound for ever longer loads" if sustained else "bound of these very requests"
        rows.append(
            [label, *(_closeness(study, group, share, sustained=sustained)
                      for group in GROUPS for share in ALL_SHARES)]
        )  # fmt: skip
    yield table([f"`{SUBJECT}` against", *columns], rows)
    yield "Of the bound of these very requests, by workload and mode, one objective for all:"
    yield table(["workload, mode", *(f"{float(share) * 100:g} %" for share in ALL_SHARES)],
                [*_closeness_by_mode(study)])  # fmt: skip
    worse = [
        f"{cell.cell} at {share} against {name} ({show_ratio(ratio)})"
        for share, cells in study.cells.items()
        for cell in cells
        for name, other in study.rivals(cell).items()
        if other and (ratio := cell.ratio(SUBJECT, other)).is_regression
    ]
    yield "Cells whose interval lies wholly below 0.98: " + ("; ".join(worse) if worse else "none") + "."
    above = [
        f"{line.cell} {line.policy} seed {line.seed} at {share}"
        for share, cells in study.cells.items()
        for cell in cells
        for line in cell.above_bound()
    ]
    yield "Runs above the bound: " + ("; ".join(above) if above else "none") + "."


def _chosen(study: Study, group: str, share: str) -> list[CellResults]:
    return [cell for cell in study.cells[share] if cell.binds and GROUPS[group](cell.cell.slo)]


def _mean_over(study: Study, name: str, group: str, share: str) -> str:
    ratios = []
    for cell in _chosen(study, group, share):
        other = study.rivals(cell).get(name)
        if other is not None:
            ratios.append(cell.ratio(SUBJECT, other))
    mean, count = mean_ratio(ratios)
    return f"{mean:.2f}x ({count})" if count else "-"


def _closeness(study: Study, group: str, share: str, *, sustained: bool) -> str:
    shares = [cell.closeness(SUBJECT, sustained=sustained) for cell in _chosen(study, group, share)]
    found = [each for each in shares if each is not None]
    return f"{geometric_mean(found):.2f}x ({len(found)})" if found else "-"


def _closeness_by_mode(study: Study) -> Iterator[list[str]]:
    group = next(iter(GROUPS))
    for workload in WORKLOADS:
        for mode in SLO_MODES:
            row = []
            for share in ALL_SHARES:
                cells = [
                    cell
                    for cell in _chosen(study, group, share)
                    if (cell.cell.workload, cell.cell.mode) == (workload, mode)
                ]
                found = [each for cell in cells if (each := cell.closeness(SUBJECT, sustained=False))]
                row.append(f"{geometric_mean(found):.2f}x ({len(found)})" if found else "-")
            yield [f"{workload} {mode}", *row]


def _ratios(study: Study, cells: Sequence[CellResults]) -> Iterator[str]:
    names = dict.fromkeys(name for cell in cells for name in study.rivals(cell))
    rows = []
    for cell in cells:
        rivals = study.rivals(cell)
        shown = [
            f"{show_ratio(cell.ratio(SUBJECT, other))}{f' ({other})' if name.startswith('best') else ''}"
            if (other := rivals.get(name))
            else "-"
            for name in names
        ]
        closeness = [cell.closeness(SUBJECT, sustained=sustained) for sustained in (False, True)]
        bounds = ["-" if each is None else f"{each:.2f}" for each in closeness]
        rows.append([str(cell.cell), _binding(cell), *shown, *bounds])
    yield table(["cell", "binds", *names, "of the bound", "of the sustained bound"], rows)


def _capacities(cells: Sequence[CellResults]) -> Iterator[str]:
    known = [BOUND, *STATIC_POLICIES, SUBJECT, *OTHERS]
    present = {name for cell in cells for name in cell.policies}
    policies = [name for name in known if name in present] + sorted(present - set(known))
    rows = []
    for cell in cells:
        line = cell.any_line()
        seeds = max(len(cell.lines(name)) for name in policies)
        lines = max((cell.lines(name) for name in policies), key=len)
        hopeless = sum(each.num_hopeless for each in lines) / len(lines)
        skipped = sum(each.num_skipped for each in lines) / len(lines)
        own = len(cell.lines(SUBJECT))
        rows.append(
            [str(cell.cell), str(seeds) if own == seeds else f"{seeds} ({SUBJECT} {own})",
             f"{line.num_requests + line.num_skipped}", f"{hopeless:.0f}", f"{skipped:.0f}",
             *(show_interval(cell.interval(name)) for name in policies)]
        )  # fmt: skip
    header = ["cell", "seeds", "requests", "hopeless", "over-long", *policies]
    yield table(header, rows)


def _binding(cell: CellResults) -> str:
    tightness = cell.tightness()
    if tightness is None:
        return "?"
    return f"{'yes' if cell.binds else 'no'} ({tightness * 100:.0f} %)"


def show_ratio(ratio: Ratio) -> str:
    """Return a ratio with its interval, and pairs in which one side had no capacity."""
    if not ratio.num_pairs:
        return "-"
    text = "-" if ratio.interval is None else show_interval(ratio.interval)
    if ratio.num_won:
        text += f" +{ratio.num_won} only ours"
    if ratio.num_lost:
        text += f" +{ratio.num_lost} only theirs"
    return text


def show_interval(interval: Interval | None) -> str:
    """Return a mean with its interval, which one value alone does not have."""
    if interval is None:
        return "-"
    if not isfinite(interval.high):
        return f"{interval.mean:.2f}"
    return f"{interval.mean:.2f} [{max(0.0, interval.low):.2f}, {interval.high:.2f}]"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
