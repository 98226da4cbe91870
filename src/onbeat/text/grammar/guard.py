"""Tries grammars in a process of its own, before an engine sees them.

The library has limits of its own, but a text of forty bytes can still take it ten seconds, and a long chain
of references ends the process that compiles it. A grammar that passes here, with a quarter of the engine's
stack, does neither there.

`python -m onbeat.text.grammar.guard SECONDS NICENESS` is the process.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from random import Random
from statistics import fmean
from typing import Any, TypeVar

from msgspec import convert, msgpack

from onbeat.core.errors import Overloaded
from onbeat.core.request import Grammar
from onbeat.core.tokenizer import Tokenizer
from onbeat.text.grammar.compiler import GrammarCompiler, Vocabulary, ignored_keywords, refusal
from onbeat.text.grammar.guide import GrammarTooComplex, Guide
from onbeat.text.grammar.limits import TooComplex, check_limits, check_size
from onbeat.text.limited_process import Answer, Ended, LimitedProcess, serve

_T = TypeVar("_T")

MAX_SECONDS = 1.0
"""Most processor time of a trial. Schemas of 180 kB take a quarter of it."""
MAX_BYTES = 512 << 20
"""Most memory of a trial, beside the vocabulary."""
STACK_BYTES = 16 << 20
NICENESS = 5
"""A trial must not hold up steps that run on the same cores, nor its request for long."""
MOST_KNOWN = 4096
NUM_STEPS = 64
MAX_MASK_SECONDS = 0.005
"""That finding the next tokens may take: a step has many rows, and all of them wait for it."""
MOST_TRIES, DOUBTFUL = 6, 8
"""How often it is timed again, and, after the first time, if it took how many times as long at most: a busy
machine slows it down."""
_STRUCTURE = ('"', ",", "{", "[", ":", "1", " ", "]", "}")
"""Texts that lead a trial through JSON, where chance alone would stay inside of its first text."""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What came of a trial."""

    ignored: tuple[str, ...] = ()
    """Keywords of a schema that are not enforced."""
    problem: str | None = None
    """Why it is refused."""
    code: str = "invalid_value"
    seconds: float = 0.0
    """What a token of it took on average."""


TokenText = list[int]
"""Tokens of a byte each; none where the vocabulary has no such token."""
Spell = Callable[[str], TokenText]


