"""What the package says of itself is true, and a checkout sets itself up from it."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import onbeat

# What comes with a declared dependency by its own promise: FastAPI is a layer over Starlette and hands out
# its types.
BROUGHT_BY = {"starlette": "fastapi"}
# Programs that load a module of ours as their plug-in; nothing else imports that module.
HOSTS = {"vllm"}
# Distributions of other names, which need not be installed
DISTRIBUTIONS = {"flashinfer": "flashinfer-python"}
# Private hooks of these are overridden, which any minor version may change.
OVERRIDDEN = {"uvicorn"}

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def distribution_names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", line, maxsplit=1)[0].lower().replace("_", "-") for line in requirements}


def imported_packages(folder: Path) -> dict[str, str]:
    """Top-level package to a file that imports it."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            else:
                continue
            found.update({name.partition(".")[0]: str(path) for name in names})
    return found


def test_version_is_one() -> None:
    assert onbeat.__version__ == PROJECT["version"]


def test_command_is_there() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="onbeat")
    assert command.value == PROJECT["scripts"]["onbeat"]
    assert callable(command.load())


def test_every_import_is_a_declared_dependency() -> None:
    base = distribution_names(PROJECT["dependencies"])
    extras = PROJECT["optional-dependencies"]
    declared = base.union(
        *(distribution_names(extras[name]) for name in extras if name not in ("clients", "dev"))
    )
    providers = importlib.metadata.packages_distributions()
    for package, path in imported_packages(ROOT / "src").items():
        if package in sys.stdlib_module_names or package in {"onbeat", *HOSTS}:
            continue
        distributions = {
            name.lower().replace("_", "-")
            for name in providers.get(BROUGHT_BY.get(package, package), [DISTRIBUTIONS.get(package, package)])
        }
        assert distributions & declared, f"{path} imports {package}, which no dependency declares"


def test_base_install_has_no_framework() -> None:
    assert not distribution_names(PROJECT["dependencies"]) & {"torch", "transformers"}


@pytest.mark.parametrize("requirement", PROJECT["dependencies"])
def test_dependencies_end_before_what_may_break(requirement: str) -> None:
    found = re.fullmatch(r"([a-z0-9_-]+)>=[\d.]+,<(\d+)((?:\.\d+)?)", requirement)
    assert found is not None, "a name, the least version and an upper bound; no extras"
    name, major, minor = found.groups()
    assert bool(minor) == (name in OVERRIDDEN)
    installed = [int(part) for part in importlib.metadata.version(name).split(".")[:2]]
    # Not so wide that a second breaking version would be taken.
    assert installed < [int(major), int(minor[1:] or 0)] <= [installed[0] + 1, 0]


def test_constraints_are_pins_without_addresses() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert "torch==2.13.0" in pins
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)


def test_the_source_archive_holds_what_the_readme_points_to() -> None:
    included = PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    links = re.findall(r"\]\(([\w./-]+)\)", (ROOT / "README.md").read_text())
    assert "examples/chat_client.py" in links
    assert {link.partition("/")[0] for link in links} <= {*included}


def test_the_wheel_holds_all_data_of_the_package() -> None:
    """Hatchling packs what lies in the package, unless git ignores it."""
    assert PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/onbeat"]}
    package = ROOT / "src/onbeat"
    data = [path for path in package.rglob("*") if path.suffix in {".yaml", ".json", ".css", ".js", ".typed"}]
    names = {str(path.relative_to(package)) for path in data}
    assert names >= {"perfmodel/data/devices.yaml", "report/assets/report.css", "report/assets/report.js"}
    assert "perfmodel/data/models/Llama-3.1-8B.json" in names
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    ignored = subprocess.run(  # exits with 1 where it ignores none
        ["git", "check-ignore", "--no-index", *data], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ignored.returncode, ignored.stdout) == (1, "")


def test_make_lists_every_target() -> None:
    shown = subprocess.run(["make", "-C", ROOT, "help"], capture_output=True, text=True, check=True).stdout
    for target in ("serve", "test", "test-all", "check", "lint", "types", "imports", "format", "clean"):
        assert f"make {target} " in shown


def test_old_python_is_refused_by_name(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2"\nexit 1\n')
    old.chmod(0o755)
    run = subprocess.run(
        [ROOT / "scripts/make-venv", old, tmp_path / "venv"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert "3.11" in run.stderr
    assert not (tmp_path / "venv").exists()


def test_the_extras_that_documents_install_are_there() -> None:
    texts = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    named = {
        name
        for text in texts
        for found in re.findall(r"'(?:onbeat|\.)\[([\w,]+)\]'", text)
        for name in found.split(",")
    }
    assert {"plan", "gpu"} <= named <= PYPROJECT["project"]["optional-dependencies"].keys()
