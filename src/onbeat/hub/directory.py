"""Whether a Hugging Face directory has what serving needs."""

from __future__ import annotations

from pathlib import Path


def missing_from(directory: Path, *, weights: bool) -> list[str]:
    """Return what a model directory lacks, in words.

    Parameters
    ----------
    weights : whether weights are needed (random ones need none). Pickled weights count as present:
        opening them explains why they are refused.
    """
    missing = [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]
    has_weights = any(
        next(directory.glob(f"*.{suffix}"), None) for suffix in ("safetensors", "bin", "pt", "pth")
    )
    if weights and not has_weights:
        missing.append("*.safetensors")
    return missing