class GrammarGuard:
    """Says whether grammars can be enforced, and remembers it. Threads may share it.

    Parameters
    ----------
    tokenizer : the model's; read when the first grammar comes.
    vocab_size : of the model.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._process: LimitedProcess | None = None
        self._is_closed = False
        self._starting = threading.Lock()
        self._lock = threading.Lock()
        """Of what is known; an event loop takes it, so that nobody holds it for long."""
        self._known: OrderedDict[str, TrialResult] = OrderedDict()

    def known(self, grammar: Grammar) -> TrialResult | None:
        """Return what is known of a grammar that was tried."""
        with self._lock:
            verdict = self._known.get(grammar.key)
            if verdict is not None:
                self._known.move_to_end(grammar.key)
            return verdict

    def warm_up(self) -> None:
        """Start the process: the first grammar would wait for that for up to a second."""
        with suppress(Ended, Overloaded):  # which is told when a grammar comes
            self._started()

    def check(self, grammar: Grammar) -> TrialResult:
        """Try a grammar, unless it is known; takes some milliseconds."""
        verdict = self.known(grammar)
        if verdict is None:
            try:
                verdict = self._keep(grammar, self._tried(grammar))
            except Ended as error:
                verdict = TrialResult(
                    problem=f"the grammar is too complex: trying it {error}. Make it simpler",
                    code="grammar_too_complex",
                )
                if not error.was_killed:
                    self._keep(grammar, verdict)
        return verdict

    def close(self) -> None:
        """End the process; none is started any more."""
        self._is_closed = True
        if self._process is not None:
            self._process.close()

    def _keep(self, grammar: Grammar, verdict: TrialResult) -> TrialResult:
        with self._lock:
            self._known[grammar.key] = verdict
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
        return verdict

    def _tried(self, grammar: Grammar) -> TrialResult:
        try:
            check_size(grammar.text)
            reply = self._started().ask(grammar.text.encode("utf-8", "surrogatepass"))
        except TooComplex as error:
            return TrialResult(problem=str(error), code=error.code)
        return convert(reply, TrialResult)

    def _started(self) -> LimitedProcess:
        with self._starting:
            if self._is_closed:
                raise Ended("was given up: the server stops", was_killed=True)
            if self._process is None:
                self._process = LimitedProcess(
                    "onbeat.text.grammar.guard",
                    msgpack.encode((self._vocab_size, Vocabulary.of(self._tokenizer, self._vocab_size))),
                    max_seconds=MAX_SECONDS,
                    niceness=NICENESS,
                )
                self._process.start()
            return self._process


def _open(opening: bytes) -> tuple[dict[str, Any], Answer | None]:
    """Make a compiler of the vocabulary."""
    vocab_size, vocabulary = msgpack.decode(opening, type=tuple[int, Vocabulary])
    texts = vocabulary.token_bytes
    compiler = GrammarCompiler(vocabulary, vocab_size, room=1)
    bytes_to_id = {text: token_id for token_id, text in enumerate(texts) if len(text) == 1}

    def spell(text: str) -> TokenText:
        ids = [bytes_to_id.get(bytes([byte]), -1) for byte in text.encode("utf-8", "surrogatepass")]
        return [] if -1 in ids else ids

    threading.stack_size(STACK_BYTES)
    return {}, lambda question: _in_thread(
        lambda: _trial(compiler, spell, question.decode("utf-8", "surrogatepass"))
    )


def _in_thread(work: Callable[[], TrialResult]) -> dict[str, Any]:
    """Do work with the stack that threads have."""
    done: list[TrialResult] = []
    thread = threading.Thread(target=lambda: done.append(work()))
    thread.start()
    thread.join()
    return asdict(done[0])


def _trial(compiler: GrammarCompiler, spell: Spell, text: str) -> TrialResult:
    """Hold a grammar against the limits, compile it, and go some steps."""
    try:
        names = [spell(f"{json.dumps(name)}:") for name in check_limits(text)]
        matcher = compiler.matcher(Grammar.of(text))
        if matcher.is_error():
            problem = refusal(matcher.get_error())
            return TrialResult(problem=str(problem), code=problem.code)
        ignored = ignored_keywords(matcher.get_grammar_warnings())
        seconds = _walk(compiler.guide_of(matcher), names, [*map(spell, _STRUCTURE)])
    except TooComplex as error:
        return TrialResult(problem=str(error), code=error.code)
    except (GrammarTooComplex, MemoryError) as error:
        why = "it takes too much memory" if isinstance(error, MemoryError) else error
        return TrialResult(problem=f"the grammar is too complex: {why}", code="grammar_too_complex")
    return TrialResult(ignored, seconds=seconds)


def _walk(guide: Guide, names: list[TokenText], structure: list[TokenText]) -> float:
    """Go some steps; return what one took on average, seconds.

    Parameters
    ----------
    names : the last property of each object: a step takes the first that may come.
    structure : one of these comes in half of the other steps, and else a token by chance.
    """
    chance, took = Random(0), [0.0]
    for _ in range(NUM_STEPS):
        before = guide.copy()
        allowed, seconds = _timed(guide.allowed)
        for num_tried in range(MOST_TRIES):
            # Most of it is known the second time, so that the first alone tells nothing.
            if seconds <= MAX_MASK_SECONDS or (num_tried and seconds >= DOUBTFUL * MAX_MASK_SECONDS):
                break
            seconds = min(seconds, _timed(before.copy().allowed)[1])
        if seconds > MAX_MASK_SECONDS:
            raise TooComplex(
                f"finding the next tokens of the grammar takes more than {MAX_MASK_SECONDS * 1e3:g} ms; "
                "make it simpler"
            )
        if not len(allowed) or guide.is_complete:
            break
        texts = [*names, *chance.sample(structure, len(structure) * chance.randint(0, 1))]
        text = next((text for text in texts if _may_come(guide, text)), None)
        names = [name for name in names if name is not text]
        wanted = text or [int(chance.choice(allowed))]
        took.append(seconds + _timed(partial(guide.consume, wanted))[1] / len(wanted))
    return fmean(took)


def _may_come(guide: Guide, token_ids: TokenText) -> bool:
    """Whether a text may come without ending the grammar; it has not come."""
    twin = guide.copy()
    return bool(token_ids) and twin.consume(token_ids) == len(token_ids) and not twin.is_complete


def _timed(work: Callable[[], _T]) -> tuple[_T, float]:
    """Return what work returns, and its processor time in seconds."""
    start = time.thread_time()
    return work(), time.thread_time() - start


if __name__ == "__main__":
    serve(_open, max_bytes=MAX_BYTES)
