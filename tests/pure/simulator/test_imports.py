"""The simulator's modules import each other in one direction."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import onbeat.simulator

ROOT = Path(onbeat.simulator.__file__).parent


def imported(path: Path) -> set[str]:
    """Return what a file imports anywhere: under TYPE_CHECKING and in functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_no_circle() -> None:
    names = {
        ".".join(("onbeat.simulator", *path.relative_to(ROOT).with_suffix("").parts)): path
        for path in ROOT.rglob("*.py")
        if path.name != "__init__.py"
    }
    assert len(names) > 10
    graph = {name: imported(path) & names.keys() for name, path in names.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
