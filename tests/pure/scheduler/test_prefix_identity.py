"""Hashes of prefix blocks: what is another prefix, or has another salt, has another hash."""

from __future__ import annotations

import struct
from itertools import count

from onbeat.core.hashing import hash_blocks, root_hash
from onbeat.core.request import Adapter, Request

BLOCK_SIZE = 16
PROMPT = list(range(BLOCK_SIZE))


def as_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def salt_that_spells_a_block() -> tuple[str, str]:
    """Return a salt, and the text of what the next block of a prompt with that salt is hashed from."""
    tokens = struct.pack(f"{BLOCK_SIZE}I", *PROMPT)
    for number in count():  # one in some 5,600 hashes is valid UTF-8
        salt = f"s{number}"
        (first,) = hash_blocks(root_hash(salt), PROMPT, BLOCK_SIZE)
        if (text := as_text(first + tokens)) is not None:
            return salt, text
    raise AssertionError


def test_no_salt_makes_the_root_of_its_prompts_equal_to_a_block_of_another_salt() -> None:
    salt, forged = salt_that_spells_a_block()
    second = hash_blocks(root_hash(salt), PROMPT * 2, BLOCK_SIZE)[1]
    assert root_hash(forged) != second


def test_adapters_have_roots_of_their_own() -> None:
    adapters = [None, *(Adapter(name, "path", number) for name, number in (("a", 1), ("a", 2), ("b", 3)))]
    requests = [
        Request(request_id="x", prompt_token_ids=PROMPT, cache_salt=salt, adapter=adapter)
        for adapter in adapters
        for salt in (None, "1", "a")
    ]
    roots = [root_hash(each.cache_salt, each.adapter) for each in requests]
    assert len(set(roots)) == len(requests)
    assert roots[0] == root_hash()


def test_salts_have_roots_of_their_own() -> None:
    assert len({root_hash(), root_hash("a"), root_hash("b")}) == 3
    assert hash_blocks(root_hash("a"), PROMPT, BLOCK_SIZE) != hash_blocks(root_hash(), PROMPT, BLOCK_SIZE)
