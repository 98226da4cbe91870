"""From a configuration to a proposer: what can be refused is refused before anything large is loaded.

Prompt lookup: what followed the same tokens earlier in the request is likely to follow again.

References
----------
Saxena, "Prompt Lookup Decoding", 2023; Yang et al., "Inference with Reference: Lossless Acceleration of
Large Language Models", 2023; Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI
Applications", 2024 (drafts in proportion to the match).

No drafts of its own: what is left is text that grammars prescribe, which any proposer has besides.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError, ModelLoadError
from onbeat.engine.backends.base import Backend, CheckpointBackend, warm_up
from onbeat.engine.backends.table import choose_backend, open_weights
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.forward import ForwardPass
from onbeat.engine.input_batch import InputBatch
from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.sampler import Sampler
from onbeat.engine.speculation.draft_model import DraftModelProposer
from onbeat.engine.speculation.proposer import DraftRow, Proposer
from onbeat.engine.speculation.same_tokenizer import check_same_tokenizer
from onbeat.engine.weights.parameters import parameter_shapes
from onbeat.hub.resolve import resolve_model
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.speculative_config import TRAINED, SpeculativeConfig


class NoDrafts(Proposer):
    """Proposes nothing; see `engine.speculation.proposer.propose` for what comes in its place."""

    def propose(self, batch: InputBatch, rows: list[DraftRow]) -> list[list[int]]:  # noqa: ARG002
        """Return no draft for any row."""
        return [[] for _ in rows]

    def num_available(
        self,
        batch: InputBatch,  # noqa: ARG002
        slots: Sequence[int],
        num_tokens: Sequence[int],  # noqa: ARG002
    ) -> list[int]:
        """Return that there is none."""
        return [0] * len(slots)


_TOKEN_BITS = 32
_DRAFTS_PER_MATCHED_TOKEN = 1.5
"""A longer match comes true for longer: after two tokens half of the first drafts are right, after ten nearly
all. Drafts in this proportion waste little on chance matches and cost long ones nothing."""


class NgramProposer(Proposer):
    """Copies from earlier in the same request: the longest match first, of equals the most recent.

    Parameters
    ----------
    config : lengths of what must have occurred before, and the most drafts.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        lengths = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        self._most = config.num_speculative_tokens
        self._histories: defaultdict[int, _History] = defaultdict(lambda: _History(lengths))
        """By slot; a request is read once it samples."""

    def release(self, slot: int) -> None:
        """Forget a request."""
        self._histories.pop(slot, None)

    def propose(self, batch: InputBatch, rows: list[DraftRow]) -> list[list[int]]:
        """Return what followed the last match of each row; nothing where there is none."""
        drafts = []
        for row in rows:
            history = self._histories[row.slot]
            if row.num_tokens > len(history.token_ids):
                history.read(batch.token_ids_SP[row.slot], row.num_tokens)
            drafts.append(history.continuation(min(row.num_drafts, history.num_likely)))
        return drafts

    def num_available(self, batch: InputBatch, slots: Sequence[int], num_tokens: Sequence[int]) -> list[int]:
        """Return how many drafts each match is good for."""
        most, histories, found = self._most, self._histories, []
        newest = batch.token_ids_SP[slots, np.subtract(num_tokens, 1)].tolist()
        for slot, num, token_id in zip(slots, num_tokens, newest, strict=True):
            history = histories[slot]
            num_unread = num - len(history.token_ids)
            if num_unread == 1:
                history.add(token_id)
            elif num_unread:
                history.read(batch.token_ids_SP[slot], num)
            num_likely = history.num_likely
            found.append(num_likely if num_likely < most else most)
        return found


class _History:
    """A request's tokens, where each n-gram of them last occurred, and where to copy from.

    A new token takes one entry for each length of n-grams, whatever the context. Tokens are read when drafts
    are asked for, which may be long after they came.

    Parameters
    ----------
    lengths : of the n-grams, longest first.
    """

    __slots__ = ("_indices", "_match_length", "_source", "_suffix", "_suffix_mask", "num_likely", "token_ids")

    def __init__(self, lengths: range) -> None:
        self.token_ids: list[int] = []
        self.num_likely = 0
        """Drafts that are worth proposing."""
        self._source: int | None = None
        """Position that is to be copied next; None where the last tokens are new."""
        self._match_length = 0
        """How many tokens before the source are known to equal the last ones; 0 where there is none."""
        self._indices: list[tuple[int, int, dict[int, int]]] = [
            (length, (1 << length * _TOKEN_BITS) - 1, {}) for length in lengths
        ]
        """By length: what cuts an n-gram from `_suffix`, and n-grams to the positions after them."""
        self._suffix = 0
        """The last tokens, each one more than its id, in one number; 0 stands before the first."""
        self._suffix_mask = self._indices[0][1]

    def read(self, token_ids_P: NDArray[np.int32], num_tokens: int) -> None:  # noqa: N803
        """Add the tokens up to `num_tokens` that are not known yet, and find where to copy from."""
        *others, last = token_ids_P[len(self.token_ids) : num_tokens].tolist()
        if others and self.continuation(len(others)) == others:
            assert self._source is not None
            self._source += len(others)
            self._match_length += len(others)
        elif others:
            self._source, self._match_length = None, 0
        suffix, suffix_mask, indices = self._suffix, self._suffix_mask, self._indices
        for position, token_id in enumerate(others, len(self.token_ids) + 1):
            suffix = (suffix << _TOKEN_BITS | token_id + 1) & suffix_mask
            for _, mask, position_after in indices:
                position_after[suffix & mask] = position
        self._suffix = suffix
        self.token_ids += others
        self.add(last)

    def add(self, token_id: int) -> None:
        """Add a token and find where to copy from."""
        token_ids, source = self.token_ids, self._source
        match_length = 0
        if source is not None and token_ids[source] == token_id:
            # What was before tells this place from others with the same n-gram.
            source += 1
            match_length = self._match_length + 1
        token_ids.append(token_id)
        position = len(token_ids)
        suffix = self._suffix = (self._suffix << _TOKEN_BITS | token_id + 1) & self._suffix_mask
        for length, mask, position_after in self._indices:
            key = suffix & mask
            if length > match_length and (before := position_after.get(key)) is not None:
                source, match_length = before, length
            position_after[key] = position
        self._source = source if match_length else None
        self._match_length = match_length
        self.num_likely = int(match_length * _DRAFTS_PER_MATCHED_TOKEN)

    def continuation(self, num: int) -> list[int]:
        """Return what follows the match, as if the tokens since then came again and again."""
        if self._source is None:
            return []
        copied = self.token_ids[self._source : self._source + num]
        period = len(copied)
        while len(copied) < num:
            copied += copied[: min(period, num - len(copied))]
        return copied


