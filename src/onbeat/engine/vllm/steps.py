"""A planned step in vLLM's words, and what came of it in onbeat's.

vLLM's workers keep what they are told of a request (prompt, blocks, how it is sampled) until they hear that
it has finished. `Told` is our copy of that, so that each step says only what is new.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onbeat.core.request import Request, SamplingParams, TokenLogprobs
from onbeat.core.step import AdmittedRequest, SchedulerOutput
from onbeat.engine.guided_draw import Guides, begin_guide
from onbeat.engine.sampling_row import SamplingRow
from onbeat.engine.vllm.surface import Surface


@dataclass(slots=True)
class Told:
    """What vLLM's workers know of a request, and what they do not tell back."""

    request: Request
    row: SamplingRow
    """Its output tokens are those that have come; those of steps in flight are not among them."""
    block_ids: list[int]
    num_outputs: int
    """Output tokens, those of steps in flight included."""
    is_known: bool = False
    """Whether a step has told the workers of it."""
    is_back: bool = False
    """Whether it was preempted, and the workers are to forget the blocks that it had."""
    slot: int | None = None
    """Of its state, where layers without attention have one."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class Translator:
    """Makes vLLM's steps of onbeat's.

    Parameters
    ----------
    surface : of vLLM.
    """

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        self.told: dict[str, Told] = {}
        self.guides: Guides | None = None
        """Where guides of grammars come from; None: none is enforced."""
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        self._last: Set[str] = set()
        """Requests of the step before."""
        self._free_slots = list(range(surface.num_slots))
        """Of state; none where there is none."""

    def change(self, scheduled: SchedulerOutput) -> None:
        """Forget the requests that left, and take in those that came."""
        preempted = set(scheduled.preempted_ids).difference(scheduled.forgotten_ids)
        for name in preempted:
            self.told[name].is_back = True
            self._free(self.told[name])
        self._preempted |= preempted
        for name in (*scheduled.released_ids, *scheduled.forgotten_ids):
            if name not in preempted and (told := self.told.pop(name, None)) is not None:
                self._leave(told)
        for admitted in scheduled.admitted:
            self._admit(admitted)

    def step(self, scheduled: SchedulerOutput) -> Any:
        """Return vLLM's `SchedulerOutput`; requests have been changed before."""
        surface = self._surface
        new: list[Any] = []
        cached = surface.no_cached_requests()
        num_tokens: dict[str, int] = {}
        for row in scheduled.rows:
            name = row.request_id
            told = self.told[name]
            told.block_ids.extend(row.new_block_ids)
            if not told.is_known or (told.is_back and surface.is_second_runner):
                all_blocks = surface.blocks(told.block_ids, told.slot)
                outputs = told.row.output_token_ids
                new.append(surface.new_request(told.request, outputs, all_blocks, row.num_computed_tokens))
            else:
                blocks = told.block_ids if told.is_back else row.new_block_ids
                cached.req_ids.append(name)
                cached.new_block_ids.append(
                    surface.blocks(blocks, told.slot, is_new=told.is_back) if blocks else None
                )
                cached.num_computed_tokens.append(row.num_computed_tokens)
                cached.num_output_tokens.append(told.num_outputs)
                if told.is_back:
                    cached.resumed_req_ids.add(name)
                if name not in self._last:  # then the workers look here for what they have not kept
                    cached.all_token_ids[name] = [*told.request.prompt_token_ids, *told.row.output_token_ids]
            told.is_known, told.is_back = True, False
            num_tokens[name] = row.num_new_tokens
            told.num_outputs += row.samples
        step = surface.step(new, cached, num_tokens, self._finished, self._preempted)
        self._finished, self._preempted, self._last = set(), set(), num_tokens.keys()
        return step

    def _leave(self, told: Told) -> None:
        self._free(told)
        if told.is_known:
            self._finished.add(told.request.request_id)

    def _free(self, told: Told) -> None:
        if told.slot is not None:
            self._free_slots.append(told.slot)
            told.slot = None

    def _admit(self, admitted: AdmittedRequest) -> None:
        request, outputs = admitted.request, list(admitted.output_token_ids)
        row = SamplingRow(request.sampling, request.prompt_token_ids, outputs)
        begin_guide(row, self.guides)
        told = self.told.get(request.request_id)
        if told is None:
            told = self.told[request.request_id] = Told(request, row, [], 0)
        told.row, told.block_ids, told.num_outputs = row, list(admitted.block_ids), len(outputs)
        told.slot = self._free_slots.pop() if self._surface.num_slots else None


def row_logprobs(params: SamplingParams, lists: Any, index: int, num_tokens: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of a row's tokens.

    Parameters
    ----------
    lists : vLLM's: first the sampled token, then the likeliest or those that were asked for.
    index : of the row among vLLM's.
    """
    part = lists.slice_request(index, num_tokens)
    num = len(params.logprob_token_ids) or params.num_logprobs or 0
    return [
        _logprobs(ids, values, num) for ids, values in zip(part.logprob_token_ids, part.logprobs, strict=True)
    ]


def prompt_logprobs(tensors: Any, num: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of a prompt's tokens but the first."""
    lists = tensors.tolists()
    return [
        _logprobs(ids, values, num, rank=int(rank))
        for ids, values, rank in zip(
            lists.logprob_token_ids, lists.logprobs, lists.sampled_token_ranks, strict=True
        )
    ]


def _logprobs(
    ids: NDArray[np.integer[Any]], values: NDArray[np.floating[Any]], num: int, rank: int | None = None
) -> TokenLogprobs:
    return TokenLogprobs(
        int(ids[0]),
        float(values[0]),
        tuple(map(int, ids[1 : 1 + num])),
        tuple(map(float, values[1 : 1 + num])),
        rank,
    )


def sampled(token_ids: Sequence[int]) -> list[int]:
    """Return a row's tokens as plain integers, without vLLM's placeholders."""
    return [int(each) for each in token_ids if each >= 0]
