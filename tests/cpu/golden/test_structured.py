"""Every answer under a schema is valid, whatever happens to it on the way, and the same as undisturbed.

A tiny model without sense is held to each of the schemas, greedily and by chance; most of its tokens are
refused and drawn again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from onbeat.core.request import FinishReason, Request
from onbeat.engine.grammar_port import GrammarPort
from onbeat.engine.speculation.build import NoDrafts
from onbeat.recording.reader import Recording
from onbeat.recording.writer import create_record
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.simulator.replay.decisions import Replay
from onbeat.text.grammar.source import choice_grammar, json_grammar
from tests.cpu.engine.engines import CudaEngine
from tests.cpu.engine.forwards import MakeForward, on_native, on_torch
from tests.cpu.engine.tiny_models import StateCheckpoint, hf_tiny_model, random_prompt, tiny_model
from tests.cpu.golden.moving import Pair, make_core, undisturbed
from tests.cpu.golden.test_resumed_streams import resume_everywhere
from tests.cpu.speculation.runs import LIMITS, Run, assert_same, fixed, make_request, ngram, run
from tests.grammars import COMPACT, TINY_EOS, check_valid, make_tiny_compiler, tiny_text
from tests.pure.recording.recorded import make_header
from tests.schemas import SCHEMAS

pytestmark = pytest.mark.golden

LIMITS_HERE: dict[str, Any] = {"max_model_len": 512, "num_blocks": 256, "max_num_seqs": 16}
PORT = GrammarPort(make_tiny_compiler)


def exact() -> MakeForward:
    return on_torch(tiny_model("llama3", torch.float64).weights)


def ask(number: int, name: str = "", *, temperature: float = 1.0, seed: int = 0, style=COMPACT) -> Request:
    return make_request(
        f"s{number}{name}",
        random_prompt(5 + number % 30),
        400,
        grammar=json_grammar(SCHEMAS[number], style),
        temperature=temperature,
        seed=seed + number,
        stop_token_ids=(TINY_EOS,),
    )


def requests_of(numbers: Sequence[int], temperature: float = 1.0) -> list[Request]:
    return [ask(number, temperature=temperature) for number in numbers]


def number_of(name: str) -> int:
    return int(name[1:].partition("-")[0])


def check_all(outcome: Run, *, may_be_cut: int = 0) -> None:
    """Check every answer; greedily, a few may write digits of one fraction without an end."""
    cut = []
    for name, each in outcome.outcomes.items():
        assert each.error is None, (name, each.error)
        if each.finish_reason is not FinishReason.STOP:
            cut.append(tiny_text(each.token_ids))
            continue
        check_valid(tiny_text(each.token_ids), SCHEMAS[number_of(name)])
    assert len(cut) <= may_be_cut, cut


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_schema_with_and_without_drafts(temperature: float) -> None:
    requests = requests_of(range(len(SCHEMAS)), temperature)
    plain = run(exact(), requests, guides=PORT, **LIMITS_HERE)
    check_all(plain, may_be_cut=0 if temperature else 5)
    drafted = run(exact(), requests, speculation=fixed(5), proposer=ngram(5), guides=PORT, **LIMITS_HERE)
    assert_same(drafted, plain)
    assert drafted.num_accepted > 500, "text that must come is drafts"
    assert len(drafted.steps) < 0.9 * len(plain.steps)


def test_text_that_must_come_is_drafted_without_anything_else() -> None:
    guided = requests_of(range(0, len(SCHEMAS), 6))
    free = [make_request(f"free{index}", random_prompt(9 + index), 40, seed=index) for index in range(3)]
    plain = run(exact(), [*guided, *free], guides=PORT, **LIMITS_HERE)
    drafted = run(
        exact(), [*guided, *free], speculation=fixed(5), proposer=NoDrafts(), guides=PORT, **LIMITS_HERE
    )
    assert_same(drafted, plain)
    assert drafted.num_accepted > 80
    assert drafted.num_accepted > 0.75 * drafted.num_drafted, "other spellings are few"
    assert not any(drafted.outcomes[each.request_id].num_drafted for each in free)


def test_every_schema_short_of_memory() -> None:
    requests = requests_of(range(len(SCHEMAS)))
    plain = run(exact(), requests, guides=PORT, **LIMITS_HERE)
    short = run(exact(), requests, guides=PORT, **LIMITS_HERE | {"num_blocks": 34})
    assert short.num_preemptions > 5
    assert_same(short, plain)
    check_all(short)


def test_four_choices_each() -> None:
    requests = [
        ask(number, f"-{choice}", seed=1000 * choice)
        for number in range(0, len(SCHEMAS), 3)
        for choice in range(4)
    ]
    check_all(run(exact(), requests, guides=PORT, **LIMITS_HERE))


def test_streams_that_were_cut_go_on() -> None:
    resume_everywhere(exact(), requests_of(range(0, len(SCHEMAS), 4)), guides=PORT, **LIMITS_HERE)


def test_streams_that_move() -> None:
    requests = requests_of(range(1, len(SCHEMAS), 4))
    limits = {**LIMITS, **LIMITS_HERE}
    expected = undisturbed(make_core(exact(), guides=PORT, **limits), [requests])
    pair = Pair([make_core(exact(), guides=PORT, **limits) for _ in range(2)])
    for index, request in enumerate(requests):
        pair.add(request, index % 2)
    pair.run(Random(3), share=0.03)
    streams = pair.streams
    pair.close()
    assert streams.tokens == expected.tokens
    assert streams.ends == expected.ends
    assert streams.num_moves >= 5
    for name, token_ids in streams.tokens.items():
        check_valid(tiny_text(token_ids), SCHEMAS[number_of(name)])


@pytest.mark.parametrize("overlapped", [False, True])
def test_free_rows_keep_their_tokens_beside_guided_ones(overlapped: bool) -> None:
    free = [make_request(f"free{index}", random_prompt(9 + index), 40, seed=index) for index in range(6)]
    alone = run(exact(), free, overlapped=overlapped, **LIMITS_HERE)
    guided = requests_of(range(0, 60, 6))
    mixed = run(exact(), [*free, *guided], overlapped=overlapped, guides=PORT, **LIMITS_HERE)
    for request in free:
        assert mixed.token_ids[request.request_id] == alone.token_ids[request.request_id]
    assert_same_answers(mixed, run(exact(), guided, guides=PORT, **LIMITS_HERE))


def assert_same_answers(mixed: Run, expected: Run) -> None:
    for name, token_ids in expected.token_ids.items():
        assert mixed.token_ids[name] == token_ids
        check_valid(tiny_text(token_ids), SCHEMAS[number_of(name)])


def test_the_native_engine(native_library) -> None:
    checkpoint = StateCheckpoint(hf_tiny_model("llama3", torch.float64))
    check_all(
        run(on_native(native_library, checkpoint), requests_of(range(0, 104, 5)), guides=PORT, **LIMITS_HERE)
    )


def test_the_gpu_engine_beside_steps_that_choose_for_themselves() -> None:
    """Free rows are chosen on the device until a guided one joins, and again after it has ended."""
    make_forward = CudaEngine().make_forward("llama3")
    requests = [*requests_of(range(0, 104, 9), 0.0), make_request("free", random_prompt(7), 200)]
    found = run(make_forward, requests, overlapped=True, guides=PORT, **LIMITS_HERE)
    free = found.outcomes.pop("free")
    assert len(free.token_ids) == 200
    check_all(found)


def test_a_grammar_that_cannot_be_enforced_ends_its_request_alone() -> None:
    good = ask(0)
    bad = make_request(
        "bad", random_prompt(5), 9, grammar=json_grammar({"type": "array", "uniqueItems": True})
    )
    dead = make_request("dead", random_prompt(5), 9, grammar=choice_grammar(["ab"]), allowed_token_ids=(0,))
    found = run(exact(), [bad, good, dead], guides=PORT, **LIMITS_HERE).outcomes
    assert "uniqueItems" in str(found["bad"].error)
    assert "the grammar with allowed_token_ids" in str(found["dead"].error)
    assert found["s0"].finish_reason is FinishReason.STOP
    none = run(exact(), [ask(1)], **LIMITS_HERE).outcomes
    assert "enforces no grammars" in str(none["s1"].error)


def test_a_record_replays_identically(tmp_path: Path) -> None:
    limits = {**LIMITS, **LIMITS_HERE, "num_blocks": 34}
    writer = create_record(tmp_path / "run.gz")(make_header(SchedulerConfig(**limits)))
    core = make_core(exact(), guides=PORT, recorder=writer, **limits)
    dead = {"grammar": choice_grammar(["ab"]), "allowed_token_ids": (0,)}
    requests = [*requests_of(range(0, 104, 2)), make_request("free", random_prompt(9), 50)]
    requests += [make_request(f"dead{number}", random_prompt(40), 9, **dead) for number in range(3)]
    ends = {}
    for request in requests:
        core.add(request)
    while core.has_work:
        message = core.step()
        ends.update({each.request_id: each.error_code for each in message.outputs} if message else {})
    num_preemptions = core.scheduler.table.num_preemptions
    core.shutdown()
    assert {name for name, code in ends.items() if code == "grammar_too_complex"} == {
        "dead0",
        "dead1",
        "dead2",
    }
    result = Replay(Recording(tmp_path / "run.gz")).run()
    assert result.difference is None
    assert result.num_failed == 3
    assert result.num_preemptions == num_preemptions > 0
