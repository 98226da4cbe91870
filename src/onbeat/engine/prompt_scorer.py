"""Log-probabilities of the tokens of prompts: the logits behind each token, and what they say of the next.

Legend: N rows of logits, R of them those that sample, V vocabulary.
"""

# ruff: noqa: N806 -- tensor names carry shape suffixes

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from onbeat.core.request import TokenLogprobs
from onbeat.core.step import AdmittedRequest, ScheduledRequest
from onbeat.engine.forward import StepLogits
from onbeat.engine.input_batch import InputBatch, IntArray, StepInputs
from onbeat.engine.sampled import TokenSampler

MOST_LOGIT_BYTES = 64 << 20
"""Of logits that exist at once for prompts, as float32: a longer chunk is run in several passes."""


@dataclass(slots=True)
class _Prompt:
    num_tokens: int
    num_alternatives: int
    reports: list[TokenLogprobs] = field(default_factory=list)


class PromptScorer:
    """Keeps what is known of the prompts whose log-probabilities were asked for, until their first token.

    Parameters
    ----------
    batch : holds their tokens.
    sampler : reads logits.
    vocab_size : logits of a row.
    """

    def __init__(self, batch: InputBatch, sampler: TokenSampler, vocab_size: int) -> None:
        self._batch = batch
        self._sampler = sampler
        self._most_rows = max(1, MOST_LOGIT_BYTES // (4 * vocab_size))
        self._prompts: dict[int, _Prompt] = {}
        """By slot."""

    def admit(self, admitted: Sequence[AdmittedRequest], slots: Sequence[int]) -> None:
        """Note which requests are to be scored: one that has output tokens was, here or elsewhere."""
        for each, slot in zip(admitted, slots, strict=True):
            num = each.request.num_prompt_logprobs
            if num is not None and not each.output_token_ids:
                self._prompts[slot] = _Prompt(len(each.request.prompt_token_ids), num)

    def release(self, slot: int) -> None:
        """Forget a request; what was preempted is scored from its start again."""
        self._prompts.pop(slot, None)

    def has_any(self, rows: Sequence[ScheduledRequest]) -> bool:
        """Whether a row is of a prompt that is scored."""
        return bool(self._prompts) and any(self._batch.slots[row.request_id] in self._prompts for row in rows)

    def split(self, rows: Sequence[ScheduledRequest]) -> list[Sequence[ScheduledRequest]]:
        """Return the rows of each pass in which a step is run.

        The last pass has all rows, with what is left of them. Those before have a part of one chunk each, so
        that no pass has too many rows of logits.
        """
        if not self.has_any(rows):
            return [rows]
        rows, passes = list(rows), list[Sequence[ScheduledRequest]]()
        scored = [place for place, row in enumerate(rows) if self.has_any([row])]
        num_left = sum(rows[place].num_new_tokens for place in scored)
        for place in scored:
            while num_left > self._most_rows and rows[place].num_new_tokens > 1:
                row = rows[place]
                num = min(self._most_rows, row.num_new_tokens - 1)
                passes.append([row._replace(num_new_tokens=num, samples=False)])
                rows[place] = row._replace(
                    num_computed_tokens=row.num_computed_tokens + num, num_new_tokens=row.num_new_tokens - num
                )
                num_left -= num
        return [*passes, rows]

    def find(self, rows: Sequence[ScheduledRequest], inputs: StepInputs) -> ScoredTokens | None:
        """Return the tokens of a pass that have a token of their prompt behind them; None without any."""
        if not self.has_any(rows):
            return None
        ends = np.cumsum(inputs.attention.query_lens_R).tolist()
        prompts: list[tuple[_Prompt, int]] = []
        places, slots, positions = [], [], []
        for row, end in zip(rows, ends, strict=True):
            slot = self._batch.slots[row.request_id]
            prompt = self._prompts.get(slot)
            if prompt is None:
                continue
            first = row.num_computed_tokens
            num = min(row.num_new_tokens, prompt.num_tokens - 1 - first)
            start = end - row.num_new_tokens
            places.append(np.arange(start, start + num))
            positions.append(np.arange(first + 1, first + 1 + num))
            slots.append(np.full(num, slot))
            prompts.append((prompt, num))
        if not any(num for _, num in prompts):  # the last token of a prompt has none of it behind
            return None
        return ScoredTokens(
            inputs=replace(inputs, sampling_tokens=np.concatenate([inputs.sampling_tokens, *places])),
            num_sampling=len(inputs.sampling_tokens),
            targets=self._batch.token_ids_SP[np.concatenate(slots), np.concatenate(positions)].tolist(),
            prompts=prompts,
            sampler=self._sampler,
        )

    def errors(self, slots: IntArray) -> dict[int, str]:
        """Return what is wrong with the prompts of the rows that sample, by the row's index."""
        if not self._prompts:
            return {}
        return {
            index: "the model produced invalid logits for a token of the prompt"
            for index, slot in enumerate(slots.tolist())
            if slot in self._prompts and any(math.isnan(each.logprob) for each in self._prompts[slot].reports)
        }

    def take_reports(self, inputs: StepInputs) -> dict[str, list[TokenLogprobs]]:
        """Return the reports of the prompts that have ended with a step, by request, and forget them."""
        if not self._prompts:
            return {}
        slots = zip(inputs.sampling_request_ids, inputs.sampling_slots.tolist(), strict=True)
        return {name: self._prompts.pop(slot).reports for name, slot in slots if slot in self._prompts}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTokens:
    """Tokens of one pass whose logits say how likely the next token of their prompt is."""

    inputs: StepInputs
    """Of the pass, with these tokens behind those that are sampled."""
    num_sampling: int
    targets: list[int]
    """The next token of each."""
    prompts: list[tuple[_Prompt, int]]
    """Whose they are, and how many in a row."""
    sampler: TokenSampler

    def take(self, logits: StepLogits) -> StepLogits:
        """Add what the logits say to the reports; return those of the rows that sample."""
        values_NV, best = logits.values_RV, logits.best
        sampled_RV, scored_NV = None, None
        if values_NV is not None:
            sampled_RV, scored_NV = np.split(values_NV, [len(values_NV) - len(self.targets)])
        nums = [prompt.num_alternatives for prompt, num in self.prompts for _ in range(num)]
        reports = iter(self.sampler.score(scored_NV, self.targets, nums))
        for prompt, num in self.prompts:
            prompt.reports += [next(reports) for _ in range(num)]
        return replace(
            logits, values_RV=sampled_RV, best=None if best is None else best.take(slice(self.num_sampling))
        )
