"""Find a model in Hugging Face's cache, or download it from the hub."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from onbeat.core.errors import MissingExtra, ModelLoadError
from onbeat.hub.files import FetchStatus, Progress, missing_from

_PATTERNS = ("*.json", "*.jinja", "tokenizer.model")
_WEIGHTS = ("*.safetensors",)
_IGNORED = ("*/*", "consolidated*")
"""Folders hold other formats' copies; `consolidated` files are Mistral's second copy."""
_CONNECT_TIMEOUT = 5.0


def find_on_hub(
    name: str, *, revision: str | None, offline: bool | None, needs_weights: bool, progress: Progress
) -> Path:
    """Return the directory of a hub model's files.

    Parameters
    ----------
    name : `owner/name`.
    revision : branch, tag or commit; None is the main branch.
    offline : True looks into the cache alone; None does as `HF_HUB_OFFLINE` says.
    needs_weights : False leaves the weights where they are.

    Raises
    ------
    MissingExtra : huggingface_hub is not installed.
    ModelLoadError : not in the cache and the hub is unreachable, or the model is not there or not readable.
    """
    try:
        import huggingface_hub.errors
        from huggingface_hub import constants
    except ImportError as error:
        raise MissingExtra("models of the hub need the serve extra: pip install 'onbeat[serve]'") from error
    wanted: dict[str, Any] = {
        "repo_id": name,
        "revision": revision,
        "allow_patterns": [*_PATTERNS, *(_WEIGHTS if needs_weights else ())],
        "ignore_patterns": list(_IGNORED),
    }
    cached = _cached(huggingface_hub, wanted, needs_weights=needs_weights)
    if cached is not None:
        return cached
    if offline:
        raise ModelLoadError(
            f"the model {name!r} is not in the cache {constants.HF_HUB_CACHE}; fetch it with "
            f"`onbeat models fetch {name}`, or pass a directory or a .gguf file"
        )
    if offline is None and constants.HF_HUB_OFFLINE:
        raise ModelLoadError(
            f"the model {name!r} is not in the cache {constants.HF_HUB_CACHE} and offline mode is on; "
            "unset HF_HUB_OFFLINE to download it, or pass a directory or a .gguf file"
        )
    _check_reachable(huggingface_hub, name, revision)
    progress(FetchStatus(f"fetching {name} from {constants.ENDPOINT}"))
    try:
        return Path(huggingface_hub.snapshot_download(**wanted, etag_timeout=_CONNECT_TIMEOUT))
    except Exception as error:
        raise _explained(error, name, revision) from error


def _cached(hub: Any, wanted: dict[str, Any], *, needs_weights: bool) -> Path | None:
    try:
        path = Path(hub.snapshot_download(**wanted, local_files_only=True))
    except hub.errors.LocalEntryNotFoundError:
        return None
    except hub.errors.HFValidationError as error:
        raise ModelLoadError(f"{wanted['repo_id']!r} is no valid hub id: {error}") from error
    # A snapshot may be there in part (only its tokenizer, say).
    return None if missing_from(path, weights=needs_weights) else path


def _check_reachable(hub: Any, name: str, revision: str | None) -> None:
    """Ask for the model's record, in seconds: the client's own retries take minutes where nothing answers."""
    failure: list[Exception] = []

    def ask() -> None:
        try:
            hub.HfApi().model_info(name, revision=revision, timeout=_CONNECT_TIMEOUT)
        except Exception as error:
            failure.append(error)

    # A thread, because looking up a host's name has no timeout of its own.
    thread = threading.Thread(target=ask, name="onbeat-hub-probe", daemon=True)
    thread.start()
    thread.join(_CONNECT_TIMEOUT + 2.0)
    if thread.is_alive():
        failure.append(TimeoutError(f"no answer in {_CONNECT_TIMEOUT + 2.0:.0f} s"))
    if failure:
        raise _explained(failure[0], name, revision) from failure[0]


def _explained(error: Exception, name: str, revision: str | None) -> ModelLoadError:
    # Compared by name along the class's ancestors: the client has changed its HTTP library more than
    # once, and a gated repository's error is a subclass of the missing one's.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return ModelLoadError(
            f"the model {name!r} is gated: accept its terms on its hub page, then set HF_TOKEN to your "
            "access token"
        )
    if "RevisionNotFoundError" in kinds:
        return ModelLoadError(f"the hub's model {name!r} has no revision {revision!r}")
    if "RepositoryNotFoundError" in kinds:
        return ModelLoadError(
            f"the hub has no model {name!r}, or it is private; check the name, or set HF_TOKEN to your "
            "access token"
        )
    return ModelLoadError(
        f"the model {name!r} is not in the cache and the hub cannot be reached "
        f"({type(error).__name__}: {error}); "
        "check the network, or pass a directory or a .gguf file"
    )
