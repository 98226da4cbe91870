"""What the loop of an engine process does while there is nothing to run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import zmq

from onbeat.core.handover import MoveTask, MoveVerb
from onbeat.core.protocols import EnginePulse
from onbeat.engine import process
from onbeat.engine.messages import AskMove, Shutdown, decode_from_engine, encode


class IdleCore:
    """An engine without work, such as one whose streams have left with their KV still lent."""

    kv = grammars = None
    has_work = False
    oldest_step = None
    waits_for_others = False

    def __init__(self, on_check) -> None:
        self.scheduler = SimpleNamespace(check_invariants=on_check)

    def take_load(self):
        return None

    take_expired = take_load
    take_next_load = take_load

    def check_alive(self) -> None:
        pass

    def do_idle_work(self) -> bool:
        return False

    def launch(self) -> bool:
        return False

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
        loop = process._EngineLoop(IdleCore(check), inbox, address="")  # type: ignore[arg-type]
        if asks:
            assert inbox.poll(5000), "they have come"
            fleet.send(encode(Shutdown()))
        loop.run()
        loop.close()
        answers = [decode_from_engine(fleet.recv()) for _ in range(asks)]
    assert [(each.answer.move, each.answer.ok) for each in answers] == [
        (f"m{number}", False) for number in range(asks)
    ]
    assert bool(checks) == (not asks)
