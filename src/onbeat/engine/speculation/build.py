"""From a configuration to a proposer: what can be refused is refused before anything large is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from onbeat.core.errors import ConfigError, ModelLoadError
from onbeat.core.protocols import Tokenizer
from onbeat.engine.backend import Backend, choose_backend
from onbeat.engine.device import DeviceConfig
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.forward import ForwardPass
from onbeat.engine.model_config import ModelConfig
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.sampler import Sampler
from onbeat.engine.speculation.draft_model import DraftModelProposer
from onbeat.engine.speculation.ngram import NgramProposer
from onbeat.engine.speculation.no_drafts import NoDrafts
from onbeat.engine.speculation.proposer import Proposer
from onbeat.engine.speculation.speculative_config import SpeculativeConfig
from onbeat.engine.weights import Checkpoint, parameter_shapes
from onbeat.hub.files import ModelFiles
from onbeat.hub.resolve import resolve_model
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.text.tokenizer import load_tokenizer


def check_same_tokenizer(target: ModelFiles, draft: ModelFiles) -> None:
    """Compare two models' vocabularies.

    Raises
    ------
    ConfigError : some token id stands for different bytes.
    ModelLoadError : a tokenizer cannot be read.
    """
    if target.path.resolve() == draft.path.resolve():
        return
    theirs, ours = load_tokenizer(draft.path), load_tokenizer(target.path)
    token_id = first_difference(ours, theirs)
    if token_id is not None:
        raise ConfigError(
            f"the draft model {draft.name} has another tokenizer than {target.name}: token {token_id} is "
            f"{theirs.token_bytes(token_id)!r} there and {ours.token_bytes(token_id)!r} here; take a draft "
            "model of the same family"
        )


def first_difference(one: Tokenizer, other: Tokenizer) -> int | None:
    """Return the first token id that both vocabularies have and that stands for different bytes.

    One may be longer: some files list padding, or special tokens that others leave out. A token that only
    one model knows is never proposed, or read as another one, which costs a wrong guess and no more.
    """
    for token_id in range(min(one.vocab_size, other.vocab_size)):
        if one.token_bytes(token_id) != other.token_bytes(token_id):
            return token_id
    return None


OpenWeights = Callable[[EngineConfig], Checkpoint]


@dataclass(frozen=True, slots=True)
class Target:
    """The model that drafts are for."""

    config: ModelConfig
    device: DeviceConfig


class ProposerBuilder(Protocol):
    """A proposer that may be built."""

    @property
    def description(self) -> str:
        """What proposes, for people."""
        ...

    @property
    def backend(self) -> Backend | None:
        """Of the model that proposes, which has as many KV blocks as the target; None where none does."""
        ...

    def build(self, forward: ForwardPass, limits: SchedulerConfig) -> Proposer:
        """Load what it needs.

        Parameters
        ----------
        forward : the target.

        Raises
        ------
        ConfigError : a weight cannot be read, or memory is short.
        """
        ...


@dataclass(frozen=True, slots=True)
class NgramBuilder:
    """Drafts from the request's own tokens."""

    config: SpeculativeConfig
    backend: None = None

    @property
    def description(self) -> str:
        shortest, longest = self.config.prompt_lookup_min, self.config.prompt_lookup_max
        return f"what followed the same {shortest} to {longest} tokens before"

    def build(self, forward: ForwardPass, limits: SchedulerConfig) -> Proposer:  # noqa: ARG002
        return NgramProposer(self.config)


class GrammarBuilder:
    """Drafts of nothing but what grammars prescribe."""

    description = "what the grammars of answers prescribe"
    backend = None

    def build(self, forward: ForwardPass, limits: SchedulerConfig) -> Proposer:  # noqa: ARG002
        return NoDrafts()


@dataclass(frozen=True, slots=True)
class DraftModelBuilder:
    """Drafts by a second model."""

    name: str
    checkpoint: Checkpoint
    backend: Backend

    @property
    def description(self) -> str:
        millions = num_parameters(self.draft_config) / 1e6
        return f"the draft model {self.name} ({millions:.1f} million parameters, {self.backend.description})"

    @property
    def draft_config(self) -> ModelConfig:
        """The model that makes the drafts."""
        return self.checkpoint.config

    def build(self, forward: ForwardPass, limits: SchedulerConfig) -> Proposer:
        # What it decides is of interest for the model that it drafts for, which was told.
        draft = self.backend.build(limits, on_progress=lambda _: None)
        _warm_up(draft, limits)
        return DraftModelProposer(
            draft,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            vocab_size=forward.config.vocab_size,
        )


def choose_proposer(
    config: EngineConfig, target: Target, open_weights: OpenWeights
) -> ProposerBuilder | None:
    """Look at what is to propose drafts; None where nothing is.

    Parameters
    ----------
    open_weights : opens the model of a configuration.

    Raises
    ------
    ConfigError : it does not go with the model, or with another option.
    ModelLoadError : the draft model cannot be found or read.
    """
    speculative = config.speculative
    if speculative is None:
        return None
    if speculative.method == "ngram":
        return NgramBuilder(speculative)
    if speculative.method == "grammar":
        return GrammarBuilder()
    return _choose_draft_model(speculative, config, target, open_weights)


def _warm_up(forward: ForwardPass, limits: SchedulerConfig) -> None:
    """Run a chunk and a decode of a draft model, whose KV cache is empty before and after."""
    ModelRunner(
        forward=forward,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_num_seqs=1,
        max_model_len=limits.max_model_len,
        sampler=Sampler(forward.config.vocab_size),
    ).warm_up()


def num_parameters(config: ModelConfig) -> int:
    """Return how many numbers a model's weights are."""
    return sum(map(math.prod, parameter_shapes(config).values()))


def _choose_draft_model(
    speculative: SpeculativeConfig, config: EngineConfig, target: Target, open_weights: OpenWeights
) -> DraftModelBuilder:
    assert speculative.model is not None, "the configuration has checked it"
    try:
        files = resolve_model(speculative.model, needs_weights=config.load_format != "dummy")
        draft = replace(config, model=files, speculative=None)
        checkpoint = open_weights(draft)
    except ModelLoadError as error:
        raise ModelLoadError(f"the draft model cannot be loaded: {error}") from error
    size, target_size = num_parameters(checkpoint.config), num_parameters(target.config)
    if size > target_size:
        raise ConfigError(
            f"the draft model {files.name} has {size / 1e6:.1f} million parameters, more than the "
            f"{target_size / 1e6:.1f} million of {config.model.name}; take a smaller one"
        )
    check_same_tokenizer(config.model, files)
    return DraftModelBuilder(files.name, checkpoint, choose_backend(draft, checkpoint, target.device))
