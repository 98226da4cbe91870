"""No module of the package imports itself by way of others, imports for type checkers included."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def imported(path: Path) -> set[str]:
    return {
        name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
        for name in (node.module, *(f"{node.module}.{each.name}" for each in node.names))
    }


def test_no_imports_go_round_in_a_circle() -> None:
    paths = {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts): path
        for path in SOURCE.rglob("*.py")
        if path.name != "__init__.py"
    }
    graph = {module: (imported(path) & paths.keys()) - {module} for module, path in paths.items()}
    assert len(graph) > 300
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph)  # a circle is an error
