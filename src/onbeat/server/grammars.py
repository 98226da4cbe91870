"""What an answer must match: from the fields of a body to a grammar that can be enforced."""

from __future__ import annotations

from onbeat.core.errors import InvalidRequest, RequestRejected
from onbeat.metrics.counts import GrammarCounts
from onbeat.server.fair_threads import MOST_SHORT_WORK, FairThreads
from onbeat.server.middleware import HttpContext
from onbeat.server.structured import Constraint
from onbeat.text.grammar.guard import GrammarGuard
from onbeat.text.grammar.limits import MOST_LEVELS


class GrammarDesk:
    """Takes grammars from bodies, and refuses those that cannot be enforced.

    Parameters
    ----------
    guard : tries them.
    counts : told of refusals.
    is_needed : whether the model writes answers, so that a grammar may come.
    """

    def __init__(self, guard: GrammarGuard, counts: GrammarCounts, *, is_needed: bool = True) -> None:
        self._guard = guard
        self._counts = counts
        self._is_needed = is_needed
        # One process tries, so one thread waits for it; grammars that are known do not.
        self._threads = FairThreads("onbeat-grammar", num_threads=1, num_short=1)

    async def warm_up(self) -> None:
        """Start the process that tries grammars, so that the first one does not wait for it."""
        if self._is_needed:
            await self._threads.run("", MOST_SHORT_WORK + 1, self._guard.warm_up)

    def close(self) -> None:
        """Let go of threads and process."""
        self._threads.close()
        self._guard.close()

    async def take(self, constraint: Constraint | None, context: HttpContext) -> None:
        """Give a request's context what its answer must match, and name the keywords that are ignored.

        Raises
        ------
        InvalidRequest : it cannot be enforced.
        """
        if constraint is None:
            return
        try:
            await self._take(constraint, context)
        except InvalidRequest as error:
            self._counts.refuse(error.code)
            raise

    async def _take(self, constraint: Constraint, context: HttpContext) -> None:
        caller, field = context.caller, constraint.field
        try:
            grammar = await self._threads.run(caller, 1, constraint.make)
        except RecursionError as error:
            raise InvalidRequest(
                f"{field}: the schema is nested deeper than {MOST_LEVELS} levels; flatten it",
                param=field,
                code="grammar_too_complex",
            ) from error
        except RequestRejected as error:
            raise InvalidRequest(f"{field}: {error}", param=field, code=error.code) from error
        verdict = self._guard.known(grammar)
        if verdict is None:
            size = MOST_SHORT_WORK + len(grammar.text)
            verdict = await self._threads.run(caller, size, lambda: self._guard.check(grammar))
        if verdict.problem is not None:
            raise InvalidRequest(f"{field}: {verdict.problem}", param=field, code=verdict.code)
        context.ignored_fields += [f"{field}.{keyword}" for keyword in verdict.ignored]
        context.grammar = grammar
