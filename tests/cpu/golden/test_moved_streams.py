"""A stream that is moved from engine to engine while it runs equals the undisturbed one, token for token.

Its KV is copied as it is, so that holds in bfloat16, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from onbeat.core.request import Request
from onbeat.engine.weights.open import open_checkpoint
from onbeat.hub.files import ModelFiles
from onbeat.scheduler.replica.policies import POLICIES
from tests.cpu.engine.forwards import MakeForward, on_native
from tests.cpu.engine.stateful_models import STATEFUL
from tests.cpu.engine.tiny_models import FAMILIES, KIN, StateCheckpoint, hf_tiny_model, tiny_model
from tests.cpu.golden.moving import (
    MOST_STEPS,
    Pair,
    Streams,
    exact,
    invariant,
    make_core,
    requests_of_text,
    undisturbed,
)
from tests.cpu.golden.test_windows_tiny import WINDOWED
from tests.cpu.speculation.runs import fixed, make_requests, ngram
from tests.cpu.speculation.test_lossless import SAMPLINGS, budget, requests_of_all_samplings
from tests.many_cases import each_case

pytestmark = pytest.mark.golden


def check_moves(
    make_forward: MakeForward,
    requests: Sequence[Request],
    *,
    share: float = 0.15,
    is_alone: bool = False,
    most_steps: int = MOST_STEPS,
    **options: Any,
) -> Streams:
    """Run requests in one engine; then in two, each moved to and fro, with the same tokens.

    Parameters
    ----------
    share : of the steps, those after which a stream is moved.
    is_alone : each request begins when the one before has ended.
    most_steps : that are taken while a copy runs, if it takes so long.
    """
    batches = [[request] for request in requests] if is_alone else [requests]
    expected = undisturbed(make_core(make_forward, **options), batches)
    pair, random = (
        Pair([make_core(make_forward, **options) for _ in range(2)], most_steps=most_steps),
        Random(7),
    )
    for batch in batches:
        for index, request in enumerate(batch):
            pair.add(request, index % 2)
        pair.run(random, share=share)
    streams = pair.streams
    pair.close()
    assert streams.tokens == expected.tokens
    assert streams.ends == expected.ends
    assert streams.num_moves >= len(requests) / 2
    return streams


# In the fast tests every third one: all of them move on the native engine, which is quick.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if number % 3 else [])
        for number, name in enumerate(FAMILIES)
    ],
)
def test_every_family(name: str) -> None:
    check_moves(exact(name), make_requests(temperature=0.8, repetition_penalty=1.1))


@each_case("name", FAMILIES | KIN)
def test_every_family_on_the_native_engine(native_library: Any, name: str) -> None:
    check_moves(invariant(native_library, name), make_requests(temperature=0.8, repetition_penalty=1.1))


# On torch every third model, as above, and with drafts none in the fast tests.
@pytest.mark.parametrize(
    ("name", "backend", "drafts"),
    [
        pytest.param(
            name,
            backend,
            drafts,
            marks=[pytest.mark.slow] * (backend == "torch" and (drafts or number % 3 > 0)),
        )
        for number, name in enumerate(WINDOWED)
        for backend in ("native", "torch")
        for drafts in (False, True)
    ],
)
def test_windows_that_give_kv_back(
    name: str, drafts: bool, backend: str, request: pytest.FixtureRequest
) -> None:
    make_forward = exact(name)
    if backend == "native":
        make_forward = invariant(request.getfixturevalue("native_library"), name)
    config = tiny_model(name).weights.config
    windows: dict[str, Any] = {
        "num_tables": 1 + config.kv_groups.num_windowed,
        "window_length": config.sliding_window,
    }
    more: dict[str, Any] = {"speculation": fixed(3), "make_proposer": lambda: ngram(3)} if drafts else {}
    # With drafts there are fewer steps: more of them begin a move, and a copy takes no more than one.
    moves: dict[str, Any] = {"share": 0.4, "most_steps": 1} if drafts else {}
    check_moves(make_forward, make_requests(temperature=0.8), **moves, **windows, **more)


@each_case("sampling", SAMPLINGS)
def test_every_way_to_sample(native_library: Any, sampling: str) -> None:
    check_moves(invariant(native_library), make_requests(**SAMPLINGS[sampling]), share=0.4)


def test_all_ways_to_sample_beside_one_another() -> None:
    check_moves(exact(), requests_of_all_samplings(), max_num_seqs=16)


def test_in_float32(native_library: Any) -> None:
    make_forward = on_native(native_library, StateCheckpoint(hf_tiny_model("llama3", torch.float64)))
    check_moves(make_forward, make_requests(temperature=0.8, presence_penalty=0.3))


@pytest.mark.parametrize("backend", ["torch", "native", pytest.param("torch-all", marks=pytest.mark.slow)])
@each_case("name", STATEFUL)
def test_states_go_with_their_streams(name: str, backend: str, request: pytest.FixtureRequest) -> None:
    """Also those of prompts of which only a part is computed; and with one place for states that come."""
    make_forward = exact(name)
    if backend == "native":
        library = request.getfixturevalue("native_library")
        make_forward = on_native(library, StateCheckpoint(hf_tiny_model(name, torch.float64)))
    requests = make_requests(temperature=0.8, repetition_penalty=1.1)
    drafts: dict[str, Any] = {"speculation": fixed(3), "make_proposer": lambda: ngram(3)}
    ways: list[tuple[int, int, dict[str, Any]]] = [(8, 128, {}), (1, 24, {}), (4, 48, drafts)]
    if backend == "torch":  # in turn: the native engine, which is quick, has all of every model
        ways = [ways[list(STATEFUL).index(name) % 3]]
    for num_snapshots, num_blocks, more in ways:
        streams = check_moves(
            make_forward,
            requests,
            **more,
            share=0.4,
            num_snapshots=num_snapshots,
            num_blocks=num_blocks,
            max_num_batched_tokens=24,
            most_steps=0,  # else how far a prompt is depends on how long copies take
        )
        assert streams.num_in_prompt


@pytest.mark.parametrize(
    ("policy", "overlapped"),
    [
        # The other half is cut and resumed (`test_resumed_streams`).
        pytest.param(name, is_overlapped, marks=[pytest.mark.slow] * ((number + is_overlapped) % 2))
        for number, name in enumerate(POLICIES)
        for is_overlapped in (False, True)
        if not POLICIES[name].holds_finished
    ],
)
def test_every_policy(native_library: Any, policy: str, overlapped: bool) -> None:
    requests, limits = make_requests(temperature=0.8, frequency_penalty=0.4), budget(policy)
    check_moves(invariant(native_library), requests, overlapped=overlapped, policy=policy, **limits)


@pytest.mark.parametrize("is_cached", [True, False])
def test_short_of_memory(is_cached: bool) -> None:
    check_moves(exact(), make_requests(temperature=0.8), num_blocks=20, enable_prefix_caching=is_cached)


@pytest.mark.parametrize("overlapped", [False, True], ids=["one-step", "overlapped"])
def test_with_drafts(overlapped: bool) -> None:
    requests = make_requests(presence_penalty=0.2)
    options: dict[str, Any] = {"speculation": fixed(3), "make_proposer": lambda: ngram(3)}
    check_moves(exact(), requests, overlapped=overlapped, share=0.3, **options)


@pytest.fixture(scope="module")
def smollm2(native_library: Any, smollm2_gguf: Path) -> MakeForward:
    checkpoint = open_checkpoint(ModelFiles(kind="gguf", path=smollm2_gguf, name="smollm2"))
    return on_native(native_library, checkpoint, dtype=torch.bfloat16)


def test_smollm2_in_bfloat16(smollm2: MakeForward, smollm2_gguf: Path) -> None:
    """Whole blocks are moved, of 23,040 bytes a token; the odd streams are sampled."""
    requests = requests_of_text(smollm2_gguf, 4)
    # One by one: in bfloat16 a row may round differently beside more rows, whether its request moves or not.
    streams = check_moves(smollm2, requests, share=0.3, is_alone=True)
    assert streams.num_moves >= 12
    assert streams.num_bytes
    assert streams.num_bytes % (16 * 23_040) == 0
