"""What the sampler keeps of one request from step to step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from onbeat.core.request import SamplingParams
from onbeat.engine.random_stream import stream_start
from onbeat.text.grammar.guide import Guide

TokenIds = npt.NDArray[np.int64]

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: scaled by them, logits leave the range of float32."""

_LIMITS = ("allowed_token_ids", "logit_bias", "bad_words", "min_tokens")
"""Parameters that can leave a row without a token."""


class TokenCounts:
    """The distinct tokens of a request and how often each was generated, kept up to date in O(new tokens).

    Parameters
    ----------
    prompt_token_ids : tokens that count as seen without having been generated.
    """

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        self._slot_of = {token_id: slot for slot, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        capacity = max(64, 2 * len(self._slot_of))
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._ids[: len(self._slot_of)] = list(self._slot_of)
        self._counts = np.zeros(capacity, dtype=np.float64)
        self._num_counted = 0

    def update(self, output_token_ids: Sequence[int]) -> None:
        """Count the tokens that were appended since the last call."""
        for token_id in output_token_ids[self._num_counted :]:
            slot = self._slot_of.setdefault(token_id, len(self._slot_of))
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token_id
            self._counts[slot] += 1
        self._num_counted = len(output_token_ids)

    @property
    def token_ids(self) -> TokenIds:
        """Distinct tokens of prompt and output."""
        return self._ids[: len(self._slot_of)]

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """How often each of `token_ids` was generated; 0 where it is in the prompt only."""
        return self._counts[: len(self._slot_of)]


class SamplingRow:
    """One request as the sampler sees it; made once per request, then handed in at every step.

    Parameters
    ----------
    params : how its tokens are chosen.
    prompt_token_ids : the prompt, which the repetition penalty looks at.
    output_token_ids : tokens generated so far. The caller appends each sampled token to this list and never
        removes one; its length, with `num_pending`, is the position in the random stream.
    """

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: list[int]
    ) -> None:
        self.params = params
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids = output_token_ids
        self.is_greedy = params.temperature < GREEDY_BELOW
        self.is_truncated = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self.asks_logprobs = params.num_logprobs is not None
        self.has_penalties = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self.num_pending = 0
        """Tokens that were chosen, but are not known here yet; they come behind `output_token_ids`."""
        self._always_edits = bool(
            self.has_penalties or params.logit_bias or params.allowed_token_ids or params.bad_words
        )
        self.is_guided = params.grammar is not None
        self.needs_output = bool(
            self.has_penalties
            or self.is_guided
            or params.min_tokens
            or any(len(word) > 1 for word in params.bad_words)
        )
        """Whether its tokens so far, or their number, decide what may come next or how likely that is."""
        self.guide: Guide | None = None
        """Holds it to its grammar; whoever takes the request in sets it."""
        self.problem: Exception | None = None
        """Why a guided row has no guide: `RequestRejected` or `GrammarTooComplex` where the grammar is at
        fault."""
        may_edit = self._always_edits or params.min_tokens > 0
        self.is_always_plain = not (self.asks_logprobs or may_edit or self.is_guided)
        """Whether it never asks for more than a draw; if not, it may do so at some positions only."""

    @property
    def position(self) -> int:
        """Index of the token to sample among the output tokens."""
        return len(self.output_token_ids) + self.num_pending

    @property
    def holds_back_stops(self) -> bool:
        """Whether stop tokens are still banned by `min_tokens`."""
        return self.position < self.params.min_tokens and bool(self.params.stop_token_ids)

    @property
    def edits_logits(self) -> bool:
        """Whether this step's logits must be changed before a token is chosen."""
        return self._always_edits or self.holds_back_stops

    @property
    def is_plain(self) -> bool:
        """Whether this step's token takes no more than a draw."""
        return self.is_always_plain or not (self.asks_logprobs or self.edits_logits or self.is_guided)

    @property
    def dead_end(self) -> str:
        """What is said where no token is left: which of the request's fields leave none."""
        params = self.params
        fields = [] if params.grammar is None else [params.grammar.field or "the grammar"]
        fields += [name for name in _LIMITS if getattr(params, name)]
        return f"no token can be sampled under {' with '.join(fields)}; change {' or '.join(fields)}"

    @property
    def banned_token_ids(self) -> TokenIds:
        """Tokens that would complete one of `bad_words` behind the output so far."""
        output, words = self.output_token_ids, self.params.bad_words
        ends = [word[-1] for word in words if tuple(output[len(output) - len(word) + 1 :]) == word[:-1]]
        return np.array(ends, dtype=np.int64)

    @cached_property
    def stream_start(self) -> int:
        """Where its random stream starts; see `random_stream.uniforms`."""
        return stream_start(self.params.seed)

    @cached_property
    def token_counts(self) -> TokenCounts:
        """Tokens seen so far; call `update` before reading. The prompt is in it only where it matters."""
        return TokenCounts(self.prompt_token_ids if self.params.repetition_penalty != 1.0 else ())

    @cached_property
    def bias(self) -> tuple[TokenIds, npt.NDArray[np.float64]]:
        """Token ids of `logit_bias`, each once, and the sum of the values given for it."""
        total: dict[int, float] = {}
        for token_id, value in self.params.logit_bias:
            total[token_id] = total.get(token_id, 0.0) + value
        return np.array(list(total), dtype=np.int64), np.array(list(total.values()), dtype=np.float64)

    @cached_property
    def allowed_token_ids(self) -> TokenIds:
        return np.unique(np.array(self.params.allowed_token_ids, dtype=np.int64))

    @cached_property
    def stops(self) -> frozenset[int]:
        """The stop tokens, to look one up."""
        return frozenset(self.params.stop_token_ids)

    @cached_property
    def stop_token_ids(self) -> TokenIds:
        return np.unique(np.array(self.params.stop_token_ids, dtype=np.int64))
