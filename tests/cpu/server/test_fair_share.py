"""What callers share, and that nobody's chats and prompts hold up another's.

Work is done in a thread that a test holds until all of it has come: its order is what is looked at, no time.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from onbeat.core.request import Grammar
from onbeat.server.fair_threads import MOST_SHORT_WORK, FairThreads
from onbeat.server.prompts import PromptEncoder
from onbeat.server.structured import GrammarChecks
from onbeat.text.chat_template import ChatTemplate
from onbeat.text.grammar.guard import GrammarGuard, TrialResult
from tests.cpu.server.running import HELLO, Answer, Served, serving
from tests.fakes_engine import ByteTokenizer, FakeEngine
from tests.waiting import until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
KEYS = {"flood": "a" * 8, "guest": "b" * 8}


class Held:
    """Work that goes on when it is let: names what it does, in order."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.num_asked = 0
        self.is_let = threading.Event()
        self.time = 0.0

    def note(self, name: str) -> None:
        self.order.append(name)
        self.time = time.monotonic()
        assert self.is_let.wait(30)


@pytest.fixture
def rendering(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Hold the renderings of chats, which are named by the first letter of their text."""
    held, ask = Held(), PromptEncoder.render

    async def counted(*arguments: Any) -> str:
        held.num_asked += 1
        return await ask(*arguments)

    def rendered(_template: ChatTemplate, messages: Any, **_variables: Any) -> str:
        held.note(messages[0]["content"][0])
        return "text"

    monkeypatch.setattr(PromptEncoder, "render", counted)
    monkeypatch.setattr(ChatTemplate, "render", rendered)
    return held


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Hold the encoding of texts beyond the shortest, which are named by their first letter."""
    held, ask, encode = Held(), PromptEncoder.off_loop, ByteTokenizer.encode

    async def counted(*arguments: Any) -> Any:
        held.num_asked += 1
        return await ask(*arguments)

    def encoded(tokenizer: ByteTokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        held.note(text[0])
        return encode(tokenizer, text[:10], add_special_tokens=add_special_tokens)

    monkeypatch.setattr(PromptEncoder, "off_loop", counted)
    monkeypatch.setattr(ByteTokenizer, "encode", encoded)
    return held


@asynccontextmanager
async def asking(served: Served, path: str, held: Held) -> AsyncIterator[Callable[[str, str], Any]]:
    """Give a function that sends a text and waits until it is in line; at the end all are let go."""
    tasks: list[asyncio.Task[Answer]] = []

    async def ask(caller: str, text: str) -> None:
        body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
        headers = {"Authorization": f"Bearer {KEYS[caller]}"}
        num_asked = held.num_asked
        tasks.append(asyncio.create_task(served.post(path, body, headers=headers)))
        await until(lambda: held.num_asked > num_asked)

    try:
        yield ask
    finally:
        held.is_let.set()
        assert [answer.status for answer in await asyncio.gather(*tasks)] == [200] * len(tasks)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(FakeEngine(max_model_len=10**6), api_keys=tuple(KEYS.values())) as running:
        yield running


@pytest.mark.parametrize("caller", ["guest", "flood"])
async def test_short_chats_do_not_wait_for_long_ones(served: Served, rendering: Held, caller: str) -> None:
    """Nor for those of the same caller: nobody can be told from another behind a proxy."""
    async with asking(served, CHAT, rendering) as ask:
        for letter in "abcdefgh":
            await ask("flood", letter * 200_000)
        await ask(caller, "short")
    assert rendering.order == list("asbcdefgh")


async def test_chats_of_many_messages_are_long(served: Served, rendering: Held) -> None:
    async with asking(served, CHAT, rendering) as ask:
        await ask("flood", "a")
        body = {"messages": [{"role": "user", "content": letter} for letter in "m" * 2000]}
        many = served.post(CHAT, body, headers={"Authorization": f"Bearer {KEYS['flood']}"})
        task = asyncio.create_task(many)
        await until(lambda: rendering.num_asked == 2)
        await ask("guest", "b" * 100_000)
    assert (await task).status == 200
    assert rendering.order == list("abm")


async def test_callers_with_equal_chats_take_turns(served: Served, rendering: Held) -> None:
    async with asking(served, CHAT, rendering) as ask:
        for letter in "abcdefgh":
            await ask("flood", letter * 100_000)
        for letter in "uvw":
            await ask("guest", letter * 100_000)
    order = "".join(rendering.order)
    assert order[0] == "a"
    assert max(map(order.index, "uvw")) <= 6, order
    assert sorted(order) == sorted("abcdefghuvw")


async def test_the_wait_for_a_rendering_counts_as_waiting(served: Served, rendering: Held) -> None:
    async with asking(served, CHAT, rendering) as ask:
        await ask("guest", "a")
        await until(lambda: bool(rendering.order))
    (request,) = served.engine.requests
    assert request.arrival < rendering.time


async def test_short_prompts_do_not_wait_for_anothers_long_ones(served: Served, encoding: Held) -> None:
    async with asking(served, TEXT, encoding) as ask:
        for letter in "abcd":
            await ask("flood", letter * 200_000)
        await until(lambda: len(encoding.order) == 2)
        await ask("guest", "s" * 9600)
        await until(lambda: "s" in encoding.order)  # while both of the long ones are under way
    assert [sorted(encoding.order[:2]), encoding.order[2]] == [["a", "b"], "s"]


async def test_many_prompts_of_a_request_give_way_in_between(served: Served, encoding: Held) -> None:
    async with asking(served, TEXT, encoding) as ask:
        for letter in "ab":
            prompts: Any = [letter * 60_000] * 3
            await ask("flood", prompts)
        await ask("guest", "g" * 60_000)
        await until(lambda: len(encoding.order) == 2)
    order = "".join(encoding.order)
    assert sorted(order) == sorted("aaabbbg")
    assert order.index("g") == 2


async def test_a_chat_that_cannot_fit_is_refused_before_it_is_rendered(rendering: Held) -> None:
    rendering.is_let.set()
    async with serving(FakeEngine(max_model_len=1000)) as served:
        for message in (
            {"content": "long " * 60_000},
            {"content": [{"type": "text", "text": "long " * 100}] * 600},
            {"content": "short", "reasoning_content": "long " * 60_000},
        ):
            answer = await served.post(CHAT, {"messages": [{"role": "user", **message}]})
            assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
            assert answer.error["param"] == "messages"
        assert rendering.order == []
        assert (await served.post(CHAT, {"messages": HELLO})).status == 200
        assert rendering.order == ["h"]


async def test_variables_of_the_template_are_bounded(served: Served) -> None:
    def body(length: int) -> dict[str, Any]:
        return {"messages": HELLO, "chat_template_kwargs": {"shown": "x" * length}}

    key = {"headers": {"Authorization": f"Bearer {KEYS['guest']}"}}
    assert (await served.post(CHAT, body(65_000), **key)).status == 200
    answer = await served.post(CHAT, body(66_000), **key)
    assert (answer.status, answer.error["param"]) == (400, "chat_template_kwargs")
    assert "66012 bytes" in answer.error["message"]


async def test_chats_of_clients_that_left_are_not_rendered(rendering: Held) -> None:
    bodies = [{"messages": [{"role": "user", "content": letter}]} for letter in "abc"]
    await check_second_is_left_out(rendering, CHAT, bodies)


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x"})])
async def test_grammars_of_clients_that_left_are_not_tried(
    monkeypatch: pytest.MonkeyPatch, path: str, prompt: dict[str, Any]
) -> None:
    held, take = Held(), GrammarChecks.take

    async def counted(*arguments: Any) -> None:
        held.num_asked += 1
        await take(*arguments)

    def tried(_guard: GrammarGuard, grammar: Grammar) -> TrialResult:
        held.note(grammar.text.split('"')[1])
        return TrialResult()

    monkeypatch.setattr(GrammarChecks, "take", counted)
    monkeypatch.setattr(GrammarGuard, "check", tried)
    await check_second_is_left_out(held, path, [{**prompt, "guided_choice": [each]} for each in "abc"])


async def check_second_is_left_out(held: Held, path: str, bodies: Sequence[Any]) -> None:
    """Check that of three requests, whose work is "a", "b" and "c", the one whose client leaves has none."""
    async with serving(FakeEngine()) as served:
        tasks = []
        for number, body in enumerate(bodies, 1):
            tasks.append(asyncio.create_task(served.post(path, body)))
            await until(partial(lambda asked: held.num_asked == asked, number))
        tasks[1].cancel()
        left = f'onbeat_http_requests_total{{endpoint="{path}",status="499"}} 1.0'
        async with asyncio.timeout(10):
            while left not in (await served.get("/metrics")).body.decode():
                await asyncio.sleep(0.01)
        held.is_let.set()
        assert [(await task).status for task in (tasks[0], tasks[2])] == [200, 200]
        assert held.order == ["a", "c"]
        assert len(served.engine.requests) == 2


class Line:
    """Threads whose work is to be named, the first piece held until all is in line."""

    def __init__(self, **options: int) -> None:
        self.threads = FairThreads("test", **{"num_threads": 1, **options})
        self.held = Held()
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def add(self, caller: str, name: str, size: int) -> None:
        work = self.threads.run(caller, size, lambda: self.held.note(name))
        self.tasks[name] = asyncio.create_task(work)
        await asyncio.sleep(0)

    async def end(self) -> list[str]:
        self.held.is_let.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        self.threads.close()
        return self.held.order


async def test_long_work_has_its_turn_among_ever_more_short_work() -> None:
    line, num_short = Line(), 0
    await line.add("a", "first", 1)
    await line.add("a", "long", 10_000)

    async def keep_busy() -> None:
        nonlocal num_short
        while "long" not in line.held.order:
            num_short += 1
            await line.threads.run(f"b{num_short % 2}", 1000, lambda: line.held.note("short"))

    busy = [asyncio.create_task(keep_busy()) for _ in range(2)]
    await asyncio.sleep(0)
    line.held.is_let.set()
    async with asyncio.timeout(30):
        await asyncio.gather(*busy)
    await line.end()
    assert 5 < line.held.order.index("long") < 50


async def test_work_of_those_who_left_is_not_done() -> None:
    line = Line()
    for name in "abc":
        await line.add("x", name, 100)
    line.tasks["b"].cancel()
    line.tasks["a"].cancel()  # under way: it comes to its end, and the next begins then
    await asyncio.sleep(0)
    assert await line.end() == ["a", "c"]
    assert line.tasks["b"].cancelled()


async def test_errors_go_to_those_who_asked_and_the_next_begins() -> None:
    threads = FairThreads("test", num_threads=1)

    def fail() -> str:
        raise IndexError

    failing = asyncio.create_task(threads.run("a", 1, fail))
    fine = asyncio.create_task(threads.run("a", 1, lambda: "fine"))
    with pytest.raises(IndexError):
        await failing
    assert await fine == "fine"
    threads.close()


async def test_nobody_hears_of_an_error_whose_caller_left(caplog: pytest.LogCaptureFixture) -> None:
    threads, is_let = FairThreads("test", num_threads=1), threading.Event()

    def fail() -> None:
        assert is_let.wait(30)
        raise IndexError

    failing = asyncio.create_task(threads.run("a", 1, fail))
    await asyncio.sleep(0)
    failing.cancel()
    await asyncio.gather(failing, return_exceptions=True)
    after = asyncio.create_task(threads.run("a", 1, lambda: None))
    is_let.set()
    await after
    threads.close()
    gc.collect()  # asyncio tells of errors that nobody has looked at when they go
    assert caplog.records == []


async def test_what_waits_when_the_threads_are_closed_is_cancelled() -> None:
    line = Line()
    await line.add("a", "first", 1)
    await line.add("a", "second", 1)
    line.threads.close()
    with pytest.raises(asyncio.CancelledError):
        await line.tasks["second"]
    line.held.is_let.set()
    await line.tasks["first"]
    assert line.held.order == ["first"]


async def test_threads_for_short_work_take_no_other() -> None:
    line = Line(num_short=1)
    await line.add("a", "long", MOST_SHORT_WORK + 1)
    await line.add("a", "longer", MOST_SHORT_WORK + 1)
    await line.add("b", "short", MOST_SHORT_WORK)
    await until(lambda: len(line.held.order) == 2)
    assert sorted(line.held.order) == ["long", "short"]
    assert (await line.end())[2:] == ["longer"]
