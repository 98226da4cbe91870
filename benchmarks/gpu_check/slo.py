"""Stage I: `slo` live beside `sarathi` with six token budgets, and the simulator beside `slo`.

One server at a time, `slo` in the middle, so that a card that slows down helps neither. The simulator has the
step times of stage G, if that ran before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.gpu_check.models import model_folder
from benchmarks.gpu_check.record import DEVICE, IS_REHEARSAL, OUT, WORK, expect, note, seconds_left
from benchmarks.gpu_check.serve import bench, last_run, server
from onbeat.engine.device import detect_device, device_name
from onbeat.perfmodel.device_spec import known_device

PROFILE = OUT / "profile.json"
"""Of stage G."""
BUDGETS = (256,) if IS_REHEARSAL else (512, 2048, 1024, 256, 4096, 8192)
SECONDS = 2 if IS_REHEARSAL else 10
"""Of arrivals, of each load and server."""
SEED = ("--seed", "3")
LONGEST = ("--max-model-len", "2048" if IS_REHEARSAL else "8192")
_PROMPT, _ANSWER, _LONG_PROMPT = ("60", "16", "300") if IS_REHEARSAL else ("306", "150", "4096")
_LENGTHS = ["--input-len", _PROMPT, "--output-len", _ANSWER, "--random-range-ratio", "0.5"]
_LONG = ["--random-long-share", "0.12", "--random-long-input-len", _LONG_PROMPT]
LOADS: Mapping[str, tuple[float, list[str]]] = {
    "chats": (20.0, [*_LENGTHS, "--slo-ttft-ms", "300", "--slo-tbt-ms", "20"]),
    "chats beside long prompts": (12.0, [*_LENGTHS, *_LONG, "--slo-ttft-ms", "500", "--slo-tbt-ms", "25"]),
}
"""Requests a second, about seven tenths of what a simulated H100 carries, and what they are like."""


def main() -> int:
    known = ["--step-time-profile", str(PROFILE)] if PROFILE.exists() else []
    sarathi = {
        f"sarathi {each}": ["--policy", "sarathi", "--max-num-batched-tokens", str(each)] for each in BUDGETS
    }
    labels = list(sarathi)
    labels.insert(len(labels) // 2, "slo")
    good: dict[str, dict[str, float]] = {load: {} for load in LOADS}
    for label in labels:
        if seconds_left() < 60:
            expect(f"{label}: served", passed=False, text="no time left")
            continue
        with server("8b", *LONGEST, *sarathi.get(label, known)) as port:
            for load, found in good.items():
                result = None if port is None else _measure(port, label, load)
                if result is not None:
                    found[label] = result
    for load, found in good.items():
        own, others = found.pop("slo", 0.0), found.values()
        expect(
            f"{load}: slo keeps as many as the best budget",
            found and own >= max(others),
            f"{own:.3f}",
            shown=True,
        )
    return 0


def _measure(port: int, label: str, load: str) -> float | None:
    """Return the share of requests that kept their objectives."""
    rate, options = LOADS[load]
    path = WORK / f"slo-{label}-{load}.json".replace(" ", "-")
    arrivals = ["--request-rate", str(rate), "--num-prompts", str(round(rate * SECONDS)), *SEED]
    if not bench(port, "8b", f"{label}, {load}", [*options, *arrivals, "--num-warmups", "2"], path):
        return None
    result = last_run(path)
    with (OUT / "slo.json").open("a") as file:
        file.write(json.dumps({"policy": label, "load": load, "result": result}) + "\n")
    note(f"{load}, {label}: kept", float(result["attainment"]), shown=True)
    if (label, load) == ("slo", "chats"):
        _simulate(result, [*options, *arrivals])
    return float(result["attainment"])


def _simulate(live: Mapping[str, Any], options: list[str]) -> None:
    """Compare a live run with a simulated one of the same load."""
    path = WORK / "simulated.json"
    device = "cpu" if IS_REHEARSAL else known_device(device_name(detect_device(DEVICE)))
    command = [sys.executable, "-m", "onbeat", "simulate", "--model", str(model_folder("8b"))]
    command += ["--device", device or "h100-sxm", "--dataset-name", "random", "--json", str(path)]
    command += [*LONGEST, "--disable-tqdm", *options]
    if PROFILE.exists():
        command += ["--profile", str(PROFILE)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=max(seconds_left() - 5, 5)
    )
    expect("simulated", done.returncode == 0, done.stderr[-300:] or "as served")
    if done.returncode:
        return
    simulated = last_run(path)
    if simulated["total_input_tokens"] != live["total_input_tokens"]:
        expect("the simulated load is the live one", passed=False, text=str(simulated["total_input_tokens"]))
    for name, most in (("mean_tpot_ms", 0.10), ("mean_ttft_ms", 0.15)):
        error = abs(float(simulated[name]) / float(live[name]) - 1)
        bound = most if PROFILE.exists() and not IS_REHEARSAL else None  # a data sheet promises nothing
        note(f"simulated {name}, off by", error, at_most=bound, shown=True)
        note(f"live {name}", float(live[name]), "ms", shown=True)


if __name__ == "__main__":
    sys.exit(main())