@dataclass(frozen=True, slots=True)
class ProposerBuilder:
    """A proposer that may be built."""

    description: str
    """What proposes, for people."""
    build: Callable[[ForwardPass, SchedulerConfig], Proposer]
    """Loads what it needs, given the target; raises `ConfigError` if a weight cannot be read, or memory is
    short."""
    backend: CheckpointBackend | None = None
    """Of the model that proposes, which has as many KV blocks as the target; None where none does."""


def choose_proposer(config: EngineConfig, target: Backend) -> ProposerBuilder | None:
    """Look at what is to propose drafts; None where nothing is.

    Raises
    ------
    ConfigError : it does not go with the model, or with another option.
    ModelLoadError : the draft model cannot be found or read.
    """
    speculative = config.speculative
    if speculative is None or target.drafts_ahead:
        return None
    if speculative.method in TRAINED:
        raise ConfigError(
            f"drafts by method {speculative.method!r} are made by vLLM's workers alone, but the model would "
            f"run {target.description}; give --backend vllm, or another method"
        )
    if speculative.method == "ngram":
        shortest, longest = speculative.prompt_lookup_min, speculative.prompt_lookup_max
        description = f"what followed the same {shortest} to {longest} tokens before"
        return ProposerBuilder(description, lambda *_: NgramProposer(speculative))
    if speculative.method == "grammar":
        return ProposerBuilder("what the grammars of answers prescribe", lambda *_: NoDrafts())
    return _choose_draft_model(speculative, config, target)


def _build_draft_model(
    backend: CheckpointBackend, target: ForwardPass, limits: SchedulerConfig
) -> DraftModelProposer:
    # What it decides is of interest for the model that it drafts for, which was told.
    draft, _ = backend.build(limits, lambda _: None)
    _warm_up(draft, limits)
    return DraftModelProposer(
        draft,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        vocab_size=target.config.vocab_size,
    )


def _warm_up(forward: ForwardPass, limits: SchedulerConfig) -> None:
    """Run a chunk and a decode of a draft model, whose KV cache is empty before and after."""
    warm_up(ModelRunner(replace(limits, max_num_seqs=1), forward, Sampler(forward.config.vocab_size)))


def num_parameters(config: ModelConfig) -> int:
    """Return how many numbers a model's weights are."""
    return sum(map(math.prod, parameter_shapes(config).values()))


def _choose_draft_model(
    speculative: SpeculativeConfig, config: EngineConfig, target: Backend
) -> ProposerBuilder:
    assert speculative.model is not None, "the configuration has checked it"
    try:
        files = resolve_model(speculative.model, needs_weights=config.load_format != "dummy")
        draft = replace(config, model=files, speculative=None)
        checkpoint = open_weights(draft)
    except ConfigError as error:
        raise ModelLoadError(f"the draft model cannot be loaded: {error}") from error
    size, target_size = num_parameters(checkpoint.config), num_parameters(target.model)
    if size > target_size:
        raise ConfigError(
            f"the draft model {files.name} has {size / 1e6:.1f} million parameters, more than the "
            f"{target_size / 1e6:.1f} million of {config.model.name}; take a smaller one"
        )
    if checkpoint.config.state_numbers and not target.model.state_numbers:
        raise ConfigError(
            f"the draft model {files.name} keeps a state of each request, for which {config.model.name} has "
            "no room beside its KV cache; take one without linear attention"
        )
    check_same_tokenizer(config.model, files)
    backend = choose_backend(draft, checkpoint, target.device)
    description = f"the draft model {files.name} ({size / 1e6:.1f} million parameters, {backend.description})"
    return ProposerBuilder(description, partial(_build_draft_model, backend), backend)
