"""`onbeat embed`: embed a corpus by a running server."""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from onbeat.cli.args import FAILED, INTERRUPTED, key_headers
from onbeat.cli.options import add_options, read_options
from onbeat.cli.top_source import server_root
from onbeat.core.errors import ConfigError
from onbeat.core.options import check, option
from onbeat.corpus.run import CorpusJob, CorpusOutcome, CorpusRun
from onbeat.corpus.sender import Endpoint

MOST_SHOWN = 20
"""Refused texts that are told one by one."""

_option = partial(option, group="embedding")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedOptions:
    """Which server embeds, and how."""

    url: str = _option("http://127.0.0.1:8000", help="address of the server")
    out: Path = _option(
        metavar="OUT.jsonl", help="file of the embeddings; a further run goes on where it ends"
    )
    field: str = _option("text", metavar="NAME", help="field with the text, if lines are objects")
    model: str | None = _option(None, help="model to ask for (default: the server's)")
    batch_size: int = _option(16, at_least=1, metavar="N", help="texts in one request")
    concurrency: int = _option(4, at_least=1, metavar="N", help="requests at once")
    slo_class: str = _option(
        "offline", metavar="NAME", help="class of objectives to ask for; none: send no objectives"
    )
    dimensions: int | None = _option(
        None, at_least=1, metavar="N", help="numbers to keep of each embedding, from the first on"
    )
    encoding: Literal["float", "base64"] = _option("float", help="encoding of embeddings in the output")
    patience_sec: float = _option(
        300.0, metavar="SECONDS", help="longest time without progress before the run gives up"
    )
    disable_tqdm: bool = _option(default=False, is_switch=True, help="show no progress")

    def __post_init__(self) -> None:
        check(self, EmbedOptions)
        if not 0 < self.patience_sec < float("inf"):
            raise ConfigError(f"--patience-sec must be finite and above 0, got {self.patience_sec:g}")

    def endpoint(self) -> Endpoint:
        """Return where texts go; the key of the API is in $OPENAI_API_KEY."""
        return Endpoint(
            root=server_root(self.url),
            model=self.model,
            slo_class=None if self.slo_class == "none" else self.slo_class,
            dimensions=self.dimensions,
            encoding=self.encoding,
            headers=key_headers(),
            patience=self.patience_sec,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE.jsonl",
        help="file with one text a line: a JSON string or an object; gzip too",
    )
    add_options(parser, EmbedOptions)


def run(args: argparse.Namespace) -> int:
    """Embed; returns the exit code."""
    options = read_options(args, EmbedOptions)
    if options.out.absolute() == args.file.absolute():
        raise ConfigError(f"--out is the corpus itself, {args.file}; choose another file")
    console = Console(stderr=True, highlight=False)
    job = CorpusJob(
        path=args.file,
        out=options.out,
        field=options.field,
        batch_size=options.batch_size,
        concurrency=options.concurrency,
    )
    endpoint = options.endpoint()
    with _Bar(console, is_quiet=options.disable_tqdm) as bar:
        corpus = CorpusRun(job, endpoint, bar)
        is_whole = asyncio.run(_until_signal(corpus))
    _tell(console, job, corpus.outcome, is_whole=is_whole)
    if not is_whole:
        return INTERRUPTED
    return FAILED if corpus.outcome.refused else 0


async def _until_signal(corpus: CorpusRun) -> bool:
    """Run until the end, or until a signal says to stop; return whether it came to the end."""
    running = asyncio.create_task(corpus.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, running.cancel)
    with suppress(asyncio.CancelledError):
        await running
    return not running.cancelled()


def _tell(console: Console, job: CorpusJob, outcome: CorpusOutcome, *, is_whole: bool) -> None:
    for line, why in outcome.refused[:MOST_SHOWN]:
        console.print(f"{job.path}:{line}: {why}", markup=False, soft_wrap=True)
    if len(outcome.refused) > MOST_SHOWN:
        console.print(f"and {len(outcome.refused) - MOST_SHOWN} more")
    refused = f", {len(outcome.refused)} refused" if outcome.refused else ""
    again = "" if is_whole else "; run the command again to go on"
    text = f"{outcome.num_done:,} of {outcome.num_texts:,} texts are in {job.out}{refused}{again}"
    console.print(text, markup=False, soft_wrap=True)


class _Bar:
    """The progress bar."""

    def __init__(self, console: Console, *, is_quiet: bool) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=is_quiet,
            refresh_per_second=2,
        )
        self._task = self._bar.add_task("reading", total=None, note="")
        self._start = 0.0

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._bar.stop()

    def begin(self, num_texts: int, num_done: int) -> None:
        """Show how much there is to do."""
        self._start = time.monotonic()
        note = f"{num_done:,} were done before" if num_done else ""
        self._bar.update(self._task, description="embedding", total=num_texts, completed=num_done, note=note)

    def advance(self, num_texts: int, num_tokens: int, problem: str) -> None:
        """Show that texts are done."""
        rate = num_tokens / max(time.monotonic() - self._start, 1e-3)
        note = f"{rate:,.0f} tokens/s" + (f"; sent again: {problem[:60]}" if problem else "")
        self._bar.update(self._task, advance=num_texts, note=note)
