"""What a fresh interpreter loads: the pure packages and the command line need no framework."""

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import onbeat
from tests.pure.recording.recorded import start_run
from tests.pure.scheduler.driver import make_config, make_request

FRAMEWORKS = {"torch", "fastapi", "transformers"}
PURE_PACKAGES = (
    *("core", "scheduler", "perfmodel", "metrics", "recording", "text", "hub"),
    *("workload", "report", "simulator", "planner", "bench"),
)
ARGUMENTS = {
    "capacity": ["capacity", "--model", "llama-3.1-8b", "--device", "h100-sxm", "--objective", "vidur"],
    "plan": ["plan", "--model", "llama-3.1-8b", "--gpus", "l4=1", "--rate", "1", "--slo-ttft-ms", "1000"],
    "profile": ["profile"],
}


def modules_after(code: str) -> set[str]:
    """Run code in a fresh interpreter; return the top-level packages that it loaded."""
    code += "\nimport json, sys; print('\\n' + json.dumps([name.partition('.')[0] for name in sys.modules]))"
    run = subprocess.run(  # -I: nothing of this directory or the environment gets in
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


def modules_of(*packages: str) -> list[str]:
    """All modules of some packages of onbeat."""
    found = [f"onbeat.{package}" for package in packages]
    for info in pkgutil.walk_packages(onbeat.__path__, "onbeat.", onerror=lambda name: None):
        if info.name.startswith(tuple(f"onbeat.{package}." for package in packages)):
            found.append(info.name)
    return found


def import_all(modules: list[str]) -> str:
    return "\n".join(f"import {module}" for module in modules)


def test_pure_packages_load_no_framework() -> None:
    modules = modules_of(*PURE_PACKAGES, "cli")
    assert len(modules) > 20
    assert not modules_after(import_all(modules)) & FRAMEWORKS


@pytest.mark.parametrize(
    ("arguments", "slow_to_import"),
    [
        (["--help"], {"numpy"}),
        (["--version"], {"numpy"}),
        (["bench", "serve", "--help"], {"scipy"}),
        (["simulate", "--help"], {"scipy"}),
        (["serve", "--help"], {"numpy"}),
    ],
)
def test_a_command_loads_only_what_it_needs(arguments: list[str], slow_to_import: set[str]) -> None:
    code = f"""
from onbeat.cli.main import main
try:
    code = main({arguments})
except SystemExit as exit:
    code = exit.code
assert code in (0, None), code
"""
    assert not modules_after(code) & (FRAMEWORKS | slow_to_import)


def test_a_port_is_looked_at_without_a_framework() -> None:
    early = ("cli.serve", "cluster.start", "cluster.nurse", "server.listening")
    assert not modules_after(import_all([f"onbeat.{name}" for name in early])) & (FRAMEWORKS | {"llguidance"})


def test_an_engine_with_a_profile_does_without_scipy() -> None:
    assert "scipy" not in modules_after("import onbeat.engine.start")


def test_a_front_end_loads_no_engine() -> None:
    modules = ["onbeat.cli.front_ends", "onbeat.text.tokenizer", *modules_of("server")]
    modules_after(f"{import_all(modules)}\nimport sys\nassert 'onbeat.engine.core' not in sys.modules")


def test_importing_onbeat_loads_only_the_standard_library() -> None:
    before = modules_after("")
    assert modules_after("import onbeat") - before <= set(sys.stdlib_module_names) | {"onbeat"}


def test_planning_commands_load_neither_an_engine_nor_a_server(tmp_path: Path) -> None:
    where = ["--model", "llama-3.1-8b", "--device", "h100-sxm", "--max-model-len", "4096"]
    load = ["--num-prompts", "20", "--input-len", "100", "--output-len", "10", "--disable-tqdm"]
    record = tmp_path / "run.gz"
    run = start_run(record, make_config())
    run.add(make_request("r0", 20, 5, arrival=run.now))
    run.finish()
    commands = [
        ["simulate", *where, *load, "--report", str(tmp_path / "simulate.html")],
        ["capacity", *where, *load, "--objective", "vidur", "--repeats", "1", "--tolerance", "0.5"],
        ["replay", str(record)],
    ]
    loaded = modules_after(
        f"from onbeat.cli.main import main\nimport onbeat\nonbeat.simulate, onbeat.Load\n"
        f"assert [main(command) for command in {commands}] == [0, 0, 0]\n"
    )
    assert not loaded & (FRAMEWORKS | {"gguf", "prometheus_client", "pydantic", "uvicorn", "zmq"})


def test_simulations_and_their_pages_need_neither_scipy_nor_plotly(tmp_path: Path) -> None:
    page = tmp_path / "simulate.html"
    where = ["--model", "llama-3.1-8b", "--device", "h100-sxm", "--max-model-len", "4096"]
    load = ["--num-prompts", "20", "--input-len", "100", "--output-len", "10", "--disable-tqdm"]
    modules_after(
        "import sys; sys.modules.update(scipy=None, plotly=None)\nfrom onbeat.cli.main import main\n"
        f"assert main({['simulate', *where, *load, '--report', str(page)]}) == 0\n"
    )
    assert page.stat().st_size > 100_000


@pytest.mark.parametrize("command", ["capacity", "plan", "profile"])
def test_planning_commands_name_the_missing_extra(command: str) -> None:
    without = "import sys; sys.modules['scipy'] = None\nfrom onbeat.cli.main import main\n"
    code = f"{without}sys.exit(main({ARGUMENTS[command]}))"
    run = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 2, run.stderr
    (line,) = run.stderr.splitlines()
    assert f"onbeat {command} " in line
    assert line.endswith("'onbeat[plan]'")
