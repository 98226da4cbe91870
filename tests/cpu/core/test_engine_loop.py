"""What the loop of an engine process does without work, and with requests that it cannot take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import zmq

from onbeat.core.errors import ModelLoadError
from onbeat.core.handover import MoveTask, MoveVerb
from onbeat.core.protocols import EnginePulse, StepOutputs
from onbeat.core.request import FinishReason, Request, RequestOutput, SamplingParams
from onbeat.engine import process
from onbeat.engine.grammar_port import GrammarPort
from onbeat.engine.link import EngineLink
from onbeat.engine.messages import (
    AddRequest,
    AskMove,
    MoveAnswer,
    Ready,
    Shutdown,
    Stepped,
    decode_from_engine,
    encode,
)
from onbeat.engine.process import StepWait
from onbeat.text.grammar.compiler import GrammarCompiler
from onbeat.text.grammar.source import choice_grammar

LINK, READY = EngineLink(endpoint=""), Ready(None, None)  # type: ignore[arg-type]


class IdleCore:
    """An engine without work, such as one whose streams have left with their KV still lent."""

    kv = None
    grammars: GrammarPort | None = None
    has_work = False
    oldest_step = None
    waits_for_others = False

    def __init__(self, on_check) -> None:
        self.scheduler = SimpleNamespace(check_invariants=on_check)

    def take_load(self):
        return None

    take_news = take_load

    def do_idle_work(self) -> bool:
        return False

    def launch(self) -> bool:
        return False

    def shutdown(self) -> None:
        """It holds nothing."""

    def pulse(self) -> EnginePulse:
        return EnginePulse(0.0)


@pytest.mark.parametrize("asks", [0, 3])
def test_blocks_are_checked_while_nobody_waits_for_an_answer(
    asks: int, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "WAKE_SECONDS", 0.02)
    checks: list[str] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as fleet, context.socket(zmq.DEALER) as inbox:
        fleet.bind(f"ipc://{tmp_path}/socket")
        inbox.connect(f"ipc://{tmp_path}/socket")

        def check() -> None:
            if not checks:
                fleet.send(encode(Shutdown()))
            checks.append("checked")

        for number in range(asks):
            fleet.send(encode(AskMove(MoveTask(f"m{number}", MoveVerb.HOLD, "a"))))
        loop = process._EngineLoop(IdleCore(check), StepWait(inbox), LINK, READY)  # type: ignore[arg-type]
        if asks:
            assert inbox.poll(5000), "they have come"
            fleet.send(encode(Shutdown()))
        loop.serve()
        answers = [decode_from_engine(fleet.recv()) for _ in range(asks)]
    moves = [each.answer for each in answers if isinstance(each, MoveAnswer)]
    assert [(each.move, each.ok) for each in moves] == [(f"m{number}", False) for number in range(asks)]
    assert bool(checks) == (not asks)


class PickyCore(IdleCore):
    """Takes requests, but for one that breaks it in the middle."""

    def __init__(self, grammars: GrammarPort) -> None:
        super().__init__(lambda: None)
        self.grammars = grammars
        self.taken: list[str] = []
        self.aborted: list[str] = []

    def add(self, request) -> None:
        if request.request_id == "odd":
            raise ZeroDivisionError("its lengths are odd")
        self.taken.append(request.request_id)

    def abort(self, request_ids) -> list[RequestOutput]:
        self.aborted += request_ids
        return []

    def message(self, outputs) -> StepOutputs:
        return StepOutputs(0.0, outputs)


def test_a_request_that_cannot_be_taken_fails_alone(tmp_path, caplog) -> None:
    """Its tokenizer cannot be read, or the scheduler does not cope with it: the others are served."""

    class RustPanic(BaseException):
        """As libraries in Rust raise it."""

    problems = [ModelLoadError("no tokenizer.json there"), RustPanic("index out of bounds")]

    def load() -> GrammarCompiler:
        raise problems.pop(0)

    port = GrammarPort(load)
    core = PickyCore(port)
    with zmq.Context() as context, context.socket(zmq.DEALER) as fleet, context.socket(zmq.DEALER) as inbox:
        fleet.bind(f"ipc://{tmp_path}/socket")
        inbox.connect(f"ipc://{tmp_path}/socket")
        loop = process._EngineLoop(core, StepWait(inbox), LINK, READY)  # type: ignore[arg-type]
        for name, sampling in (
            ("no-tokenizer", SamplingParams(grammar=choice_grammar(["a"]))),
            ("panic", SamplingParams(grammar=choice_grammar(["b"]))),
            ("odd", SamplingParams()),
            ("plain", SamplingParams()),
        ):
            fleet.send(
                encode(
                    AddRequest(
                        Request(
                            request_id=name,
                            prompt_token_ids=(1, 2),
                            sampling=sampling,
                            resumed_token_ids=(3,),
                        )
                    )
                )
            )
        ends: dict[str, RequestOutput] = {}
        while len(ends) < 3:
            assert loop._compiling.names or inbox.poll(5000), "a request is lost"
            loop._read_inbox()
            loop._add_compiled()
            while fleet.poll(50):
                message = decode_from_engine(fleet.recv())
                if isinstance(message, Stepped):
                    ends |= {each.request_id: each for each in message.outputs.outputs}
        loop._wait.close()
    port.close()
    assert core.taken == ["plain"]
    assert core.aborted == ["odd", "no-tokenizer", "panic"]
    for name, why in (
        ("no-tokenizer", "ModelLoadError: no tokenizer.json there"),
        ("panic", "RustPanic: index out of bounds"),
        ("odd", "ZeroDivisionError: its lengths are odd"),
    ):
        assert ends[name].finish_reason is FinishReason.ERROR
        assert (ends[name].error_code, ends[name].num_previous_tokens) == (None, 1)
        assert why in (ends[name].error or "")
    assert len(caplog.records) == 3
