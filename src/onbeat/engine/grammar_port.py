"""Grammars of an engine: a thread compiles them before the requests that bring them are queued."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn

from onbeat.core.errors import EngineError, InvalidRequest, Overloaded
from onbeat.core.request import Grammar
from onbeat.engine.container import usable_cores
from onbeat.engine.messages import AddRequest

if TYPE_CHECKING:
    from onbeat.text.grammar.compiler import GrammarCompiler
    from onbeat.text.grammar.guide import Guide

STACK_BYTES = 64 << 20
"""Of the thread that compiles, which goes deeper the deeper a grammar refers to itself. A server's guard
(`text.grammar.guard`) has a quarter, so that what passes there cannot overflow here."""
MOST_COMPILING = 64
"""Grammars that may wait for the thread."""
MOST_MASK_THREADS = 4
"""That find masks: each has a lexer of its own of each grammar that is asked for again."""


def _no_compiler() -> NoReturn:
    raise InvalidRequest("this engine enforces no grammars; send the request without one")


class GrammarPort:
    """Guides of a model's grammars; what these need is made by `warm_up`, or with the first one.

    Parameters
    ----------
    load : makes the compiler; by itself a port has none, and refuses.
    """

    def __init__(self, load: Callable[[], GrammarCompiler] = _no_compiler) -> None:
        self._load = load
        self._compiler: GrammarCompiler | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._seconds: list[float] = []
        """What each grammar took that was compiled since somebody asked."""

    @classmethod
    def of_model(cls, path: Path, vocab_size: int, *, spells: bool) -> GrammarPort:
        """Return the port of a model whose tokenizer lies at a path.

        Parameters
        ----------
        spells : whether text that must come is spelled, for drafts; the tokenizer then stays in memory.
        """
        return cls(partial(_load_compiler, path, vocab_size, spells=spells))

    def warm_up(self) -> None:
        """Have the thread make what the first grammar would wait for.

        Some of that holds the interpreter: for a tenth of a second with a vocabulary of 50,000 tokens, for
        one with 260,000. Call it where no step runs. What fails here is told with the first grammar.
        """
        self._thread().submit(self._loaded)

    def guide(self, grammar: Grammar) -> Guide:
        """Return a guide at the start of a grammar, compiled first where it is not known (any more).

        Raises
        ------
        InvalidRequest : it cannot be enforced.
        """
        return self.cached(grammar) or self.compile(grammar).result()

    def cached(self, grammar: Grammar) -> Guide | None:
        """Return a guide at the start of a grammar that is compiled; None where it is not."""
        compiler = self._compiler
        guide = None if compiler is None else compiler.cached(grammar)
        if compiler is not None and guide is not None and compiler.is_narrow(grammar):
            self._thread().submit(compiler.compile, grammar)  # which others will ask for, too
        return guide

    def prepare(self, grammar: Grammar | None) -> None:
        """Have a grammar compiled, of a request that comes with its KV: it is not to wait for it."""
        if grammar is not None and self.cached(grammar) is None:
            self.compile(grammar)

    def compile(self, grammar: Grammar) -> Future[Guide]:
        """Have a grammar compiled by the thread."""
        return self._thread().submit(self._compiled, grammar)

    def take_seconds(self) -> list[float]:
        """Return what each grammar took that was compiled since the last call."""
        return [self._seconds.pop() for _ in range(len(self._seconds))]  # the thread may add some meanwhile

    def close(self) -> None:
        """Let the thread go; nothing is compiled any more."""
        if self._worker is not None:
            self._worker.shutdown(wait=False, cancel_futures=True)

    def _thread(self) -> ThreadPoolExecutor:
        if self._worker is None:
            self._worker = _with_stack(ThreadPoolExecutor(max_workers=1, thread_name_prefix="onbeat-grammar"))
        return self._worker

    def _compiled(self, grammar: Grammar) -> Guide:
        compiler, start = self._loaded(), perf_counter()
        guide = compiler.compile(grammar)
        self._seconds.append(perf_counter() - start)
        return guide

    def _loaded(self) -> GrammarCompiler:
        """Return the compiler; only the thread calls this."""
        if self._compiler is None:
            self._compiler = self._load()
        return self._compiler


class CompilingRequests:
    """Requests that wait for their grammars, in the order in which they came.

    Parameters
    ----------
    port : compiles.
    ring : lets whoever waits look around; called by the port's thread.
    """

    def __init__(self, port: GrammarPort, ring: Callable[[], None]) -> None:
        self._port = port
        self._ring = ring
        self._waiting: dict[str, tuple[AddRequest, Future[Guide]]] = {}
        self._compiling: dict[str, Future[Guide]] = {}
        """By key of the grammar."""

    @property
    def names(self) -> list[str]:
        """Of the requests that wait."""
        return list(self._waiting)

    def takes(self, message: AddRequest) -> bool:
        """Return whether a request has to wait here.

        Raises
        ------
        Overloaded : too many grammars wait already.
        """
        grammar = message.request.sampling.grammar
        if grammar is None or self._port.cached(grammar) is not None:
            return False
        future = self._compiling.get(grammar.key)
        if future is None:
            if len(self._compiling) >= MOST_COMPILING:
                raise Overloaded(f"{MOST_COMPILING} grammars wait to be compiled already; try again later")
            future = self._compiling[grammar.key] = self._port.compile(grammar)
            future.add_done_callback(lambda _: self._ring())
        self._waiting[message.request.request_id] = message, future
        return True

    def forget(self, request_ids: Collection[str]) -> list[str]:
        """Drop requests that wait no longer, and return which of them did."""
        return [name for name in request_ids if self._waiting.pop(name, None) is not None]

    def take_done(self) -> Iterator[tuple[AddRequest, Exception | None]]:
        """Yield the requests whose grammars are compiled, or why these are not.

        That is `RequestRejected` where the grammar is at fault.
        """
        if not self._waiting and not self._compiling:
            return
        self._compiling = {key: future for key, future in self._compiling.items() if not future.done()}
        for name in [name for name, (_, future) in self._waiting.items() if future.done()]:
            message, future = self._waiting.pop(name)
            error = future.exception()
            if error is not None and not isinstance(error, Exception):  # as libraries in Rust raise it
                error = EngineError(f"{type(error).__name__}: {error}")
            yield message, error


def _load_compiler(path: Path, vocab_size: int, *, spells: bool) -> GrammarCompiler:
    from onbeat.text.grammar.compiler import GrammarCompiler, Vocabulary
    from onbeat.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    vocabulary = Vocabulary.of(tokenizer, vocab_size)
    encode: Callable[[str], list[int]] = partial(tokenizer.encode, add_special_tokens=False)
    num_threads = max(1, min(MOST_MASK_THREADS, usable_cores() // 2))
    return GrammarCompiler(
        vocabulary, vocab_size, encode if spells else lambda _: [], num_threads=num_threads
    )


def _with_stack(worker: ThreadPoolExecutor) -> ThreadPoolExecutor:
    """Start the thread of a worker with a large stack; return the worker."""
    before = threading.stack_size(STACK_BYTES)
    try:
        worker.submit(int)
    finally:
        threading.stack_size(before)
    return worker
