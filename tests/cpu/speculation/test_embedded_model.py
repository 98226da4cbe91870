"""Greedy tokens of SmolLM2-135M with drafts equal those without, on text that repeats itself.

The rule of exactness: a token may differ only where the two largest logits are closer than what float32
allows when sums run in another order; what comes after such a place is not compared.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onbeat.core.request import Request
from onbeat.engine.engine_config import Quantization
from onbeat.engine.torch.weights import load_weights
from onbeat.engine.weights.open import open_checkpoint
from onbeat.hub.files import ModelFiles
from onbeat.text.tokenizer import load_tokenizer
from tests.cpu.engine.forwards import MakeForward, on_native, on_torch
from tests.cpu.speculation.runs import Run, fixed, make_request, ngram, run

TEXT = Path(__file__).parents[2] / "data" / "pride_and_prejudice.txt"
TIE_GAP = 1e-4
MAX_TOKENS = 40


# With plain weights tiny models draft (`test_lossless`), and this one is served (`test_policies_smollm2`).
@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("torch", "native")),
        "native-as-in-file",
    ],
)
def make_forward(request: pytest.FixtureRequest, smollm2_gguf: Path) -> MakeForward:
    checkpoint = open_checkpoint(ModelFiles(kind="gguf", path=smollm2_gguf, name="smollm2"))
    if request.param == "torch":
        return on_torch(load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu")))
    quantization: Quantization = "auto" if request.param == "native-as-in-file" else "none"
    return on_native(request.getfixturevalue("native_library"), checkpoint, quantization=quantization)


@pytest.fixture(scope="module")
def requests(smollm2_gguf: Path) -> list[Request]:
    """A passage and its beginning once more: the model goes on to repeat it, but not always exactly."""
    token_ids = load_tokenizer(smollm2_gguf).encode(
        TEXT.read_text(encoding="utf-8"), add_special_tokens=False
    )
    return [
        make_request(
            f"r{start}", [*token_ids[start : start + length], *token_ids[start : start + 12]], MAX_TOKENS
        )
        for start, length in ((0, 90), (400, 150), (1000, 60))
    ]


@pytest.fixture(scope="module")
def expected(make_forward: MakeForward, requests: list[Request]) -> Run:
    """Without drafts, with how near the second choice was."""
    asking = [make_request(r.request_id, r.prompt_token_ids, MAX_TOKENS, num_logprobs=2) for r in requests]
    return run(make_forward, asking)


@pytest.mark.parametrize(
    ("num_drafts", "overlapped"),
    [
        *((3, False), (8, True)),
        pytest.param(3, True, marks=pytest.mark.slow),
        pytest.param(8, False, marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens(
    make_forward: MakeForward, requests: list[Request], expected: Run, num_drafts: int, overlapped: bool
) -> None:
    proposer = ngram(num_drafts, prompt_lookup_max=5, prompt_lookup_min=2)
    speculated = run(
        make_forward, requests, speculation=fixed(num_drafts), proposer=proposer, overlapped=overlapped
    )
    for key, token_ids in speculated.token_ids.items():
        _check(token_ids, expected, key)
    assert speculated.num_accepted > 20
    assert len(speculated.steps) < len(expected.steps)


def _check(token_ids: list[int], expected: Run, key: str) -> None:
    outcome = expected.outcomes[key]
    assert len(token_ids) == len(outcome.token_ids)
    for token_id, entry in zip(token_ids, outcome.logprobs, strict=True):
        if token_id != entry.token_id:
            first, second = entry.top_logprobs[:2]
            assert first - second < TIE_GAP
            return
