"""`onbeat bench chaos`: whether a server delivers each token once, whatever happens to it."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from onbeat.bench.bench_config import TargetConfig
from onbeat.bench.chaos import TIMEOUT, Chaos, ChaosPlan, ChaosRun
from onbeat.bench.client import key_headers, why_no_answer
from onbeat.bench.history import End, ObservedAnswer, Violation, counts, save, violations
from onbeat.bench.probe import choose_model, read_models
from onbeat.cli.args import server_root
from onbeat.cli.options import add_options, read_options
from onbeat.cli.outputs import check_writable, result_console
from onbeat.core.errors import ConfigError, counted
from onbeat.core.options import check, option, part
from onbeat.report.result import Column, filled_table

VIOLATED = 3
MOST_SHOWN = 20
_option = partial(option, group="chaos")
_MEANING = {
    End.WHOLE: "every token once, one end",
    End.CANCELLED: "broken off by this client",
    End.FAILED: "the server said so",
    End.REFUSED: "before anything was answered",
    End.CUT: "the connection ended; the client knows",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """What is done to the server."""

    model: str | None = _option(None, help="model to ask for (default: the server's first)")
    plan: ChaosPlan = part(ChaosPlan)
    history: Path | None = _option(None, metavar="FILE.jsonl", help="write every request and its answer")

    def __post_init__(self) -> None:
        check(self, ChaosOptions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the sub-command."""
    parser.add_argument(
        "url", metavar="URL", nargs="?", default="http://127.0.0.1:8000", help="the server's address"
    )
    add_options(parser, ChaosOptions)


def run(args: argparse.Namespace) -> int:
    """Disturb and check; return 0 if nothing is wrong, else 3."""
    options, root = read_options(args, ChaosOptions), server_root(args.url)
    check_writable({"--history": options.history})
    console = result_console(highlight=False)
    result = asyncio.run(_run(root, options, Console(stderr=True)))
    if options.history is not None:
        save(options.history, result.exchanges, result.known)
    return _report(result, console)


async def _run(root: str, options: ChaosOptions, console: Console) -> ChaosRun:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(headers=key_headers(), connector=connector, timeout=TIMEOUT) as session:
        model = options.model or await _first_model(session, root)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[said]}"),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("chaos", total=options.plan.seconds, said="")
            ended = 0

            def tell(exchange: ObservedAnswer) -> None:
                nonlocal ended
                ended += 1
                progress.update(task, completed=exchange.ended, said=counted(ended, "request"))

            chaos = Chaos(session, root, model, options.plan, tell)
            await chaos.learn()
            await chaos.run()
            await chaos.settle()
            return chaos.result


async def _first_model(session: aiohttp.ClientSession, root: str) -> str:
    try:
        async with session.get(f"{root}/v1/models") as response:
            if response.status != 200:
                raise ConfigError(f"{root}/v1/models answers {response.status}; name the model with --model")
            target = TargetConfig(base_url=root)
            return choose_model(target, await read_models(f"{root}/v1/models", response))
    except aiohttp.ClientError as error:
        problem = why_no_answer(error)
        raise ConfigError(f"no server answers at {root} ({problem}); start one, or name another") from error


def _report(result: ChaosRun, console: Console) -> int:
    found = counts(result.exchanges)
    rows = [(str(found[end]), end.value, meaning) for end, meaning in _MEANING.items() if found[end]]
    columns = (Column("", "requests"), Column("", "ended", str), Column("", "meaning", str))
    console.print(filled_table(columns, rows))
    if result.kills:
        failed = sum(code != 0 for _, code in result.kills)
        console.print(
            f"the command was run {counted(len(result.kills), 'time')}"
            + (f", {counted(failed, 'time')} it failed" if failed else "")
        )
    if result.unsteady:
        console.print(
            f"{counted(result.unsteady, 'prompt')} left out: undisturbed, two answers to it differed"
        )
    wrong = violations(result.exchanges, result.known)
    if result.still_open:
        wrong.append(
            Violation(-1, f"{counted(result.still_open, 'request')} open long after the client had gone")
        )
    for each in wrong[:MOST_SHOWN]:
        who = f"request {each.exchange}: " if each.exchange >= 0 else ""
        console.print(f"{who}{each.what}", style="red", markup=False)
    if len(wrong) > MOST_SHOWN:
        console.print(f"and {len(wrong) - MOST_SHOWN} more; --history FILE.jsonl has all")
    checked = len(result.exchanges)
    console.print(
        f"{counted(len(wrong), 'violation')} in {counted(checked, 'request')}: "
        + ("tokens were lost, doubled or changed" if wrong else "no token lost, doubled or reordered"),
        style="bold red" if wrong else "bold green",
    )
    return VIOLATED if wrong else 0
