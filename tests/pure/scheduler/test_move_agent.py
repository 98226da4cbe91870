"""What the agent at a replica does and answers, whatever is asked for before, while or after a step runs."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from onbeat.core.errors import InvalidRequest, KVUnavailable
from onbeat.core.handover import Detached, MoveTask, MoveVerb, TaskAnswer
from onbeat.core.request import Request, SamplingParams
from onbeat.scheduler.replica.move_agent import Departure, MoveAgent

OUT = Detached(
    request_id="a",
    output_token_ids=(1,),
    num_kv_tokens=32,
    block_ids=(4, 5),
    scheduled_time=0.0,
    num_cached_tokens=0,
    num_preemptions=0,
)
REQUEST = Request(request_id="a~2", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=2), arrival=0.0)


class Source(NamedTuple):
    block_ids: tuple[int, ...]


@dataclass
class Port:
    """KV of nobody: what is asked of it is written down, and copies end when they are told to."""

    calls: list[str] = field(default_factory=list)
    departures: list[Departure[Source]] = field(default_factory=list)
    copies: list[Future[int]] = field(default_factory=list)
    num_full: int = 32
    error: Exception | None = None

    def num_full_tokens(self, request_id: str) -> int:
        return self.num_full

    def hold(self, request_id: str) -> Source | None:
        self._call("hold", request_id)
        return Source(tuple(range(self.num_full // 16))) if self.num_full else None

    def summed(self, source: Source) -> Future[Source]:
        future: Future[Source] = Future()
        future.set_result(source)
        return future

    def take_departures(self) -> list[Departure[Source]]:
        departures, self.departures = self.departures, []
        return departures

    def reattach(self, request_id: str) -> bool:
        self._call("reattach", request_id)
        return True

    def reserve(self, move: str, num_tokens: int) -> bool:
        self._call("reserve", move)
        return num_tokens <= 64

    def pull(self, move: str, source: Source, first_block: int) -> Future[int]:
        self._call("pull", move)
        self.copies.append(Future())
        return self.copies[-1]

    def adopt(self, move: str, request: Request, detached: Detached) -> None:
        self._call("adopt", move)

    def unhold(self, request_id: str) -> None:
        self._call("unhold", request_id)

    def detach(self, request_id: str) -> None:
        self._call("detach", request_id)

    def free(self, request_id: str) -> None:
        self._call("free", request_id)

    def release(self, move: str) -> None:
        self._call("release", move)

    def _call(self, verb: str, name: str) -> None:
        self.calls.append(f"{verb} {name}")
        if self.error is not None:
            raise self.error

    def leave(self, detached: Detached | None = OUT) -> None:
        """Let a request have left its batch, or be found to have ended."""
        self.departures.append(Departure("a", detached, None if detached is None else Source((4, 5))))


class Asked:
    """An agent and what it has answered."""

    def __init__(self) -> None:
        self.port = Port()
        self.answers: list[TaskAnswer[Source]] = []
        self.agent: MoveAgent[Source] = MoveAgent(
            self.port, answer=self.answers.append, ring=lambda: self.agent.look_at_copies()
        )

    def ask(self, verb: MoveVerb, move: str = "m1", *, num_tokens: int = 0) -> list[str]:
        task: MoveTask[Source] = MoveTask(move, verb, "a", num_tokens, Source((1, 2)))
        task.request, task.detached = REQUEST, OUT
        return self.agent.take(task)

    def stop(self) -> None:
        """Let a request stand still; it leaves with the step under way."""
        self.agent.stop_after_first("a")
        assert self.agent.waits_for_first_tokens
        assert self.agent.on_first_token("a", is_finished=False)
        assert not self.agent.waits_for_first_tokens

    def leave(self, detached: Detached | None = OUT) -> None:
        self.port.leave(detached)
        self.agent.look()

    def take_answers(self) -> list[tuple[str, MoveVerb, bool]]:
        answers = [(each.move, each.verb, each.ok) for each in self.answers]
        self.answers.clear()
        return answers

    def take_calls(self) -> list[str]:
        calls, self.port.calls = self.port.calls, []
        return calls


@pytest.fixture
def asked() -> Asked:
    return Asked()


def frozen(move: str = "m1", *, ok: bool = True) -> list[tuple[str, MoveVerb, bool]]:
    return [(move, MoveVerb.FREEZE, ok)]


class TestLeaving:
    """Requests that stand still, or are asked for, before or after they have left their batch."""

    def test_a_request_that_runs_is_taken_out_for_a_move(self, asked: Asked) -> None:
        asked.ask(MoveVerb.FREEZE)
        assert (asked.take_calls(), asked.take_answers()) == (["detach a"], [])
        asked.leave()
        assert asked.answers[0].detached == OUT
        assert asked.answers[0].source == Source((4, 5))
        assert asked.take_answers() == frozen()
        asked.agent.look()
        assert asked.take_answers() == []

    def test_one_that_has_ended_meanwhile_is_refused(self, asked: Asked) -> None:
        asked.ask(MoveVerb.FREEZE)
        asked.leave(None)
        assert asked.take_answers() == frozen(ok=False)

    def test_one_that_stands_still_is_there_at_once(self, asked: Asked) -> None:
        asked.stop()
        asked.leave()
        assert asked.take_answers() == []
        asked.ask(MoveVerb.FREEZE)
        assert asked.take_answers() == frozen()
        assert asked.take_calls() == ["detach a"]

    def test_one_that_has_yet_to_leave_is_told_to_once(self, asked: Asked) -> None:
        asked.stop()
        asked.ask(MoveVerb.FREEZE)
        assert asked.take_answers() == []
        asked.leave()
        assert asked.take_answers() == frozen()
        assert asked.take_calls() == ["detach a"]

    @pytest.mark.parametrize("has_left", [False, True])
    def test_one_that_is_to_go_on_is_put_back_once_it_has_left(self, asked: Asked, has_left: bool) -> None:
        asked.stop()
        if has_left:
            asked.leave()
        asked.ask(MoveVerb.REATTACH, "")
        assert asked.take_calls() == ["detach a", "reattach a", "unhold a"]
        if not has_left:
            asked.leave()
            assert asked.take_calls() == ["reattach a"]
        asked.ask(MoveVerb.FREEZE, "m2")
        assert asked.take_calls() == ["detach a"], "it runs"
        assert asked.take_answers() == []

    @pytest.mark.parametrize("is_aborted", [False, True])
    def test_a_move_that_waits_for_one_is_answered_whatever_is_said_before_it_has_left(
        self, asked: Asked, is_aborted: bool
    ) -> None:
        asked.stop()
        asked.ask(MoveVerb.FREEZE)
        if is_aborted:
            asked.agent.forget(["a"])
        else:
            asked.ask(MoveVerb.UNHOLD, "m0")
        asked.leave()
        assert asked.take_answers() == frozen()
        assert "reattach a" not in asked.take_calls()
        asked.ask(MoveVerb.FREEZE, "m2")
        assert asked.take_calls() == ["detach a"], "nothing is left of it"

    def test_one_that_ends_with_its_first_token_does_not_stand_still(self, asked: Asked) -> None:
        asked.agent.stop_after_first("a")
        assert not asked.agent.on_first_token("b", is_finished=False)
        assert not asked.agent.on_first_token("a", is_finished=True)
        assert not asked.agent.on_first_token("a", is_finished=False)
        assert asked.take_calls() == []

    def test_one_that_is_gone_before_its_first_token_stops_nobody(self, asked: Asked) -> None:
        asked.agent.stop_after_first("a")
        asked.agent.forget(["a"])
        assert not asked.agent.waits_for_first_tokens


class TestLending:
    def test_full_blocks(self, asked: Asked) -> None:
        asked.ask(MoveVerb.HOLD)
        assert asked.answers[0].source == Source((0, 1))
        assert asked.take_answers() == [("m1", MoveVerb.HOLD, True)]

    def test_a_prompt_is_lent_once_so_much_of_it_is_computed(self, asked: Asked) -> None:
        asked.ask(MoveVerb.HOLD, num_tokens=48)
        asked.agent.look()
        assert asked.take_answers() == []
        asked.port.num_full = 48
        asked.agent.look()
        assert asked.take_answers() == [("m1", MoveVerb.HOLD, True)]
        asked.agent.look()
        assert asked.take_answers() == []

    @pytest.mark.parametrize("verb", [MoveVerb.UNHOLD, MoveVerb.FREEZE])
    def test_nobody_waits_for_a_prompt_that_is_no_longer_asked_for(
        self, asked: Asked, verb: MoveVerb
    ) -> None:
        asked.ask(MoveVerb.HOLD, num_tokens=48)
        asked.ask(verb)
        asked.port.num_full = 48
        asked.agent.look()
        assert asked.take_answers() == []

    def test_what_has_nothing_to_lend_or_lends_too_much_is_refused(self, asked: Asked) -> None:
        asked.port.num_full = 0
        asked.ask(MoveVerb.HOLD)
        asked.port.error = KVUnavailable("too much is lent")
        asked.ask(MoveVerb.HOLD, "m2")
        assert asked.answers[1].why == "too much is lent"
        assert asked.take_answers() == [("m1", MoveVerb.HOLD, False), ("m2", MoveVerb.HOLD, False)]


class TestTaking:
    def test_room_copy_and_adoption(self, asked: Asked) -> None:
        asked.ask(MoveVerb.RESERVE, num_tokens=64)
        asked.ask(MoveVerb.PULL)
        assert asked.take_answers() == [("m1", MoveVerb.RESERVE, True)]
        asked.port.copies[0].set_result(4096)
        assert asked.answers[0].num_bytes == 4096
        asked.ask(MoveVerb.ADOPT)
        assert asked.take_answers() == [("m1", MoveVerb.PULL, True), ("m1", MoveVerb.ADOPT, True)]
        assert asked.ask(MoveVerb.RELEASE) == ["a~2"], "it is taken back"
        assert asked.ask(MoveVerb.RELEASE) == []

    def test_refusals(self, asked: Asked) -> None:
        asked.ask(MoveVerb.RESERVE, num_tokens=65)
        assert asked.answers[0].why == "no capacity"
        asked.port.error = InvalidRequest("in use")
        asked.ask(MoveVerb.ADOPT)
        assert asked.answers[1].why == "in use"
        assert not any(ok for *_, ok in asked.take_answers())
        asked.port.error = None
        assert asked.ask(MoveVerb.RELEASE) == []

    @pytest.mark.parametrize("kind", [KVUnavailable, OSError])
    def test_a_copy_that_fails(self, asked: Asked, kind: type[Exception]) -> None:
        asked.ask(MoveVerb.PULL)
        asked.port.copies[0].set_exception(kind("the lease is over"))
        assert asked.answers[0].why == "the lease is over"
        assert asked.take_answers() == [("m1", MoveVerb.PULL, False)]

    def test_nobody_hears_of_a_copy_into_room_that_was_given_up(self, asked: Asked) -> None:
        asked.ask(MoveVerb.PULL)
        asked.ask(MoveVerb.RELEASE)
        asked.port.copies[0].set_result(4096)
        asked.agent.look()
        assert asked.take_answers() == []

    def test_the_source_forgets_what_is_taken(self, asked: Asked) -> None:
        asked.ask(MoveVerb.TAKE)
        assert asked.take_calls() == ["free a"]


def test_an_engine_that_hands_nothing_over_refuses_all_that_is_answered() -> None:
    answers: list[TaskAnswer[Source]] = []
    agent: MoveAgent[Source] = MoveAgent(None, answer=answers.append, ring=lambda: None)
    for verb in MoveVerb:
        assert agent.take(MoveTask("m1", verb, "a")) == []
    agent.stop_after_first("a")
    assert not agent.on_first_token("a", is_finished=False)
    agent.look()
    assert [each.verb for each in answers] == [
        MoveVerb.RESERVE,
        MoveVerb.HOLD,
        MoveVerb.PULL,
        MoveVerb.FREEZE,
        MoveVerb.ADOPT,
    ]
    assert not any(each.ok for each in answers)
