"""`onbeat models`: list the known models, fetch one, print its path."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from onbeat.cli.outputs import result_console
from onbeat.hub.files import FetchStatus, OnFetch
from onbeat.hub.known import DEFAULT_MODEL, KNOWN_MODELS, KnownModel, cached_file, models_dir
from onbeat.hub.resolve import resolve_model
from onbeat.perfmodel.model_spec import find_model_spec, packaged_configs
from onbeat.perfmodel.precision import Precision
from onbeat.report.result import Column, filled_table
from onbeat.report.units import short


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of the command; without one it lists."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser("list", help="list the known models, and what others take (the default)")
    fetch = actions.add_parser("fetch", help="fetch a model into the cache")
    fetch.add_argument("model", metavar="NAME", help="a known model's name or a hub id (owner/name[:TAG])")
    path = actions.add_parser("path", help="print where a model lies, without fetching it")
    path.add_argument("model", metavar="NAME", help="a known model's name or a hub id (owner/name[:TAG])")


def run(args: argparse.Namespace) -> int:
    """Do the action; return the exit code."""
    if args.action == "fetch":
        with show_progress() as progress:
            files = resolve_model(args.model, progress=progress)
        print(files.path)
    elif args.action == "path":
        print(resolve_model(args.model, offline=True).path)
    else:
        _print_table()
    return 0


@contextmanager
def show_progress() -> Iterator[OnFetch]:
    """Show a fetch on standard error: a line for each new message, a bar while bytes arrive."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:>12}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    # Without a terminal rich would write an empty line for the bar.
    with ProgressBar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:

        def show(status: FetchStatus) -> None:
            if status.bytes_total is None:
                console.print(status.message, highlight=False, soft_wrap=True)
                return
            if status.message not in tasks:
                tasks[status.message] = bar.add_task(status.message, total=status.bytes_total)
            bar.update(tasks[status.message], completed=status.bytes_done)

        yield show


_COLUMNS = (
    *(Column("", "Name", str), Column("", "Parameters"), Column("", "Size")),
    *(Column("", "License", str), Column("", "Cached", str)),
)


def _print_table() -> None:
    console = result_console()
    console.print(filled_table(_COLUMNS, map(_row, KNOWN_MODELS.values())))
    for model in KNOWN_MODELS.values():
        default = " (served when no model is named)" if model.name == DEFAULT_MODEL else ""
        lines = f"{model.name}{default}: {model.summary}\n  license: {model.license_url}"
        console.print(lines, highlight=False, soft_wrap=True)
    print_sizes(console)
    console.print(f"Cache: {models_dir()}", highlight=False, soft_wrap=True)
    console.print("Fetch one: onbeat models fetch NAME. Serve one: onbeat serve NAME.", highlight=False)


_SIZES = (
    *(Column("", "Model of the hub", str), Column("", "Parameters"), Column("", "Active")),
    *(
        Column("", "16 bits"),
        Column("", "4 bits"),
        Column("", "KV of 1,000 tokens"),
        Column("", "State of a request"),
        Column("", "Runs by", str),
    ),
)


def print_sizes(console: Console) -> None:
    """Print the models whose sizes are known: what weights and KV take, and which engines run them."""
    from onbeat.engine.model_config.families import FAMILIES  # which reads tables that no other action needs

    own = {family.model_type for family in FAMILIES.values()}
    in_16_bits, in_4_bits = Precision(), Precision(weights="int4", group=32)
    rows = []
    for config in packaged_configs().values():
        spec = find_model_spec(config["hub_ids"][0])
        rows.append(
            (
                config["hub_ids"][0],
                f"{short(spec.num_parameters / 1e9)}B",
                f"{short(spec.num_active_parameters / 1e9)}B",
                f"{short(spec.weight_bytes(in_16_bits) / 1e9)} GB",
                f"{short(spec.weight_bytes(in_4_bits) / 1e9)} GB",
                f"{short(spec.kv_bytes_per_token(in_16_bits) / 1e3)} MB",
                f"{short(spec.state_bytes / 1e6)} MB" if spec.state_bytes else "none",
                "own engines" if config["model_type"] in own else "vLLM",
            )
        )
    console.print(filled_table(_SIZES, sorted(rows, key=lambda row: row[0].lower())))


def _row(model: KnownModel) -> tuple[str, ...]:
    return (
        model.name,
        f"{model.num_parameters / 1e6:.0f}M",
        f"{model.file_bytes / 1e6:.0f} MB",
        model.license_name,
        "yes" if cached_file(model) else "no",
    )
