"""Importing this module gives the scheduler the policies and rules of this folder, by their names."""

from __future__ import annotations

from benchmarks.policies.tables import ADDED

for _table, _entries in ADDED:
    _table.update(_entries)
