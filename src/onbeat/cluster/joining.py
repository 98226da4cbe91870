"""What keeps a process that has started from serving with the others, or from moving streams with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onbeat.cluster.life import Life
from onbeat.core.errors import ConfigError, KVUnavailable
from onbeat.core.fleet import ReplicaId
from onbeat.version import __version__


def check_node(host: str, version: str) -> None:
    """Raise ConfigError where a node has another onbeat than this process."""
    if version != __version__:
        raise ConfigError(
            f"the node {host} has onbeat {version}, and this server has {__version__}; install the same on "
            "all nodes"
        )


def other_version(life: Life) -> str | None:
    """Return why a process cannot join that runs another onbeat than this one; None where it is the same."""
    if life.version == __version__:
        return None
    other = f"onbeat {life.version[:40]}" if life.version else "an onbeat that does not say its version"
    return (
        f"{life.replica} runs {other}, and this server {__version__}: the package was changed while the "
        "server ran. Restart the server, or install that version again"
    )


def other_files(replica: ReplicaId, loaded: Mapping[str, str], first: Mapping[str, str]) -> str | None:
    """Return why a process cannot join that has loaded other files than the first one; None if the same.

    Parameters
    ----------
    loaded, first : `EngineInfo.file_digests` of both.
    """
    if loaded == first:
        return None
    changed = sorted({name for name, _ in loaded.items() ^ first.items()})
    return (
        f"{replica} has loaded another {', '.join(changed[:3])} than the server began with: the model's "
        "files were changed while it ran. Restart the server to serve them, or put the old ones back"
    )


def other_blocks(life: Life, lives: Iterable[Life]) -> str | None:
    """Return how the KV blocks of a replica differ from those of the first; None where they do not."""
    others = [each for each in lives if each is not life and each.kv_layout is not None]
    if life.kv_layout is None or not others:
        return None
    first = min(others, key=lambda each: each.replica_number)
    assert first.kv_layout is not None
    try:
        life.kv_layout.check_same(first.kv_layout)
    except KVUnavailable as error:
        return f"compared with {first.replica}, its {error}"
    return None
