"""What all front ends of a server share: the limits of API keys, open jobs, and answers that are kept.

Whoever decides for all front ends has the books. A front end asks at a `Desk`, here or in another process.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, cast, get_type_hints

import msgspec

from onbeat.core.errors import InvalidRequest, SLOUnattainable
from onbeat.core.request import Placement
from onbeat.jobs.call import CallShare, JobCall, JobEnd, JobReport
from onbeat.jobs.table import JobTable, OpenCall
from onbeat.metrics.counts import JobCounts
from onbeat.server.errors import ApiError, job_unattainable
from onbeat.server.kept_answers import AnswerShelf, KeptAnswers
from onbeat.server.rate_limits import KeyAllowance, KeyMeter
from onbeat.server.slo_defaults import KeyLimits

_CLOCK_STEP = 0.1
"""Seconds by which two clocks part if one was set anew, or the machine has slept."""


Told = dict[int, list[tuple[str, dict[str, Any]]]]
"""What has been told of what is open, by its number: verbs and their arguments."""


class OpenedCall(msgspec.Struct):
    """A call of a job that was opened."""

    number: int
    share: CallShare


class CallEnd(msgspec.Struct):
    """How a call of a job ended."""

    end: float
    num_output_tokens: int
    placement: Placement | None
    failed: JobEnd | None = None
    """Why, if it did not come to its end."""


class Books:
    """The books themselves.

    Parameters
    ----------
    limits : hash of an API key -> its limits.
    on_limited : called with the limit that a refused request has met (metrics).
    jobs : are told of each job that ended.
    """

    def __init__(
        self,
        limits: Mapping[str, KeyLimits],
        on_limited: Callable[[str], None],
        jobs: JobCounts,
    ) -> None:
        self.meters = {key: KeyMeter(each, time.monotonic(), on_limited) for key, each in limits.items()}
        self.job_counts = jobs
        self.table = JobTable(on_end=jobs.end)
        self.answers = KeptAnswers()
        self.since_1970 = 0.0


class Desk:
    """Where one front end opens and closes what is in the books. What it has opened it closes by its number.

    Parameters
    ----------
    show : returns the text of `metrics` and of `state` for all front ends.

    Attributes
    ----------
    answers : where it has answers kept.
    """

    def __init__(self, books: Books, show: Callable[[str], Awaitable[bytes]]) -> None:
        self._books, self._show = books, show
        self.answers = AnswerShelf(books.answers)
        self._numbers = count()
        self._keys: dict[int, KeyAllowance] = {}
        self._calls: dict[int, OpenCall] = {}

    def close(self) -> None:
        """Close what a front end had open that has died: answers that nobody got."""
        self.answers.close()
        for number in list(self._keys):
            self.end_key(number, _LOST, 0, 0)
        for number in list(self._calls):
            self.fail_call(number, CallEnd(time.monotonic(), 0, None, JobEnd.ABANDONED))

    async def show(self, what: str) -> bytes:
        """Return the numbers of all front ends, as `metrics` or `state` has them."""
        return await self._show(what)

    async def key_headers(self, key: str) -> list[tuple[str, str]]:
        """Return what is left of a key's limits, as headers."""
        return list(self._books.meters[key].headers(time.monotonic()))

    async def begin_key(self, key: str, num_bytes: int, number: int | None = None) -> int:
        """Begin a request of a key by the length of its body; see `KeyAllowance`."""
        allowance = KeyAllowance(self._books.meters[key], num_bytes, time.monotonic)
        number = next(self._numbers) if number is None else number
        self._keys[number] = allowance
        return number

    async def take_body(self, number: int, num_bytes: int) -> None:
        """See `KeyAllowance.take_body`; what another keeper began, and this one refused, takes nothing."""
        if number in self._keys:
            self._keys[number].take_body(num_bytes)

    async def take_answers(
        self, number: int, num_prompt_tokens: int, max_tokens: Sequence[int], *, is_stated: bool
    ) -> None:
        """See `KeyAllowance.take_answers`."""
        if number in self._keys:
            self._keys[number].take_answers(num_prompt_tokens, max_tokens, is_stated=is_stated)

    def end_key(self, number: int, status: int, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """See `KeyAllowance.end`."""
        if number in self._keys:
            self._keys.pop(number).end(status, num_prompt_tokens, num_output_tokens)

    async def open_call(
        self,
        call: JobCall,
        arrival: float,
        num_prompt_tokens: int,
        max_tokens: int,
        *,
        refuses: bool,
        number: int | None = None,
    ) -> OpenedCall:
        """Open a call of a job; see `JobTable.open`. Its deadline is in seconds since 1970.

        Raises
        ------
        ApiError : the job is predicted to be late, and its caller prefers to hear so at once (429).
        """
        books = self._books
        if call.deadline is not None:
            since_1970 = time.time() - time.monotonic()
            if abs(since_1970 - books.since_1970) > _CLOCK_STEP:
                books.since_1970 = since_1970
            call = replace(call, deadline=call.deadline - books.since_1970)
        try:
            opened = books.table.open(
                call, arrival, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens, refuses=refuses
            )
        except SLOUnattainable as error:
            raise job_unattainable(error) from error
        finally:
            books.job_counts.num_open = len(books.table)
        number = next(self._numbers) if number is None else number
        self._calls[number] = opened
        return OpenedCall(number, opened.share)

    async def close_call(self, number: int, end: CallEnd) -> JobReport:
        """Close a call; see `JobTable.close`."""
        return self.fail_call(number, end)

    def fail_call(self, number: int, end: CallEnd) -> JobReport:
        """Close a call of which nobody waits to know more."""
        table = self._books.table
        if number not in self._calls:
            return JobReport()  # of a call that another keeper opened, and this one refused
        try:
            return table.close(
                self._calls.pop(number),
                end.end,
                num_output_tokens=end.num_output_tokens,
                why=end.failed,
                placement=end.placement,
            )
        finally:
            self._books.job_counts.num_open = len(table)

    async def answer(self, verb: str, arguments: dict[str, Any]) -> Any:
        """Do what a `remote_desk` asks for."""
        if verb == "show":
            return await self.show(arguments["what"])
        if verb not in _VERBS - {"answer", "close"}:
            raise InvalidRequest(f"nobody is asked for {verb!r}")
        method = getattr(self if hasattr(self, verb) else self.answers, verb)
        hints = get_type_hints(method)
        try:
            found = method(**{name: msgspec.convert(value, hints[name]) for name, value in arguments.items()})
            return {"value": _plain(await found if inspect.isawaitable(found) else found)}
        except ApiError as error:  # whose status only HTTP knows
            return {
                "error": [error.status, str(error), error.code, error.param, error.headers, error.details]
            }


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value, builtin_types=(bytes,))


