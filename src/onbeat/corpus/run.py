"""Embed a corpus: what is left of it, so many requests at once, each line written once."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp

from onbeat.core.errors import ConfigError
from onbeat.corpus.lines import Text, read_texts
from onbeat.corpus.output import Embeddings
from onbeat.corpus.sender import Endpoint, Sender, TextRefused

MOST_REFUSED_AT_FIRST = 100
"""Texts that are refused before any is taken: then it is not the texts."""


class CorpusProgress(Protocol):
    """Shows how far a run is."""

    def begin(self, num_texts: int, num_done: int) -> None:
        """Hear how many texts there are, and how many of them an earlier run has done."""
        ...

    def advance(self, num_texts: int, num_tokens: int, problem: str) -> None:
        """Hear that texts are done; of none, that some are sent again.

        Parameters
        ----------
        num_tokens : of all texts of this run.
        problem : why the server does not take texts now; empty where it does.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusJob:
    """What is to be embedded, and how."""

    path: Path
    out: Path
    field: str = "text"
    batch_size: int = 16
    """Texts of one request."""
    concurrency: int = 4
    """Requests at once."""


@dataclass(slots=True)
class CorpusOutcome:
    """What became of a corpus."""

    num_texts: int
    num_done: int
    """Those of earlier runs included."""
    refused: list[tuple[int, str]]
    """(line, why) of texts that the server does not take."""


class CorpusRun:
    """Embeds what is left of a corpus.

    Parameters
    ----------
    job : which corpus.
    endpoint : the server.
    progress : is told of what is done.
    """

    def __init__(self, job: CorpusJob, endpoint: Endpoint, progress: CorpusProgress) -> None:
        self._job = job
        self._endpoint = endpoint
        self._progress = progress
        self.outcome = CorpusOutcome(0, 0, [])

    async def run(self) -> CorpusOutcome:
        """Embed all texts that are not done yet.

        Raises
        ------
        ConfigError : a line, the output or the endpoint is wrong; the first is found before anything is sent.
        OnbeatError : the server takes nothing for too long, or the output cannot be written.
        """
        job, outcome = self._job, self.outcome
        with Embeddings(job.out) as output:
            digests = array("Q")
            for text in read_texts(job.path, job.field):
                digests.extend([0] * (text.line - len(digests)))
                digests.append(text.digest)
            done = output.done(digests)
            outcome.num_texts, outcome.num_done = len(digests) - digests.count(0), sum(done)
            self._progress.begin(outcome.num_texts, outcome.num_done)
            if outcome.num_done < outcome.num_texts:
                await self._embed_all(self._batches(done), output)
        outcome.refused.sort()
        return outcome

    async def _embed_all(self, batches: Iterator[list[Text]], output: Embeddings) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=self._endpoint.patience)
        headers = {"Content-Type": "application/json", **self._endpoint.headers}
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
            sender = Sender(session, self._endpoint, self._progress.advance)

            async def work() -> None:
                for batch in batches:
                    await self._embed(batch, sender, output)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self._job.concurrency, self.outcome.num_texts)):
                        group.create_task(work())
            except ExceptionGroup as errors:  # one is enough to end the run
                raise errors.exceptions[0] from None

    async def _embed(self, texts: list[Text], sender: Sender, output: Embeddings) -> None:
        """Embed and write texts; halves of them where the server does not take one."""
        try:
            embeddings = await sender.embed(texts)
        except TextRefused as refusal:
            if len(texts) > 1:
                middle = len(texts) // 2
                await self._embed(texts[:middle], sender, output)
                await self._embed(texts[middle:], sender, output)
                return
            self._refuse(texts[0], str(refusal), sender)
        else:
            output.write(texts, embeddings, sender.model)
            self.outcome.num_done += len(texts)
            self._progress.advance(len(texts), sender.num_tokens, sender.problem)

    def _refuse(self, text: Text, why: str, sender: Sender) -> None:
        self.outcome.refused.append((text.line, why))
        if not sender.num_tokens and len(self.outcome.refused) >= MOST_REFUSED_AT_FIRST:
            raise ConfigError(
                f"{self._endpoint.url} takes none of the first {MOST_REFUSED_AT_FIRST} texts: {why}"
            )

    def _batches(self, done: Sequence[int]) -> Iterator[list[Text]]:
        batch: list[Text] = []
        for text in read_texts(self._job.path, self._job.field):
            if done[text.line]:
                continue
            batch.append(text)
            if len(batch) == self._job.batch_size:
                yield batch
                batch = []
        if batch:
            yield batch
