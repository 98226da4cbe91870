"""Responses that are kept: read again, made in the background, read on after a break, and gone on from."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import openai
import pytest

from onbeat.metrics.counts import JobCounts
from onbeat.server import kept_answers
from onbeat.server.kept_answers import AnswerShelf, KeptAnswer
from onbeat.server.shared import Books, Desk, remote_desk
from onbeat.server.slo_defaults import KeyDefaults, KeyLimits, SLODefaults, key_digest
from tests.cpu.server.running import Answer, Served, serving
from tests.fakes_engine import FakeEngine
from tests.many_cases import each_case
from tests.waiting import until

RESPONSES = "/v1/responses"
KEYS = ("of one", "of another")


async def begun(served: Served, **fields: Any) -> str:
    """Ask for a response in the background, and return its id."""
    answer = await served.post(RESPONSES, {"input": "hi", "background": True, **fields})
    assert (answer.status, answer.json["status"]) == (200, "queued"), answer.body
    return str(answer.json["id"])


async def ended(served: Served, response_id: str) -> Any:
    """Return a response once it is made no more."""
    while (answer := await served.get(f"{RESPONSES}/{response_id}")).json["status"] in (
        "queued",
        "in_progress",
    ):
        await asyncio.sleep(0.005)
    return answer.json


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_response_is_kept_as_it_was_answered(served: Served, is_stream: bool) -> None:
    asked: dict[str, Any] = {"model": "fake/model", "input": "hi"}
    if is_stream:
        async with served.client.responses.stream(**asked) as stream:
            response = await stream.get_final_response()
    else:
        response = await served.client.responses.create(**asked)
    assert response.model_dump()["store"] is True
    kept = await served.client.responses.retrieve(response.id)
    assert kept.output_text == "Hello, world!"
    assert kept.model_dump() == response.model_dump() | (
        {"output": kept.model_dump()["output"]} if is_stream else {}
    )
    with pytest.raises(openai.BadRequestError):  # its events are not there
        await served.client.responses.retrieve(response.id, stream=True)


async def test_a_response_that_is_not_to_be_kept_is_not(served: Served) -> None:
    response = await served.client.responses.create(model="fake/model", input="hi", store=False)
    assert response.model_dump()["store"] is False
    with pytest.raises(openai.NotFoundError):
        await served.client.responses.retrieve(response.id)
    refused = await served.post(RESPONSES, {"input": "hi", "store": False, "background": True})
    assert (refused.status, refused.error["param"]) == (400, "background")


async def test_a_stream_goes_on_after_a_break(served: Served, engine: FakeEngine) -> None:
    engine.script.seconds_per_step = 0.01
    engine.script.text = "abcdefghij" * 4
    whole = await served.client.responses.create(model="fake/model", input="hi", background=True, stream=True)
    read, last = [], -1
    async for event in whole:
        read.append(event)
        last = event.sequence_number
        if len(read) == 8:
            break
    await whole.close()
    response_id = read[0].response.id  # type: ignore[union-attr]
    assert read[0].response.status == "queued"  # type: ignore[union-attr]
    while last >= 0:
        rest = await served.client.responses.retrieve(response_id, stream=True, starting_after=last)
        last = -1
        async for event in rest:
            assert event.sequence_number == len(read)
            read.append(event)
            if len(read) % 9 == 0:
                last = event.sequence_number
                break
        await rest.close()
    assert read[-1].type == "response.completed"
    assert (
        "".join(each.delta for each in read if each.type == "response.output_text.delta")
        == engine.script.text
    )
    assert read[-1].response.output_text == engine.script.text
    assert not engine.aborted
    kept = await served.client.responses.retrieve(response_id)
    assert (kept.status, kept.output_text, kept.background) == ("completed", engine.script.text, True)
    again = await served.client.responses.retrieve(response_id, stream=True)
    assert [event.model_dump() async for event in again] == [event.model_dump() for event in read]


async def test_what_a_response_goes_on_from_is_listed(served: Served) -> None:
    responses = served.client.responses
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    said = {"role": "assistant", "content": "I look.", "id": "msg_1"}
    given: Any = [{"role": "user", "content": "hi"}, said, call, result]
    first = await responses.create(model="fake/model", input=given)
    listed = await responses.input_items.list(first.id, order="asc")
    assert [item.type for item in listed.data] == [
        "message",
        "message",
        "function_call",
        "function_call_output",
    ]
    question, answer, *_ = (item.model_dump() for item in listed.data)
    (part,) = question["content"]
    assert (question["role"], part["type"], part["text"]) == ("user", "input_text", "hi")
    assert (answer["id"], answer["content"][0]["text"]) == ("msg_1", "I look.")
    assert len({item.id for item in listed.data}) == 4
    second = await responses.create(model="fake/model", input="And then?", previous_response_id=first.id)
    read = [item async for item in responses.input_items.list(second.id, limit=2)]
    assert [item.type for item in read] == [
        "message",
        "message",
        *reversed([item.type for item in listed.data]),
    ]
    texts = [item.model_dump()["content"][0]["text"] for item in read[:2]]
    assert texts == ["And then?", first.output_text]
    page = await responses.input_items.list(second.id, after=read[4].id, order="desc")
    assert [item.id for item in page.data] == [read[5].id]
    for wrong in ({"order": "up"}, {"limit": 0}, {"limit": 101}, {"after": "none"}):
        refused = await served.get(f"{RESPONSES}/{first.id}/input_items", params=wrong)
        assert (refused.status, refused.error["param"]) == (400, *wrong)
    with pytest.raises(openai.NotFoundError):
        await responses.input_items.list("resp_none")


async def test_without_background_a_break_aborts_the_stream(served: Served, engine: FakeEngine) -> None:
    engine.script.seconds_per_step = 0.01
    stream = await served.client.responses.create(
        model="fake/model", input="hi", stream=True, extra_body={"ignore_eos": True}
    )
    async for event in stream:
        response_id = event.response.id  # type: ignore[union-attr]
        break
    await stream.close()
    await until(lambda: engine.aborted)
    with pytest.raises(openai.NotFoundError):
        await served.client.responses.retrieve(response_id)


async def test_a_response_can_be_cancelled_while_it_is_made(served: Served, engine: FakeEngine) -> None:
    engine.script.seconds_per_step = 0.01
    response_id = await begun(served, ignore_eos=True, max_output_tokens=1500)
    stream = await served.client.responses.retrieve(response_id, stream=True)
    kinds: list[str] = []
    async for event in stream:
        kinds.append(event.type)
        if len(kinds) == 8:
            cancelled = await served.client.responses.cancel(response_id)
            assert cancelled.status == "cancelled"
            assert cancelled.output_text.startswith("Hell")
    assert kinds[-1] == "response.cancelled"
    assert engine.aborted == [response_id]
    assert (await served.client.responses.cancel(response_id)).status == "cancelled"


async def test_a_response_can_be_deleted(served: Served, engine: FakeEngine) -> None:
    response = await served.client.responses.create(model="fake/model", input="hi")
    await served.client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await served.client.responses.delete(response.id)
    engine.script.stall_after = 3
    response_id = await begun(served)
    stream = await served.client.responses.retrieve(response_id, stream=True)
    deleted = await served.session.delete(f"{served.url}{RESPONSES}/{response_id}")
    assert await deleted.json() == {"id": response_id, "object": "response", "deleted": True}
    with pytest.raises(openai.APIError, match="not kept"):  # whoever reads it hears so
        _ = [event async for event in stream]
    await until(lambda: engine.aborted == [response_id])


async def test_a_failure_in_the_background_is_how_it_ends(served: Served, engine: FakeEngine) -> None:
    engine.script.error_after = 3
    response = await ended(served, await begun(served))
    assert (response["status"], response["error"]["code"]) == ("failed", "engine_error")
    assert response["output"][0]["content"][0]["text"] == "Hel"
    engine.is_alive = False
    response = await ended(served, await begun(served))
    assert (response["status"], response["error"]["code"]) == ("failed", "engine_dead")


async def test_a_conversation_goes_on(served: Served, engine: FakeEngine) -> None:
    engine.script.answers = ["one", "two", "three"]
    first = await served.client.responses.create(
        model="fake/model", input="a", instructions="be brief", metadata={"slo_ttft_ms": "60000"}
    )
    second = await served.client.responses.create(
        model="fake/model", input=[{"role": "user", "content": "b"}], previous_response_id=first.id
    )
    assert second.previous_response_id == first.id
    await served.client.responses.delete(first.id)  # the later one has what came before
    counted = await served.client.responses.input_tokens.count(
        model="fake/model", input="c", previous_response_id=second.id
    )
    response_id = await begun(served, input="c", previous_response_id=second.id)
    assert (await ended(served, response_id))["usage"]["input_tokens"] == counted.input_tokens
    asked = [bytes(request.prompt_token_ids).decode() for request in engine.requests]
    assert asked[1] == "[user]a\n[assistant]one\n[user]b\n[assistant]"
    assert asked[2] == "[user]a\n[assistant]one\n[user]b\n[assistant]two\n[user]c\n[assistant]"
    assert [request.slo is None for request in engine.requests] == [False, True, True]


async def test_calls_and_their_outputs_go_on(served: Served, engine: FakeEngine) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    first = (await served.post(RESPONSES, {"input": [{"role": "user", "content": "a"}, call]})).json["id"]
    output = {"type": "function_call_output", "call_id": "c1", "output": "sun"}
    answer = await served.post(RESPONSES, {"input": [output], "previous_response_id": first})
    assert answer.status == 200, answer.body
    assert bytes(engine.requests[-1].prompt_token_ids).endswith(b"[user]Result of f: sun\n[assistant]")
    wrong = await served.post(
        RESPONSES, {"input": [{"role": "user", "content": 5}], "previous_response_id": first}
    )
    assert (wrong.status, wrong.error["param"]) == (400, "input")


async def test_what_is_being_made_is_not_gone_on_from(served: Served, engine: FakeEngine) -> None:
    engine.script.stall_after = 1
    response_id = await begun(served)
    answer = await served.post(RESPONSES, {"input": "b", "previous_response_id": response_id})
    assert (answer.status, answer.error["param"]) == (400, "previous_response_id")
    await served.client.responses.cancel(response_id)


@each_case(
    ("method", "path", "status", "code"),
    [
        ("GET", "resp_1", 404, "response_not_found"),
        ("GET", "resp_1?stream=true&starting_after=3", 404, "response_not_found"),
        ("DELETE", "resp_1", 404, "response_not_found"),
        ("POST", "resp_1/cancel", 404, "response_not_found"),
        ("GET", "resp_1/input_items", 404, "response_not_found"),
        ("GET", "input_tokens", 405, "method_not_allowed"),
    ],
)
async def test_what_is_not_kept_is_not_found(
    served: Served, method: str, path: str, status: int, code: str
) -> None:
    async with served.session.request(method, f"{served.url}{RESPONSES}/{path}") as reply:
        answer = Answer(reply.status, reply.headers.copy(), await reply.read())
    assert (answer.status, answer.error["code"]) == (status, code)
    previous = await served.post(RESPONSES, {"input": "b", "previous_response_id": "resp_1"})
    assert (previous.status, previous.error["param"]) == (404, "previous_response_id")


@pytest.mark.parametrize(
    "query",
    [
        *("stream=odd", "stream=true&starting_after=-1", "stream=false&starting_after=3"),
        *("stream=true&starting_after=900", "starting_after=900"),
    ],
)
async def test_a_wrong_query_is_refused(served: Served, query: str) -> None:
    response_id = await begun(served)
    await ended(served, response_id)
    answer = await served.get(f"{RESPONSES}/{response_id}?{query}")
    assert (answer.status, answer.error["param"]) == (400, query.rpartition("=")[0].rpartition("&")[2])


async def test_a_number_alone_asks_for_events(served: Served) -> None:
    response_id = await begun(served)
    await ended(served, response_id)
    asked = [
        f"{RESPONSES}/{response_id}?{query}" for query in ("starting_after=3", "stream=true&starting_after=3")
    ]
    alone, both = [await served.get(each) for each in asked]
    assert alone.status == 200
    assert alone.body == both.body
    assert b'"sequence_number":4' in alone.body
    last = alone.body.count(b"data: ") + 3
    after_last = await served.get(f"{RESPONSES}/{response_id}?starting_after={last}")
    assert (after_last.status, after_last.body) == (200, b"")


async def test_a_response_belongs_to_the_key_that_asked(engine: FakeEngine) -> None:
    async with serving(engine, api_keys=KEYS) as served:
        own, other = ({"authorization": f"Bearer {key}"} for key in KEYS)
        response_id = (await served.post(RESPONSES, {"input": "a"}, headers=own)).json["id"]
        assert (await served.get(f"{RESPONSES}/{response_id}", headers=own)).status == 200
        assert (await served.get(f"{RESPONSES}/{response_id}", headers=other)).status == 404
        body = {"input": "a", "previous_response_id": response_id}
        assert (await served.post(RESPONSES, body, headers=other)).status == 404


async def test_a_limit_of_open_requests_holds_in_the_background(engine: FakeEngine) -> None:
    engine.script.stall_after = 1
    limits = KeyDefaults(limits=KeyLimits(max_open_requests=1))
    async with serving(engine, api_keys=KEYS, slo=SLODefaults(keys={key_digest(KEYS[0]): limits})) as served:
        headers = {"authorization": f"Bearer {KEYS[0]}"}
        body = {"input": "a", "background": True}
        first = await served.post(RESPONSES, body, headers=headers)
        assert (await served.post(RESPONSES, body, headers=headers)).status == 429
        path = f"{served.url}{RESPONSES}/{first.json['id']}"
        assert (await served.session.delete(path, headers=headers)).status == 200
        await until(lambda: engine.aborted)
        engine.script.stall_after = None
        answers = [await served.post(RESPONSES, {"input": "a"}, headers=headers) for _ in range(2)]
        assert [each.status for each in answers] == [200, 200]


async def test_a_request_ends_with_its_work_in_the_background(
    served: Served, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "onbeat.server")
    engine.script.stall_after = 3
    response_id = await begun(served)
    await until(lambda: engine.requests)
    assert "POST /v1/responses 200" not in caplog.text
    await served.client.responses.cancel(response_id)
    await until(lambda: "POST /v1/responses 200" in caplog.text)
    (line,) = [each.message for each in caplog.records if "POST /v1/responses 200" in each.message]
    assert "output_tokens=3" in line
    assert "finish=cancelled" in line
    assert any("POST /v1/responses/{response_id}/cancel 200" in each.message for each in caplog.records)


# --- the shelf itself, here and behind a wire ---------------------------------------------------------------


def books() -> Books:
    return Books({}, lambda _: None, JobCounts())


async def nothing(_: str) -> bytes:
    return b""


def on_the_wire(value: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def front_end(kept: Books) -> tuple[Desk, AnswerShelf]:
    """Return the desk of a front end, and how that has answers kept from another process."""
    desk = Desk(kept, nothing)

    async def wish(verb: str, **arguments: Any) -> Any:
        return on_the_wire(await desk.answer(verb, on_the_wire(arguments)))

    return desk, remote_desk(wish, lambda: None, {}).answers


def answer(response: bytes = b"{}", *, is_running: bool = False) -> KeptAnswer:
    return KeptAnswer(b"[]", response, is_background=is_running, is_running=is_running)


async def test_any_front_end_reads_what_another_makes() -> None:
    kept = books()
    (_, one), (_, other) = front_end(kept), front_end(kept)
    await one.keep("a", "me", answer(b"1", is_running=True), b"data: 0\n\n")
    assert await other.read("a", "me", 0) == (b"data: 0\n\n", 1, False)
    reading = asyncio.create_task(other.read("a", "me", 1))
    stopped = asyncio.create_task(one.until_stopped("a"))
    await asyncio.sleep(0)
    await one.add("a", b"data: 1\n\ndata: 2\n\n", b"", ends=False)
    assert await reading == (b"data: 1\n\ndata: 2\n\n", 3, False)
    assert (await other.get("a", "me")).response == b"1"
    cancelling = asyncio.create_task(other.stop("a", "me"))
    await stopped
    await one.add("a", b"data: 3\n\n", b"2", ends=True)
    assert (await cancelling).response == b"2"
    assert await other.read("a", "me", 2) == (b"data: 2\n\ndata: 3\n\n", 4, True)


async def test_what_a_dead_front_end_was_making_is_dropped() -> None:
    kept = books()
    (desk, one), (_, other) = front_end(kept), front_end(kept)
    await one.keep("made", "", answer(), b"")
    await one.keep("a", "", answer(is_running=True), b"")
    reading = asyncio.create_task(other.read("a", "", 0))
    await asyncio.sleep(0)
    desk.close()
    with pytest.raises(Exception, match="not kept"):
        await reading
    assert (await other.get("made", "")).response == b"{}"


async def test_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "MOST_KEPT_BYTES", 100)
    monkeypatch.setattr(kept_answers, "BACKGROUND_BYTES", 30)
    shelf = Desk(books(), nothing).answers
    await shelf.keep("running", "", answer(is_running=True), b"")
    for name in "abc":
        await shelf.keep(name, "", answer(b"x" * 21), b"")
    await shelf.get("b", "")
    for name in ("a", "other"):
        with pytest.raises(Exception, match="not kept"):
            await shelf.get(name, "")
    await shelf.keep("second", "", answer(is_running=True), b"")
    with pytest.raises(Exception, match="in the background"):
        await shelf.keep("third", "", answer(is_running=True), b"")
    with pytest.raises(Exception, match="in the background"):
        await shelf.add("second", b"x" * 60 + b"\n\n", b"", ends=False)
    await shelf.add("running", b"x" * 60 + b"\n\n", b"", ends=False)
    await shelf.keep("large", "", answer(b"x" * 200), b"")
    with pytest.raises(Exception, match="not kept"):
        await shelf.get("large", "")
    assert (await shelf.get("running", "")).is_running


async def test_who_keeps_most_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "MOST_KEPT_BYTES", 100)
    kept = books()
    shelf = Desk(kept, nothing).answers
    await shelf.keep("a", "one", answer(b"x" * 18), b"")
    for number in range(9):
        await shelf.keep(f"b{number}", "other", answer(b"x" * 18), b"")
    assert list(kept.answers.by_id) == ["a", "b5", "b6", "b7", "b8"]
    await shelf.forget("a", "one")
    await shelf.forget("b6", "other")
    await shelf.keep("c", "one", answer(b"x" * 58), b"")
    assert list(kept.answers.by_id) == ["b7", "b8", "c"]


async def test_answers_are_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "KEPT_SECONDS", 0.05)
    kept = books()
    shelf = Desk(kept, nothing).answers
    await shelf.keep("a", "", answer(), b"")
    await until(lambda: not kept.answers.by_id)
    await shelf.keep("b", "", answer(is_running=True), b"")
    await asyncio.sleep(0.1)
    assert "b" in kept.answers.by_id
