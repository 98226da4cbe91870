"""What a stage knows of its run, and where its numbers go."""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

IS_REHEARSAL = bool(os.environ.get("GPU_CHECK_REHEARSE"))
DEVICE: Literal["cpu", "cuda"] = "cpu" if IS_REHEARSAL else "cuda"
OUT = Path(os.environ.get("GPU_CHECK_OUT", "."))
WORK = Path(os.environ.get("GPU_CHECK_WORK", "/tmp"))
PACK = Path(os.environ.get("GPU_CHECK_PACK", ".gpu"))
PIECES = ("--cuda-graph-pieces",) if os.environ.get("GPU_CHECK_PIECES") else ()
"""What the server and its profile run with, once stages D and E have passed with it."""
_STAGE = os.environ.get("GPU_CHECK_STAGE", "?")
_END = time.monotonic() + float(os.environ.get("GPU_CHECK_SECONDS", "600"))


def seconds_left() -> float:
    """Return how long this stage may still run."""
    return _END - time.monotonic()


def note(
    name: str,
    value: float | str,
    unit: str = "",
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    shown: bool = False,
) -> None:
    """Print a number and keep it, with the bound that it must keep. NaN keeps none.

    Parameters
    ----------
    shown : whether the summary shows it where it has no bound.
    """
    passed, bound = None, ""
    if at_most is not None:
        passed, bound = float(value) <= at_most, f"<= {at_most:g}"
    elif at_least is not None:
        passed, bound = float(value) >= at_least, f">= {at_least:g}"
    if IS_REHEARSAL and unit in _OF_DEVICE:
        passed, bound = None, ""
    _keep(name, value, unit, (passed, bound), shown=shown)


def expect(name: str, passed: object, text: str = "", *, shown: bool = False) -> None:
    """Print and keep whether something holds."""
    _keep(name, text or ("yes" if passed else "no"), "", (bool(passed), "holds"), shown=shown)


def keep_step(**columns: Any) -> None:
    """Add a line to steps.csv."""
    keep_rows("steps.csv", STEP_COLUMNS, [[columns.get(name, "") for name in STEP_COLUMNS]])


def keep_rows(name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Add lines to a table."""
    with (OUT / name).open("a", newline="") as file:
        writer = csv.writer(file)
        if not file.tell():
            writer.writerow(columns)
        writer.writerows(rows)


STEP_COLUMNS = ("engine", "kind", "rows", "context", "device_ms", "wall_ms", "host_us", "floor_ms", "note")
_OF_DEVICE = ("ms", "us", "TFLOP/s", "TB/s", "GB/s", "tok/s", "x floor", "s")
"""Units of speed, which a rehearsal says nothing about."""


def _keep(name: str, value: Any, unit: str, verdict: tuple[bool | None, str], *, shown: bool) -> None:
    passed, bound = verdict
    word = {True: "PASS", False: "FAIL", None: "    "}[passed]
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    print(f"{word} {name}: {text} {unit} {bound}", flush=True)
    line = {"stage": _STAGE, "name": name, "value": value, "unit": unit, "passed": passed, "bound": bound}
    with (OUT / "numbers.jsonl").open("a") as file:
        file.write(json.dumps({**line, "shown": shown}) + "\n")
