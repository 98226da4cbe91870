"""Two classes on one server: a tight and a loose one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.serve.slo_live.load import Result
from onbeat.core.slo import SLO
from onbeat.workload.slo_classes import SLOClass

TIGHT, LOOSE = (20, 3), (400, 30)
"""TTFT and TBT in decode steps."""


def two_classes(step: float) -> tuple[SLOClass, SLOClass]:
    return (
        SLOClass(name="tight", slo=SLO(ttft=TIGHT[0] * step, tbt=TIGHT[1] * step), share=0.5),
        SLOClass(name="loose", slo=SLO(ttft=LOOSE[0] * step, tbt=LOOSE[1] * step), share=0.5),
    )


@contextmanager
def classes_file(classes: Sequence[SLOClass]) -> Iterator[Path]:
    """Write the classes as `onbeat serve --slo-classes` reads them."""
    entries = [
        {"name": each.name}
        | {
            f"{key}_ms": limit * 1e3
            for key in ("ttft", "tbt", "e2e")
            if (limit := getattr(each.slo, key)) is not None
        }
        for each in classes
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "classes.yaml"
        path.write_text(yaml.safe_dump({"classes": entries}), encoding="utf-8")
        yield path


def of_classes(result: Result) -> dict[str, Any]:
    keys = ("offered", "good", "attainment", "p50_ttft_ms", "p99_ttft_ms", "p99_itl_ms")
    return {name: {key: own.get(key) for key in keys} for name, own in result.values["classes"].items()}