_VERBS = frozenset(name for kind in (Desk, AnswerShelf) for name in vars(kind) if name[0] != "_")
_OPENING = ("begin_key", "open_call", "take_body", "take_answers")
_CLOSING = ("end_key", "close_call", "fail_call")
_LOST = 500
"""The status of an answer that was lost with its front end."""


def remote_desk(wish: Callable[..., Awaitable[Any]], tell_counts: Callable[[], None], told: Told) -> Desk:
    """Return what calls a desk in another process.

    Parameters
    ----------
    wish : has `Desk.answer` called there, with a verb and named arguments.
    tell_counts : tells what is counted here, before all numbers are shown.
    told : takes what another keeper is to be told again, by the number of what is open.
    """
    return cast(Desk, _RemoteDesk(wish, tell_counts, told))


class _RemoteDesk:
    """Has the methods of a `Desk` and its shelf. Those that return nothing to await are not waited for."""

    def __init__(
        self, wish: Callable[..., Awaitable[Any]], tell_counts: Callable[[], None], told: Told
    ) -> None:
        self._wish, self._tell_counts, self.answers = wish, tell_counts, self
        self._told, self._numbers = told, count()
        self._telling: set[asyncio.Future[Any]] = set()

    async def show(self, what: str) -> bytes:
        self._tell_counts()
        shown: bytes = await self._wish("show", what=what)
        return shown

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        method = getattr(Desk if hasattr(Desk, verb) else AnswerShelf, verb)
        signature, kind = inspect.signature(method), get_type_hints(method)["return"]

        async def ask(*values: Any, **named: Any) -> Any:
            arguments = signature.bind(self, *values, **named).arguments
            del arguments["self"]
            if verb in ("begin_key", "open_call"):
                arguments["number"] = next(self._numbers)
            arguments = _plain(arguments)
            answer = await self._wish(verb, **arguments)
            if verb in _CLOSING:
                self._told.pop(arguments["number"], None)
            elif verb in _OPENING and "error" not in answer:
                self._told.setdefault(arguments["number"], []).append((verb, arguments))
            if "error" in answer:
                status, message, code, param, headers, details = answer["error"]
                raise ApiError(status, message, code=code, param=param, headers=headers, details=details)
            return msgspec.convert(answer["value"], kind)

        def tell(*values: Any, **named: Any) -> None:
            task = asyncio.ensure_future(ask(*values, **named))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

        return ask if inspect.iscoroutinefunction(method) else tell
