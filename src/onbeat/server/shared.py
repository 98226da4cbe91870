"""What all front ends of a server share: the limits of API keys, and open jobs.

Whoever decides for all front ends has the books. A front end in the same process asks them at a `Desk`, any
other by `Remote`.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from types import NoneType
from typing import Any, Protocol, TypeVar, get_type_hints

import msgspec

from onbeat.core.errors import InvalidRequest, SLOUnattainable
from onbeat.core.request import Placement
from onbeat.jobs.call import CallShare, JobCall, JobEnd, JobReport
from onbeat.jobs.table import JobTable, OpenCall
from onbeat.metrics.counts import JobCounts
from onbeat.server.errors import ApiError, job_unattainable
from onbeat.server.rate_limits import KeyAllowance, KeyMeter
from onbeat.server.slo_defaults import KeyLimits

_CLOCK_STEP = 0.1
"""Seconds by which two clocks part if one was set anew, or the machine has slept."""


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


class Shared(Protocol):
    """What a front end asks of the books. What it has opened it closes by its number."""

    async def show(self, what: str) -> bytes:
        """Return the numbers of all front ends, as `metrics` or `state` has them."""
        ...

    async def key_headers(self, key: str) -> list[tuple[str, str]]:
        """Return what is left of a key's limits, as headers."""
        ...

    async def begin_key(self, key: str, num_bytes: int) -> int:
        """Begin a request of a key by the length of its body; see `KeyAllowance`."""
        ...

    async def take_body(self, number: int, num_bytes: int) -> None:
        """See `KeyAllowance.take_body`."""
        ...

    async def take_answers(
        self, number: int, num_prompt_tokens: int, max_tokens: Sequence[int], *, is_stated: bool
    ) -> None:
        """See `KeyAllowance.take_answers`."""
        ...

    def end_key(self, number: int, status: int, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """See `KeyAllowance.end`."""
        ...

    async def open_call(
        self, call: JobCall, arrival: float, num_prompt_tokens: int, max_tokens: int, *, refuses: bool
    ) -> OpenedCall:
        """Open a call of a job; see `JobTable.open`. Its deadline is in seconds since 1970.

        Raises
        ------
        ApiError : the job is predicted to be late, and its caller prefers to hear so at once (429).
        """
        ...

    async def close_call(self, number: int, end: CallEnd) -> JobReport:
        """Close a call; see `JobTable.close`."""
        ...

    def fail_call(self, number: int, end: CallEnd) -> None:
        """Close a call of which nobody wants to know more."""
        ...


class Books:
    """The books themselves.

    Parameters
    ----------
    limits : hash of an API key -> its limits.
    on_limited : called with the limit that a refused request has met (metrics).
    jobs : are told of each job that ended.
    clock : seconds.
    """

    def __init__(
        self,
        limits: Mapping[str, KeyLimits],
        on_limited: Callable[[str], None],
        jobs: JobCounts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.meters = {key: KeyMeter(each, clock(), on_limited) for key, each in limits.items()}
        self.job_counts = jobs
        self.table = JobTable(on_end=jobs.end)
        self.since_1970 = 0.0


class Desk:
    """Where one front end opens and closes what is in the books; see `Shared`.

    Parameters
    ----------
    show : returns the text of `metrics` and of `state` for all front ends.
    """

    def __init__(self, books: Books, show: Callable[[str], Awaitable[bytes]]) -> None:
        self._books, self._show = books, show
        self._numbers = count()
        self._keys: dict[int, KeyAllowance] = {}
        self._calls: dict[int, OpenCall] = {}

    def close(self) -> None:
        """Close what a front end had open that has died: answers that nobody got."""
        for number in list(self._keys):
            self.end_key(number, _LOST, 0, 0)
        for number in list(self._calls):
            self.fail_call(number, CallEnd(self._books.clock(), 0, None, JobEnd.ABANDONED))

    async def show(self, what: str) -> bytes:
        return await self._show(what)

    async def key_headers(self, key: str) -> list[tuple[str, str]]:
        return list(self._books.meters[key].headers(self._books.clock()))

    async def begin_key(self, key: str, num_bytes: int) -> int:
        allowance = KeyAllowance(self._books.meters[key], num_bytes, self._books.clock)
        number = next(self._numbers)
        self._keys[number] = allowance
        return number

    async def take_body(self, number: int, num_bytes: int) -> None:
        self._keys[number].take_body(num_bytes)

    async def take_answers(
        self, number: int, num_prompt_tokens: int, max_tokens: Sequence[int], *, is_stated: bool
    ) -> None:
        self._keys[number].take_answers(num_prompt_tokens, max_tokens, is_stated=is_stated)

    def end_key(self, number: int, status: int, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self._keys.pop(number).end(status, num_prompt_tokens, num_output_tokens)

    async def open_call(
        self, call: JobCall, arrival: float, num_prompt_tokens: int, max_tokens: int, *, refuses: bool
    ) -> OpenedCall:
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
        number = next(self._numbers)
        self._calls[number] = opened
        return OpenedCall(number, opened.share)

    async def close_call(self, number: int, end: CallEnd) -> JobReport:
        return self._close_call(number, end)

    def fail_call(self, number: int, end: CallEnd) -> None:
        self._close_call(number, end)

    def _close_call(self, number: int, end: CallEnd) -> JobReport:
        table = self._books.table
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
        """Do what another process asks for; return what `Remote` reads."""
        if verb == "show":
            return await self.show(arguments["what"])
        method = getattr(self, verb) if verb in _VERBS else None
        if method is None:
            raise InvalidRequest(f"there is no {verb!r} here")
        hints = get_type_hints(method)
        try:
            found = method(**{name: msgspec.convert(value, hints[name]) for name, value in arguments.items()})
            return {"value": msgspec.to_builtins(await found if inspect.isawaitable(found) else found)}
        except ApiError as error:  # whose status only HTTP knows
            return {
                "error": [error.status, str(error), error.code, error.param, error.headers, error.details]
            }


_VERBS = frozenset(
    (
        "key_headers",
        "begin_key",
        "take_body",
        "take_answers",
        "end_key",
        "open_call",
        "close_call",
        "fail_call",
    )
)
_LOST = 500
"""The status of an answer that was lost with its front end."""
_AnswerT = TypeVar("_AnswerT")


class Remote:
    """Asks the books of another process; see `Shared`.

    Parameters
    ----------
    wish : has it do something, and returns what `Desk.answer` does.
    tell : tells it what is counted here.
    """

    def __init__(self, wish: Callable[..., Awaitable[Any]], tell: Callable[[], None]) -> None:
        self._wish, self._tell_counts = wish, tell
        self._untold: set[asyncio.Task[Any]] = set()

    async def _ask(self, kind: type[_AnswerT], verb: str, **arguments: Any) -> _AnswerT:
        answer = await self._wish(
            verb, **{name: msgspec.to_builtins(each) for name, each in arguments.items()}
        )
        if "error" in answer:
            status, message, code, param, headers, details = answer["error"]
            raise ApiError(status, message, code=code, param=param, headers=headers, details=details)
        return msgspec.convert(answer["value"], kind)

    def _tell(self, verb: str, **arguments: Any) -> None:
        task = asyncio.ensure_future(self._ask(NoneType, verb, **arguments))
        self._untold.add(task)
        task.add_done_callback(self._untold.discard)

    async def show(self, what: str) -> bytes:
        self._tell_counts()
        shown: bytes = await self._wish("show", what=what)
        return shown

    async def key_headers(self, key: str) -> list[tuple[str, str]]:
        return await self._ask(list[tuple[str, str]], "key_headers", key=key)

    async def begin_key(self, key: str, num_bytes: int) -> int:
        return await self._ask(int, "begin_key", key=key, num_bytes=num_bytes)

    async def take_body(self, number: int, num_bytes: int) -> None:
        await self._ask(NoneType, "take_body", number=number, num_bytes=num_bytes)

    async def take_answers(
        self, number: int, num_prompt_tokens: int, max_tokens: Sequence[int], *, is_stated: bool
    ) -> None:
        await self._ask(
            NoneType,
            "take_answers",
            number=number,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            is_stated=is_stated,
        )

    def end_key(self, number: int, status: int, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self._tell(
            "end_key",
            number=number,
            status=status,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_output_tokens,
        )

    async def open_call(
        self, call: JobCall, arrival: float, num_prompt_tokens: int, max_tokens: int, *, refuses: bool
    ) -> OpenedCall:
        return await self._ask(
            OpenedCall,
            "open_call",
            call=call,
            arrival=arrival,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            refuses=refuses,
        )

    async def close_call(self, number: int, end: CallEnd) -> JobReport:
        return await self._ask(JobReport, "close_call", number=number, end=end)

    def fail_call(self, number: int, end: CallEnd) -> None:
        self._tell("fail_call", number=number, end=end)
