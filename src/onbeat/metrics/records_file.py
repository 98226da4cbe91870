"""Request records as JSON lines: one request a line, times in seconds."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson

from onbeat.core.errors import ConfigError
from onbeat.core.slo import Fate
from onbeat.metrics.record import RequestRecord


def record_as_dict(record: RequestRecord) -> dict[str, Any]:
    """Return what a line of the file holds."""
    slo = record.slo
    return {
        "id": record.request_id,
        "class": record.request_class,
        "tenant": record.tenant,
        "slo": None if slo is None else {"ttft": slo.ttft, "tbt": slo.tbt, "e2e": slo.e2e},
        "arrival": record.arrival,
        "scheduled": record.scheduled,
        "first_token": record.first_token,
        "delivery_times": record.delivery_times.tolist(),
        "delivery_sizes": record.delivery_sizes.tolist(),
        "end": record.end,
        "finish_reason": record.finish_reason,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "preemptions": record.num_preemptions,
        "replica": record.replica,
        "rejected": record.is_rejected,
        "predicted_wait": record.predicted_wait,
        "predicted_ttft": record.predicted_ttft,
        "relegated": record.fate is Fate.RELEGATED,
    }


def write_records(path: Path, records: Iterable[RequestRecord]) -> None:
    """Write records, packed if the name ends in `.gz`.

    Raises
    ------
    ConfigError : the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            file: BinaryIO = stack.enter_context(path.open("wb"))
            if path.suffix == ".gz":
                file = stack.enter_context(
                    cast(BinaryIO, gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1, mtime=0))
                )
            for record in records:
                file.write(orjson.dumps(record_as_dict(record)) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
