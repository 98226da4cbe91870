"""Stages T and D: the tests of `tests/gpu`; `torch`: of the reference engine, `cuda`: of the GPU engine."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from benchmarks.gpu_check.record import IS_REHEARSAL, expect, note, seconds_left

TESTS = Path(__file__).resolve().parents[2] / "tests" / "gpu"
OF_TORCH = ("test_engine_on_cuda.py",)
_SECONDS_TO_SAY = 8.0
"""That pytest may take to end when it is told to, and to say what it found."""
_COUNT = re.compile(r"(\d+) (passed|failed|error|errors|skipped)")


def main() -> int:
    which = sys.argv[1]
    others = sorted(path.name for path in TESTS.glob("test_*.py") if path.name not in OF_TORCH)
    files = OF_TORCH if which == "torch" else others
    if not files:
        note("tests of the GPU engine", "there are none")
        return 0
    # The project's own settings turn warnings into errors; there are other versions of libraries here.
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(TESTS.parents[1])]
    command += ["-p", "no:cacheprovider", "-v", "--tb=short", "-rf", "-m", "gpu", "--durations=5"]
    command += [str(TESTS / name) for name in files]
    print(" ".join(command), flush=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    # What was found by the end of the stage's time is said.
    late = threading.Timer(seconds_left() - _SECONDS_TO_SAY, process.send_signal, (signal.SIGINT,))
    late.daemon = True
    late.start()
    counts: dict[str, int] = {}
    failed: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        print(line.rstrip(), flush=True)
        if line.startswith("FAILED"):
            failed.append(line.strip())
        if line.startswith("=") and (found := _COUNT.findall(line)):
            counts = {word.removesuffix("s"): int(number) for number, word in found}
    code = process.wait(timeout=max(seconds_left(), 1))
    process.stdout.close()
    late.cancel()
    for word in ("passed", "skipped"):
        note(f"tests/gpu ({which}) {word}", counts.get(word, 0))
    # Without a GPU all are skipped, or none is found.
    has_passed = code in (0, 5) if IS_REHEARSAL else code == 0 and counts.get("passed", 0) > 0
    expect(f"tests/gpu ({which})", has_passed, f"{counts}, exit code {code}", shown=True)
    for line in failed[:5]:
        expect("failed test", passed=False, text=line[:160])
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
