"""How far a plan is, on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from onbeat.planner.plan_task import Progress


@contextmanager
def show_progress(console: Console, *, is_quiet: bool) -> Iterator[Progress]:
    """Show the stage that is under way, and a line for each thing that is found out."""
    if is_quiet:
        yield Progress()
        return
    bar = Bar(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.completed} runs simulated"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    row = bar.add_task("planning", total=None)

    def on_stage(text: str) -> None:
        bar.update(row, description=text)
        if not console.is_terminal:
            on_note(text)

    def on_note(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with bar:
        yield Progress(on_stage=on_stage, on_note=on_note, on_run=lambda: bar.advance(row))
