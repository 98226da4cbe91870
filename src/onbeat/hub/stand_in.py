"""From what the user called a model to the files that a stand-in for it needs: a tokenizer's."""

from __future__ import annotations

from pathlib import Path

from onbeat.hub.files import ModelFiles, Progress, missing_from, no_progress
from onbeat.hub.known import DEFAULT_MODEL, KNOWN_MODELS
from onbeat.hub.resolve import resolve_model


def find_stand_in(
    name: str, *, tokenizer: Path | None = None, progress: Progress = no_progress
) -> ModelFiles:
    """Find the tokenizer of a model whose sizes alone matter.

    Parameters
    ----------
    name : a known model or .gguf file, a directory or config.json, or a name of which the sizes are known.
    tokenizer : directory or .gguf to take the tokenizer from; None is the model's own where it is at hand,
        else that of the default model.

    Returns
    -------
    ModelFiles
        With the model's name, and the path of the tokenizer.

    Raises
    ------
    ModelLoadError : the default model cannot be fetched.
    """
    path = Path(name).expanduser()
    if tokenizer is not None:
        return ModelFiles(kind="gguf" if tokenizer.suffix == ".gguf" else "hf", path=tokenizer, name=name)
    if name in KNOWN_MODELS or path.suffix == ".gguf":
        return resolve_model(name, progress=progress)
    if path.is_dir() and not missing_from(path, weights=False):
        return ModelFiles(kind="hf", path=path, name=name)
    default = resolve_model(DEFAULT_MODEL, progress=progress)
    return ModelFiles(kind=default.kind, path=default.path, name=name)
