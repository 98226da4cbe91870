"""Steps that are compared at the start: a vLLM that misreads them is refused, one that rounds is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onbeat.core.errors import ConfigError
from onbeat.engine.backends.vllm import can_compare, compare_steps
from onbeat.engine.device import CPU, DeviceConfig
from onbeat.engine.dtypes import DTYPES
from onbeat.engine.vllm.runner import VllmRunner
from tests.pure.scheduler.driver import make_config

BLOCK = 16
VOCABULARY = 100


class Workers:
    """Keeps tokens where a model keeps keys and values; what it says of the next one depends on all of them.

    Parameters
    ----------
    misreads : what it does otherwise than it is told; empty for nothing.
    scale : of its log-probabilities.
    """

    overlaps = has_stages = has_failed = False
    version = "9.9.9"
    num_slots = num_drafts = 0
    most_blocks = 256 // BLOCK
    graphs = None

    def __init__(self, misreads: str = "", scale: float = 1.0, *, is_second_runner: bool) -> None:
        self.is_second_runner = is_second_runner
        self._misreads, self._scale = misreads, scale
        self._cache: dict[tuple[int, int], int] = {}
        self._known: dict[str, SimpleNamespace] = {}
        self._rng = np.random.default_rng(0)
        self._drawn: list[tuple[str, int, Any]] = []

    def no_cached_requests(self) -> Any:
        names = ["req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens", "new_token_ids"]
        return SimpleNamespace(resumed_req_ids=set(), all_token_ids={}, **{name: [] for name in names})

    def blocks(self, block_ids: Any, slot: int | None, *, is_new: bool = True) -> tuple[list[int], ...]:
        return (list(block_ids),)

    def new_request(self, request: Any, outputs: Any, blocks: Any, num_computed: int) -> Any:
        return SimpleNamespace(
            name=request.request_id,
            tokens=[*request.prompt_token_ids, *outputs],
            blocks=list(blocks[0]),
            computed=num_computed,
            ids=list(request.sampling.logprob_token_ids),
        )

    def step(
        self, new: Any, cached: Any, num_tokens: Any, finished: set[str], preempted: set[str], drafts: Any
    ) -> Any:
        for name in finished | (preempted if self.is_second_runner else set()):
            del self._known[name]
        for each in new:
            self._known[each.name] = each
            if self._misreads == "prefix" and each.computed:
                each.blocks[0] = 0
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            state = self._known[name]
            state.computed = computed
            if name in cached.resumed_req_ids:
                if self._misreads != "preemption":
                    state.blocks = list(blocks[0])
                state.tokens = list(cached.all_token_ids[name])
            elif blocks is not None and self._misreads == "chunks":
                state.blocks = [*blocks[0], *state.blocks]
            elif blocks is not None:
                state.blocks += blocks[0]
        if self._misreads == "step":
            raise TypeError("no such field")
        return SimpleNamespace(finished_req_ids=finished, num_tokens=num_tokens)

    def begin(self, step: Any) -> bool:
        self._drawn = []
        for name, number in step.num_tokens.items():
            state = self._known[name]
            end = state.computed + number
            for place in range(state.computed, end):
                self._cache[self._place(state, place)] = state.tokens[place]
            if end >= len(state.tokens):
                read = [self._cache.get(self._place(state, place), -1) for place in range(end)]
                values = np.random.default_rng([each + 1 for each in read]).normal(size=VOCABULARY)
                values = values * self._scale + self._rng.normal(size=VOCABULARY) * 0.02
                state.tokens.append(int(values.argmax()))
                self._drawn.append((name, state.tokens[-1], values[state.ids]))
        return bool(step.num_tokens)

    def _place(self, state: Any, place: int) -> tuple[int, int]:
        return state.blocks[place // BLOCK], place % BLOCK

    def sample(self, grammar: Any) -> Any:
        drawn = {name: index for index, (name, _, _) in enumerate(self._drawn)}
        rows = self._drawn
        theirs = SimpleNamespace(
            req_id_to_index=drawn,
            sampled_token_ids=[[token] for _, token, _ in rows],
            num_nans_in_logits=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            logprobs=SimpleNamespace(
                slice_request=lambda index, _: SimpleNamespace(
                    logprob_token_ids=np.array([[rows[index][1], *self._known[rows[index][0]].ids]]),
                    logprobs=np.array([[0.0, *rows[index][2]]]),
                )
            ),
        )
        return SimpleNamespace(result=lambda: theirs)


def make_runner(workers: Workers, **limits: Any) -> VllmRunner:
    limits = {"max_num_batched_tokens": 256, "enable_prefix_caching": True} | limits
    config = make_config("slo", **limits)
    model = SimpleNamespace(vocab_size=VOCABULARY)
    return VllmRunner(config, workers, model, DeviceConfig(CPU, DTYPES["float32"], 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("is_second_runner", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.0, 50.0])
def test_a_vllm_that_rounds_is_taken(is_second_runner: bool, scale: float) -> None:
    workers = Workers(scale=scale, is_second_runner=is_second_runner)
    compare_steps(make_runner(workers))
    assert not workers._known


@pytest.mark.parametrize(
    ("misreads", "words"),
    [
        ("chunks", "in chunks"),
        ("preemption", "preemption"),
        ("prefix", "prefix"),
        ("step", "no such field"),
    ],
)
def test_a_vllm_that_reads_steps_otherwise_is_refused(misreads: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"9.9.9.*{words}"):
        compare_steps(make_runner(Workers(misreads, is_second_runner=False)))


def test_limits_without_room_are_not_compared() -> None:
    workers = Workers(is_second_runner=False)
    assert can_compare(make_runner(workers))
    assert not can_compare(make_runner(workers, max_num_seqs=1))
    assert not can_compare(make_runner(workers, num_blocks=6, max_model_len=64))
