"""Stage G: `onbeat profile` on the device, and how well its fit predicts steps."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.gpu_check.models import model_folder
from benchmarks.gpu_check.record import DEVICE, IS_REHEARSAL, OUT, expect, note, seconds_left

SECONDS = 3 if IS_REHEARSAL else 25
"""Of its rounds. Start and the rest took 25 s more on an H100."""


def main() -> int:
    profile = OUT / "profile.json"
    command = [sys.executable, "-m", "onbeat", "profile", str(model_folder("8b")), "--load-format", "dummy"]
    command += ["--device", DEVICE, "--seconds", str(SECONDS), "--quiet", "--max-model-len", "4096"]
    command += ["--kv-cache-memory-bytes", "64M" if IS_REHEARSAL else "16G"]
    command += ["--output", str(profile), "--report", str(OUT / "profile.html")]
    print(" ".join(command), flush=True)
    code = subprocess.run(command, check=False, timeout=max(seconds_left() - 2, 5)).returncode
    expect("onbeat profile", code == 0, f"exit code {code}", shown=True)
    if code:
        return 1
    found = json.loads(profile.read_text())
    note("profile of", f"{found['key']['device']} {found['engine'].get('backend')}", shown=True)
    errors = found["fit"]["errors"]
    for name, most in (("p50", 0.05), ("p90", 0.12)):
        note(
            f"error of predicted step times at {name}",
            errors[name],
            at_most=None if IS_REHEARSAL else most,
            shown=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
