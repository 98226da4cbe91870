"""The steps of this engine's own record files, as those of any other engine."""

from __future__ import annotations

from pathlib import Path

from onbeat.perfmodel.logged_step import LoggedStep, StepOrigin, StepStream
from onbeat.perfmodel.step_log import read_step_log
from onbeat.perfmodel.step_table import SUFFIXES, read_step_table
from onbeat.recording.fleet_log import read_header
from onbeat.recording.log import FILE_KIND
from onbeat.recording.reader import Recording
from onbeat.simulator.replay.history import read_history
from onbeat.simulator.replay.model import PRECISIONS

_GZIP_MAGIC = b"\x1f\x8b"


def read_steps(path: Path) -> StepStream:
    """Read recorded steps: a file or a table of them, or a record of `onbeat serve`, perhaps cut short.

    Raises
    ------
    ConfigError : it cannot be read, is none of these, or a line is not as it must be.
    """
    if path.name.lower().endswith(SUFFIXES):
        return read_step_table(path)
    if not _is_own_record(path):
        return read_step_log(path)
    recording = Recording(path, allow_partial=True)
    about = recording.header.engine
    origin = StepOrigin(
        engine="onbeat",
        engine_version=recording.header.onbeat_version,
        model=str(about.get("model_name")),
        device=str(about.get("device")),
        dtype=PRECISIONS.get(str(about.get("dtype"))),
    )
    # What the host does between two steps is apart (--host-overhead-ms), as in a profile of this engine.
    steps = [LoggedStep(step.shape, step.seconds) for step in read_history(recording).steps]
    return StepStream(origin, steps)


def _is_own_record(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == _GZIP_MAGIC
    except OSError:
        return False  # whose reader says so
    header = read_header(path) if is_packed else None
    return header is not None and header.get("file") == FILE_KIND
