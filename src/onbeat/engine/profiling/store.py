"""Where profiles are kept."""

from __future__ import annotations

import os
from pathlib import Path


def profiles_dir() -> Path:
    """Return the directory of profiles: `$XDG_CACHE_HOME/onbeat/profiles`, or under `~/.cache`."""
    # The XDG specification: a relative path is invalid and must be ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "onbeat" / "profiles"
