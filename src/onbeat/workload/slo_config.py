"""Classes of objectives from a YAML file.

The file lists classes; a class with the name of a built-in one and no objectives of its own takes those. The
weight (1 unless given) says how much a request of the class is worth beside one of another; the tenant, which
several classes may have, for whom its requests are; the trace, told from the folder of the file, how long
they are::

    classes:
      - {name: interactive, share: 0.7, weight: 2}
      - {name: report, share: 0.3, ttft_ms: 5000, e2e_ms: 60000, tenant: finance, trace: reports.csv.gz}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onbeat.core.errors import ConfigError, quoted
from onbeat.workload.slo_classes import SLOClass, check_classes
from onbeat.workload.slo_entries import OBJECTIVE_KEYS, read_entries, read_name, read_number, read_objectives

_KEYS = ("name", "share", "weight", "tenant", "trace", *OBJECTIVE_KEYS)


def read_slo_config(path: Path) -> tuple[SLOClass, ...]:
    """Return the classes of a file.

    Raises
    ------
    ConfigError : the file cannot be read, or a class is wrong; the message names it.
    """
    content = read_entries(path)
    entries = content.get("classes") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries or content.keys() != {"classes"}:
        raise ConfigError(f"{path} must be 'classes:' and a list of {{{', '.join(_KEYS)}}}")
    try:
        classes = tuple(_read_class(entry, path.parent, is_only=len(entries) == 1) for entry in entries)
        check_classes(classes)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return classes


def _read_class(entry: Any, folder: Path, *, is_only: bool) -> SLOClass:
    name = read_name(entry, _KEYS)
    if "share" not in entry and not is_only:
        raise ConfigError(f"class {name!r} has no share; give each of several classes one, adding up to 1")
    tenant = entry.get("tenant")
    if not (tenant is None or isinstance(tenant, str)):
        raise ConfigError(f"the tenant of class {name!r} must be a name, got {quoted(tenant)}")
    trace = entry.get("trace")
    if not (trace is None or isinstance(trace, str)):
        raise ConfigError(f"the trace of class {name!r} must be a file, got {quoted(trace)}")
    return SLOClass(
        name=name,
        slo=read_objectives(name, entry),
        share=read_number(name, "share", entry, default=1.0),
        weight=read_number(name, "weight", entry, default=1.0),
        tenant=tenant,
        trace=None if trace is None else folder / trace,
    )
