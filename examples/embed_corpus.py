"""Embed a corpus in the time that chats leave, and go on after an interruption.

    python examples/embed_corpus.py CORPUS.jsonl OUT.jsonl

Each line of the corpus is a text in quotes, or an object with `text` and, if it has one, `id`. Each line of
the output holds one embedding, with the number and a digest of its line. Run it again after a kill: it does
what is left. Needs `pip install openai`. OPENAI_BASE_URL and OPENAI_API_KEY name another server and its key.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from openai import AsyncOpenAI, BadRequestError

BATCH_SIZE, CONCURRENCY = 16, 4
"""Texts of one request, and requests at once."""
MOST_RETRIES = 20
"""Of one request; the client waits for as long as the server asks, or twice as long each time."""


class Text(NamedTuple):
    """One line of the corpus."""

    line: int
    text: str
    name: str | int | None
    digest: str


def read_corpus(path: Path) -> Iterator[Text]:
    """Yield the texts of a file; a wrong line ends the program with its number."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                sys.exit(f"{path}:{number}: not JSON: {error}")
            name = value.get("id") if isinstance(value, dict) else None
            text = value.get("text") if isinstance(value, dict) else value
            if not isinstance(text, str) or not text:
                sys.exit(f"{path}:{number}: give a text in quotes, or an object with a field 'text'")
            yield Text(number, text, name, hashlib.sha256(text.encode()).hexdigest()[:16])


def take_up(file: IO[bytes], digests: dict[int, str]) -> set[int]:
    """Return which lines of the corpus the output has; what a kill left of its last line is cut off."""
    done, end = set(), 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        try:
            entry = json.loads(line)
            number, digest = int(entry["line"]), entry["digest"]
        except (ValueError, KeyError, TypeError):
            sys.exit(f"{file.name} holds something else; choose another output")
        if digests.get(number) != digest:
            sys.exit(f"line {number} of the corpus has changed since; choose another output")
        done.add(number)
        end += len(line)
    file.truncate(end)
    return done


async def embed(client: AsyncOpenAI, model: str, texts: list[Text], file: IO[bytes]) -> int:
    """Embed texts and write them; returns how many. Halves tell which text the server refuses."""
    try:
        answer = await client.embeddings.create(
            model=model, input=[each.text for each in texts], extra_body={"slo": {"class": "offline"}}
        )
    except BadRequestError as error:
        if len(texts) == 1:
            print(f"line {texts[0].line} is left out: {error.message}", file=sys.stderr)
            return 0
        middle = len(texts) // 2
        halves = texts[:middle], texts[middle:]
        return sum([await embed(client, model, half, file) for half in halves])
    lines: list[dict[str, Any]] = [
        {"line": each.line, "id": each.name, "digest": each.digest, "embedding": found.embedding}
        for each, found in zip(texts, answer.data, strict=True)
    ]
    file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
    file.flush()
    return len(texts)


async def run(corpus: Path, out: Path) -> int:
    texts = list(read_corpus(corpus))
    with out.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.seek(0)
        done = take_up(file, {each.line: each.digest for each in texts})
        left = [each for each in texts if each.line not in done]
        batches = iter([left[i : i + BATCH_SIZE] for i in range(0, len(left), BATCH_SIZE)])
        client = AsyncOpenAI(
            base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
            api_key=os.environ.get("OPENAI_API_KEY", "unused"),
            max_retries=MOST_RETRIES,
        )
        model = (await client.models.list()).data[0].id

        async def work() -> int:
            return sum([await embed(client, model, batch, file) for batch in batches])

        num_new = sum(await asyncio.gather(*(work() for _ in range(CONCURRENCY))))
    print(f"{len(done) + num_new} of {len(texts)} texts are in {out}")
    return 0 if len(done) + num_new == len(texts) else 1


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(asyncio.run(run(Path(sys.argv[1]), Path(sys.argv[2]))))
