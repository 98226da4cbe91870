"""From what the user called a model to its files."""

from __future__ import annotations

import re
from pathlib import Path

from onbeat.core.errors import ModelLoadError
from onbeat.core.hints import likely_meant
from onbeat.hub.fetch import fetch_known_model
from onbeat.hub.files import ModelFiles, Progress, missing_from, no_progress
from onbeat.hub.gguf_files import parts_of
from onbeat.hub.huggingface import HubModel, find_on_hub
from onbeat.hub.known import KNOWN_MODELS, KnownModel, cached_file, models_dir

_HUB_ID = re.compile(r"(?:(?:hf|huggingface)\.co/)?(?P<id>\w[\w.-]*/\w[\w.-]*)(?::(?P<tag>\w[\w./+-]*))?")
"""With a tag that chooses a GGUF file, in the ways of llama.cpp and Ollama."""


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    offline: bool | None = None,
    needs_weights: bool = True,
    progress: Progress = no_progress,
) -> ModelFiles:
    """Find a model's files, fetching them if need be.

    An existing path is taken as it is; then the known models' names; then hub ids, cache first: `owner/name`,
    or `owner/name:TAG` for a GGUF file, either behind `hf.co/`.

    Parameters
    ----------
    name : a path, a known model's name, or a hub id.
    revision : branch, tag or commit of a hub model; other models have none.
    offline : True fetches nothing; None does as `HF_HUB_OFFLINE` says for hub models.
    needs_weights : False for random weights, which need a configuration and a tokenizer only.
    progress : called while files are fetched.

    Raises
    ------
    ModelLoadError : no such model, it lacks files, or it cannot be fetched; within seconds.
    """
    path = Path(name).expanduser()
    if revision is not None and (path.exists() or name in KNOWN_MODELS):
        what = "a path of this machine" if path.exists() else "a known model, of which there is one version"
        raise ModelLoadError(
            f"revision {revision!r} is for models of the hub, and {name} is {what}; leave it out"
        )
    if path.is_dir():
        return _directory(path, name, needs_weights=needs_weights)
    if path.is_file():
        return _file(path, name)
    if name in KNOWN_MODELS:
        return ModelFiles(
            kind="gguf", path=_known_file(KNOWN_MODELS[name], progress, offline=bool(offline)), name=name
        )
    match = _HUB_ID.fullmatch(name)
    is_tagged = match is not None and match["tag"] is not None
    if (path.suffix == ".gguf" and not is_tagged) or name.startswith(("/", ".", "~")):
        raise ModelLoadError(f"the model file or directory {name} does not exist")
    if match is None:
        raise _unknown(name)
    found = find_on_hub(
        HubModel(match["id"], None if match["tag"] == "latest" else match["tag"], revision),
        offline=offline,
        needs_weights=needs_weights,
        progress=progress,
    )
    if found.is_file():
        return ModelFiles(kind="gguf", path=found, name=name)
    return _directory(found, name, needs_weights=needs_weights)


def _known_file(model: KnownModel, progress: Progress, *, offline: bool) -> Path:
    if not offline:
        return fetch_known_model(model, progress)
    found = cached_file(model)
    if found is None:
        raise ModelLoadError(
            f"the model {model.name} is not in the cache {models_dir()}; fetch it with "
            f"`onbeat models fetch {model.name}`, or put {model.file_name} there"
        )
    return found


def _file(path: Path, name: str) -> ModelFiles:
    if path.suffix != ".gguf":
        raise ModelLoadError(
            f"{name} is not a .gguf file; pass one, or the directory of a Hugging Face model (config.json, "
            "tokenizer.json and *.safetensors)"
        )
    parts = [path.with_name(part) for part in parts_of(path.name)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelLoadError(
            f"{path} is one of {len(parts)} parts of a model, of which {', '.join(missing[:3])} "
            f"{'is' if len(missing) == 1 else 'are'} missing; put all parts into {path.parent}"
        )
    return ModelFiles(kind="gguf", path=parts[0], name=name)


def _directory(path: Path, name: str, *, needs_weights: bool) -> ModelFiles:
    missing = missing_from(path, weights=needs_weights)
    if missing:
        gguf_files = sorted(path.glob("*.gguf"))
        cure = f"; to serve {gguf_files[0].name} pass its own path" if gguf_files else ""
        raise ModelLoadError(f"the model directory {path} lacks {', '.join(missing)}{cure}")
    return ModelFiles(kind="hf", path=path, name=name)


def _unknown(name: str) -> ModelLoadError:
    near = likely_meant(name.lower(), KNOWN_MODELS)
    guess = f" Did you mean {near}?" if near else ""
    return ModelLoadError(
        f"unknown model {name!r}: it is no file or directory, no known model ({', '.join(KNOWN_MODELS)}) "
        f"and no hub id of the form owner/name or owner/name:TAG.{guess}"
    )
