"""Find a model in Hugging Face's cache, or download it from the hub."""

from __future__ import annotations

import glob
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onbeat.core.errors import ModelLoadError
from onbeat.hub.files import FetchStatus, Progress, missing_from
from onbeat.hub.gguf_files import choose_gguf, no_model

_PATTERNS = ("*.json", "*.jinja", "tokenizer.model")
_WEIGHTS = ("*.safetensors",)
_IGNORED = ("*/*", "consolidated*")
"""Folders hold other formats' copies; `consolidated` files are Mistral's second copy."""
_CONNECT_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the hub as its user names it."""

    id: str
    """`owner/name`."""
    tag: str | None = None
    """Which GGUF file of it, such as `Q4_K_M`; None takes safetensors where there are any."""
    revision: str | None = None
    """Branch, tag or commit; None is the main branch."""

    def __str__(self) -> str:
        return self.id if self.tag is None else f"{self.id}:{self.tag}"


def find_on_hub(model: HubModel, *, offline: bool | None, needs_weights: bool, progress: Progress) -> Path:
    """Return the directory of a hub model's files, or its GGUF file (of several parts the first).

    Parameters
    ----------
    offline : True looks into the cache alone; None does as `HF_HUB_OFFLINE` says.
    needs_weights : False leaves the weights where they are.

    Raises
    ------
    ModelLoadError : not in the cache and the hub is unreachable, or the model is not there or not readable.
    """
    import huggingface_hub.errors
    from huggingface_hub import constants

    is_offline = bool(offline or (offline is None and constants.HF_HUB_OFFLINE))
    cached = _cached(huggingface_hub, model, needs_weights=needs_weights, is_offline=is_offline)
    if cached is not None:
        return cached
    if is_offline:
        mode, cure = "", f"fetch it with `onbeat models fetch {model}`"
        if not offline:
            mode, cure = " and offline mode is on", "unset HF_HUB_OFFLINE to download it"
        raise ModelLoadError(
            f"the model '{model}' is not in the cache {constants.HF_HUB_CACHE}{mode}; {cure}, or pass a "
            "directory or a .gguf file"
        )
    files = _files_on_hub(huggingface_hub, model)
    chosen = _choose(model, files, needs_weights=needs_weights)
    for name in files if chosen else ():
        if what := no_model(name):
            progress(FetchStatus(f"{name} is left out: it holds {what}"))
    progress(FetchStatus(f"fetching {', '.join(chosen) or model} from {constants.ENDPOINT}"))
    wanted: dict[str, Any] = {"allow_patterns": [glob.escape(name) for name in chosen]}
    if not chosen:
        weights = _WEIGHTS if needs_weights else ()
        wanted = {"allow_patterns": [*_PATTERNS, *weights], "ignore_patterns": list(_IGNORED)}
    try:
        path = _snapshot(huggingface_hub, model, etag_timeout=_CONNECT_TIMEOUT, **wanted)
    except Exception as error:
        raise _explained(error, model) from error
    return path / chosen[0] if chosen else path


def _snapshot(hub: Any, model: HubModel, **options: Any) -> Path:
    return Path(hub.snapshot_download(repo_id=model.id, revision=model.revision, **options))


def _cached(hub: Any, model: HubModel, *, needs_weights: bool, is_offline: bool) -> Path | None:
    try:
        # Asked for no file in particular, for newer clients refuse a snapshot that is there in part.
        path = _snapshot(hub, model, local_files_only=True, allow_patterns=[])
    except hub.errors.LocalEntryNotFoundError:
        return None
    except hub.errors.HFValidationError as error:
        raise ModelLoadError(f"{model.id!r} is no valid hub id: {error}") from error
    if model.tag is None and not missing_from(path, weights=needs_weights):
        return path
    files = [file.relative_to(path).as_posix() for file in path.rglob("*.gguf")]
    if not files:
        return None
    try:
        return path / choose_gguf(files, model.tag, source=f"the cached part of {model.id}")[0]
    except ModelLoadError:
        if is_offline:
            raise
        return None


def _choose(model: HubModel, files: Sequence[str], *, needs_weights: bool) -> list[str]:
    """Return the GGUF files to fetch; none where a Hugging Face checkpoint is meant."""
    suffixes = (".safetensors", ".bin", ".pt", ".pth") if needs_weights else (".json",)
    is_hf = "config.json" in files and any(name.endswith(suffixes) for name in files)
    if model.tag is None and (is_hf or not any(name.endswith(".gguf") for name in files)):
        return []
    return choose_gguf(files, model.tag, source=f"the hub's {model.id}")


def _files_on_hub(hub: Any, model: HubModel) -> list[str]:
    """Ask for the model's record, in seconds: the client's own retries take minutes where nothing answers."""
    failure: list[Exception] = []
    files: list[str] = []

    def ask() -> None:
        try:
            info = hub.HfApi().model_info(model.id, revision=model.revision, timeout=_CONNECT_TIMEOUT)
            files.extend(file.rfilename for file in info.siblings or ())
        except Exception as error:
            failure.append(error)

    # A thread, because looking up a host's name has no timeout of its own.
    thread = threading.Thread(target=ask, name="onbeat-hub-probe", daemon=True)
    thread.start()
    thread.join(_CONNECT_TIMEOUT + 2.0)
    if thread.is_alive():
        failure.append(TimeoutError(f"no answer in {_CONNECT_TIMEOUT + 2.0:.0f} s"))
    if failure:
        raise _explained(failure[0], model) from failure[0]
    return files


def _explained(error: Exception, model: HubModel) -> ModelLoadError:
    # Compared by name along the class's ancestors: the client has changed its HTTP library more than
    # once, and a gated repository's error is a subclass of the missing one's.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return ModelLoadError(
            f"the model '{model.id}' is gated: accept its terms on its hub page, then set HF_TOKEN to your "
            "access token"
        )
    if "RevisionNotFoundError" in kinds:
        return ModelLoadError(f"the hub's model '{model.id}' has no revision {model.revision!r}")
    if "RepositoryNotFoundError" in kinds:
        return ModelLoadError(
            f"the hub has no model '{model.id}', or it is private; check the name, or set HF_TOKEN to your "
            "access token"
        )
    return ModelLoadError(
        f"the model '{model}' is not in the cache and the hub cannot be reached "
        f"({type(error).__name__}: {error}); "
        "check the network, or pass a directory or a .gguf file"
    )
