"""What a model's files hold, in a few bytes: tells whether two processes have loaded the same."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onbeat.core.errors import ConfigError
from onbeat.hub.files import ModelFiles
from onbeat.hub.gguf_files import parts_of

PAGE_BYTES = 4096
MOST_PAGES = 8192
"""Of a file that are read, evenly spread: all of one up to 32 MiB, a page of each 600 kB of one of 5 GB. A
matrix of a layer is larger than that, so that a model with other weights has other pages. Times and inodes do
not count: a cache may write the same file again."""
_SUFFIXES = (".gguf", ".safetensors", ".json", ".model")


@contextmanager
def unchanged(files: ModelFiles) -> Iterator[dict[str, str]]:
    """Fill what the block is given with a digest of each file, by name, once the block has loaded them.

    Raises
    ------
    ConfigError : a file was written or replaced meanwhile, so that nobody knows what was loaded.
    """
    digests: dict[str, str] = {}
    before = _stamps(files)
    yield digests
    digests |= {path.name: _digest(path) for path in before if path.exists()}
    if changed := sorted(path.name for path, _ in before.items() ^ _stamps(files).items()):
        raise ConfigError(
            f"{changed[0]} of the model changed while it was loaded; start again once nobody writes to "
            f"{files.path}"
        )


def _stamps(files: ModelFiles) -> dict[Path, tuple[int, int, int]]:
    """Return the model's files, each with what changes when it does."""
    path = files.path
    found = path.iterdir() if path.is_dir() else map(path.with_name, parts_of(path.name))
    stats = {each: each.stat() for each in sorted(found) if each.suffix in _SUFFIXES and each.is_file()}
    return {each: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for each, stat in stats.items()}


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(b"%d" % size)
        for start in range(0, size, max(size // MOST_PAGES, PAGE_BYTES)):
            digest.update(os.pread(file.fileno(), PAGE_BYTES, start))
    return digest.hexdigest()
