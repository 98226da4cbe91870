"""Files under deploy/ name what onbeat has: flags, paths, metrics, the version."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from onbeat.metrics.declare import declared
from onbeat.metrics.exporter import SHOWN

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/onbeat"
TEMPLATES = sorted((CHART / "templates").iterdir())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FLAGS = set(
    re.findall(r"`(--[a-z-]+)`", (ROOT / "docs/flags.md").read_text().partition("## onbeat bench")[0])
)
METRICS = {f"onbeat_{metric.name}" for kind, _ in SHOWN for metric, _ in declared(kind)}


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def lookup(values: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        values = values[name]
    return values


def test_the_board_asks_for_metrics_that_there_are() -> None:
    board = json.loads((DEPLOY / "grafana/onbeat.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(panels) > 10
    for name in {name for each in expressions for name in re.findall(r"onbeat_\w+", each)}:
        assert re.sub(r"_(bucket|sum|count)$", "", name) in METRICS, name
    for panel in panels:
        assert panel["description"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


@pytest.mark.parametrize(
    "path", sorted(path for path in DEPLOY.rglob("*") if path.is_file()), ids=lambda p: p.name
)
def test_flags_are_those_of_serve(path: Path) -> None:
    text = path.read_text()
    if path.suffix == ".json":
        return
    other = {
        "--read-only",
        "--tmpfs",
        "--build",
        "--build-arg",
        "--set",
        "--yes",
        "--no-install-recommends",
        "--mount",
    }
    other |= {
        "--no-cache-dir",
        "--no-deps",
        "--wheel-dir",
        "--extra-index-url",
        "--uid",
        "--create-home",
        "--home-dir",
    }
    other |= {"--interval", "--timeout", "--start-period", "--retries", "--now"}
    found = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", text))
    assert found - other <= FLAGS


def test_compose_mounts_files_that_are_there() -> None:
    compose = read_yaml(DEPLOY / "compose/compose.yaml")
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in compose["volumes"] or (DEPLOY / "compose" / source).exists(), source
        if "build" in service:
            context = DEPLOY / "compose" / service["build"]["context"]
            assert (context / service["build"]["dockerfile"]).is_file()
    (scraped,) = read_yaml(DEPLOY / "compose/prometheus.yaml")["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": ["onbeat:8000"]}]


def test_the_chart_has_a_value_for_each_that_it_reads() -> None:
    values = read_yaml(CHART / "values.yaml")
    used = {name for path in TEMPLATES for name in re.findall(r"\.Values\.([\w.]+)", path.read_text())}
    for name in used:
        lookup(values, name)
    leaves = {name for name in values if name not in {part.partition(".")[0] for part in used}}
    assert not leaves, "values that no template reads"


def test_the_chart_defines_what_it_includes() -> None:
    text = "".join(path.read_text() for path in TEMPLATES)
    assert set(re.findall(r'include "([\w.]+)"', text)) == set(re.findall(r'define "([\w.]+)"', text))
    opened = re.findall(r"{{-? *(?:if|with|range|define)\b", text)
    assert len(re.findall(r"{{-? *end\b", text)) == len(opened)


def test_versions_are_the_projects() -> None:
    chart = read_yaml(CHART / "Chart.yaml")
    assert chart["version"] == chart["appVersion"] == PROJECT["project"]["version"]


def test_who_ends_a_server_gives_it_the_time_to_drain() -> None:
    default = re.search(r"`--shutdown-timeout` \| `([\d.]+)`", (ROOT / "docs/flags.md").read_text())
    unit = re.search(r"TimeoutStopSec=(\d+)", (DEPLOY / "systemd/onbeat.service").read_text())
    compose = read_yaml(DEPLOY / "compose/compose.yaml")["services"]["onbeat"]["stop_grace_period"]
    assert default
    assert unit
    assert float(unit[1]) > float(default[1])
    assert float(compose.removesuffix("s")) > float(default[1])


def test_workflows_give_each_job_no_more_than_it_needs() -> None:
    for path in (ROOT / ".github/workflows").iterdir():
        workflow = read_yaml(path)
        assert workflow["permissions"] == {"contents": "read"}, path.name
        for job in workflow["jobs"].values():
            for step in job["steps"]:
                if "actions/checkout" in step.get("uses", ""):
                    assert step["with"] == {"persist-credentials": False}


def test_wheels_are_built_where_amx_is_known() -> None:
    build = PROJECT["tool"]["cibuildwheel"]
    assert (
        build["linux"]["manylinux-x86_64-image"]
        == build["linux"]["manylinux-aarch64-image"]
        == "manylinux_2_28"
    )
    assert "-static-libstdc++" in build["linux"]["environment"]["LDFLAGS"]


def test_the_image_is_built_from_what_a_wheel_needs_and_no_more() -> None:
    lines = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert lines[0] == "*"
    let_in = {line[1:] for line in lines if line.startswith("!")}
    needed = {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    assert let_in == {*needed, "src", "native", "hatch_build.py", "pyproject.toml"}
    assert "**/*.so" in lines[lines.index("!src") :]


def test_the_chart_takes_no_more_cores_than_it_asks_for_and_a_token() -> None:
    values = read_yaml(CHART / "values.yaml")
    assert values["resources"]["limits"]["cpu"] == values["resources"]["requests"]["cpu"]
    text = "".join(path.read_text() for path in TEMPLATES)
    assert "name: HF_TOKEN" in text
    cluster = (CHART / "templates/raycluster.yaml").read_text()
    assert text.count('include "onbeat.env"') == 1 + cluster.count('include "onbeat.env"') == 3


def test_no_page_installs_from_an_index_that_has_no_onbeat() -> None:
    """Once it is published, these pages may say `pip install onbeat`, and this test goes."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *DEPLOY.rglob("*")]
    found = {
        path.name
        for path in pages
        if path.is_file() and re.search(r"pip install[^\n]*(?<![/])\bonbeat\b", _commands(path.read_text()))
    }
    assert not found


def _commands(text: str) -> str:
    """Return a text without its comments."""
    return re.sub(r"\s#.*", "", text)


def test_every_extra_that_is_named_exists() -> None:
    files = (DEPLOY / "Containerfile", CHART / "values.yaml", ROOT / "docs/deployment.md")
    named = [name for file in files for name in re.findall(r"EXTRAS=([\w,]+)", file.read_text())]
    assert len(named) >= len(files)
    assert {extra for each in named for extra in each.split(",")} <= set(
        PROJECT["project"]["optional-dependencies"]
    )


def test_the_file_of_flags_serves_the_name_that_the_examples_ask_for() -> None:
    flags = read_yaml(ROOT / "examples/serve.yaml")
    assert flags["model"] in flags["served-model-name"]
    assert f'"MODEL", "{flags["model"]}"' in (ROOT / "examples/agent.py").read_text()
