"""The servers: speculation off, adaptive, and of fixed lengths; else the same in every flag."""

from __future__ import annotations

import json
import shlex
from typing import Any

from peers.entries import Entry

from .verdict import ADAPTIVE, OFF

FIXED = (1, 3, 7)
FIXED_WHEN_MANY = (1, 3)
MANY = 8
"""From this concurrency on the longest fixed length, then far from the best, is left out to save time."""
FLAGS = "--max-model-len 2048 --max-num-seqs 32 --kv-cache-memory-bytes 1G --no-log-requests"
# The prompts of a round are the same for all servers and come again in later rounds: no cache may help.
FLAGS += " --no-enable-prefix-caching"


def make_entries(
    model: str | None, extra: str, *, most_drafts: int | None = None, dtype: str | None = None
) -> list[Entry]:
    """Return all servers.

    Parameters
    ----------
    model : None is the embedded one.
    extra : further flags of every server.
    most_drafts : of a request in a step, where their number is adaptive; None is the server's own choice.
    dtype : of weights and arithmetic; None is the server's own choice.
    """
    parts = ["onbeat serve", *([shlex.quote(model)] if model else [])]
    parts += ["--host 127.0.0.1 --port {port}", FLAGS, *([f"--dtype {dtype}"] if dtype else [])]
    command = " ".join([*parts, *([extra] if extra else [])])
    entries = [Entry(name=OFF, about="no speculation", command=command, api="chat")]
    limit = {} if most_drafts is None else {"num_speculative_tokens": most_drafts}
    entries.append(_drafting(ADAPTIVE, command, limit))
    for length in FIXED:
        own = {"num_speculative_tokens": length, "draft_length": "fixed"}
        entries.append(_drafting(fixed_name(length), command, own))
    return entries


def fixed_name(length: int) -> str:
    """Return the name of the server that always drafts so many tokens."""
    return f"fixed {length}"


def names_at(concurrency: int) -> list[str]:
    """Return the servers that take part at a concurrency."""
    lengths = FIXED if concurrency < MANY else FIXED_WHEN_MANY
    return [OFF, ADAPTIVE, *map(fixed_name, lengths)]


def _drafting(name: str, command: str, own: dict[str, Any]) -> Entry:
    config = json.dumps({"method": "ngram"} | own)
    about = ", ".join(f"{key} {value}" for key, value in own.items()) or "defaults"
    return Entry(
        name=name, about=about, command=f"{command} --speculative-config {shlex.quote(config)}", api="chat"
    )
