"""The policy `slo` in simulation. Importing it makes `slo_study` and `harness` importable by these names."""

import sys
from pathlib import Path

import benchmarks.policies.register  # noqa: F401 (the study compares with them)

_FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(_FOLDER), str(_FOLDER.parent)]
