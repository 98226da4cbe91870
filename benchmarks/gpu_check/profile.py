"""Stage G: `onbeat profile` on the device, and how well its fit predicts steps, by what they hold."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from benchmarks.gpu_check.models import model_config, model_folder
from benchmarks.gpu_check.record import DEVICE, IS_REHEARSAL, OUT, PIECES, expect, note, seconds_left
from onbeat.core.step import BatchShape
from onbeat.engine.step_time_spec import device_spec_of, model_spec_of
from onbeat.perfmodel.fitted import FitErrors, FitTarget
from onbeat.perfmodel.profile import Profile, read_profile

SECONDS = 3 if IS_REHEARSAL else 25
"""Of its rounds. Start and the rest took 25 s more on an H100."""
KINDS: dict[str, Callable[[BatchShape], bool]] = {
    "verify": lambda shape: shape.num_draft_tokens > 0,
    "decode": lambda shape: not shape.num_chunks,
    "chunk": lambda shape: not shape.num_decodes,
    "mixed": lambda shape: bool(shape.num_decodes),
}
"""The first that a step is."""


def main() -> int:
    path = OUT / "profile.json"
    command = [sys.executable, "-m", "onbeat", "profile", str(model_folder("8b")), "--load-format", "dummy"]
    command += ["--device", DEVICE, "--seconds", str(SECONDS), "--quiet", "--max-model-len", "4096", *PIECES]
    command += ["--kv-cache-memory-bytes", "64M" if IS_REHEARSAL else "16G"]
    command += ["--output", str(path), "--report", str(OUT / "profile.html")]
    print(" ".join(command), flush=True)
    code = subprocess.run(command, check=False, timeout=max(seconds_left() - 2, 5)).returncode
    expect("onbeat profile", code == 0, f"exit code {code}", shown=True)
    if code:
        return 1
    profile = read_profile(path)
    note(
        "profile of", f"{profile.key.device} {profile.key.backend} {profile.key.instruction_set}", shown=True
    )
    for name, most in (("p50", 0.05), ("p90", 0.12)):
        at_most = None if IS_REHEARSAL else most
        error = getattr(profile.fitted.errors, name)
        note(f"error of predicted step times at {name}", error, at_most=at_most, shown=True)
    for kind, errors in errors_by_kind(profile).items():
        note(f"{kind} steps, fitted and held back", errors.num_points)
        for name in ("p50", "p90"):
            note(f"error of {kind} steps at {name}", getattr(errors, name), shown=True)
    return 0


def errors_by_kind(profile: Profile) -> dict[str, FitErrors]:
    """Return how far the fit is off, of all steps that were measured."""
    target = FitTarget(
        model=model_spec_of(model_config("8b"), profile.key.model),
        device=device_spec_of(profile.key, profile.limits),
        precision=profile.key.precision,
    )
    pairs: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for step, predicted in zip(profile.steps, target.predict(profile.fitted, profile.steps), strict=True):
        kind = next(name for name, holds in KINDS.items() if holds(step.shape))
        pairs[kind].append((float(predicted), step.seconds))
    return {kind: FitErrors.of(*zip(*own, strict=True)) for kind, own in pairs.items() if own}


if __name__ == "__main__":
    sys.exit(main())
