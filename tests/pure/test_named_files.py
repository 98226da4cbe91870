"""Python files that documents and docstrings name exist; the changelog may name what has left."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks/README.md",
    *(ROOT / "docs").rglob("*.md"),
]
NAMED = re.compile(r"(?<![\w./*}-])[\w./-]*\w\.py\b")


def docstrings(source: str) -> str:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, documented))
    return "\n".join(filter(None, map(ast.get_docstring, nodes)))


def test_named_python_files_exist() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    files = [f"/{path}" for path in listed.split()]
    texts = {path: path.read_text() for path in DOCUMENTS}
    sources = {path: path.read_text() for path in (ROOT / "src").rglob("*.py")}
    texts |= {path: docstrings(source) for path, source in sources.items() if ".py" in source}
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts.items()
        for name in sorted(set(NAMED.findall(text)))
        if Path(name).stem != "NAME" and not any(file.endswith(f"/{name.lstrip('./')}") for file in files)
    ]
    assert not missing
