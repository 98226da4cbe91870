"""What a person says of speculative decoding, and what it costs a simulated replica."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from onbeat.core.errors import ConfigError, DoesNotFit
from onbeat.perfmodel.memory import KVCapacity
from onbeat.perfmodel.model_sizes import ModelSpec
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.scheduler.scheduler_config import SpeculationConfig
from onbeat.simulator.draft_acceptance import Acceptance

MAX_CATCH_UP_TOKENS = 256
"""Tokens of prompts that a draft model reads in a step: what the engine allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    """Drafts of one replica. Without a draft model they are looked up, which takes no time."""

    num_speculative_tokens: int
    """Most drafts of a request in one step."""
    is_adaptive: bool = True
    """Whether the scheduler weighs how many are worth their time; else it always plans the most."""
    draft_model: str | None = None
    """A packaged name, a config.json or its directory; on the target's devices, cut and stored alike."""
    acceptance: Acceptance = field(default_factory=Acceptance)

    def for_scheduler(self) -> SpeculationConfig:
        """Return what the scheduler must know of this."""
        return SpeculationConfig(
            num_speculative_tokens=self.num_speculative_tokens,
            draft_length="adaptive" if self.is_adaptive else "fixed",
            runs_model=self.draft_model is not None,
            max_catch_up_tokens=0 if self.draft_model is None else MAX_CATCH_UP_TOKENS,
        )

    def draft_spec(self, target: ModelSpec) -> ModelSpec | None:
        """Return the model that makes the drafts; None where they are looked up.

        Raises
        ------
        ConfigError : an unknown model, or one that is not smaller than the target.
        """
        if self.draft_model is None:
            return None
        draft = find_model_spec(self.draft_model)
        if draft.layer_parameters >= target.layer_parameters:
            raise ConfigError(
                f"the draft model {draft.name} has {draft.layer_parameters / 1e9:.2f} billion parameters in "
                f"its layers, and {target.name} has {target.layer_parameters / 1e9:.2f}; choose a smaller one"
            )
        return draft


def beside_draft_model(target: KVCapacity, draft: KVCapacity, least_tokens: int) -> KVCapacity:
    """Return the target's KV capacity where a draft model and its KV share the devices with it.

    Every block of the target has one of the draft model beside it, for the same tokens.

    Parameters
    ----------
    least_tokens : that the KV caches must hold.

    Raises
    ------
    DoesNotFit : they hold fewer.
    """
    left = target.kv_bytes - draft.weight_bytes
    block_bytes = target.block_bytes + draft.block_bytes
    kv_needed = -(-least_tokens // target.block_size) * block_bytes
    if left < kv_needed:
        raise DoesNotFit(
            "the draft model does not fit beside the model: a device has "
            f"{target.kv_bytes / 2**30:.1f} GiB left, but its weights take {draft.weight_bytes / 2**30:.1f} "
            f"and both KV caches {kv_needed / 2**30:.2g} for {least_tokens} tokens"
        )
    return replace(
        target,
        num_blocks=int(left // block_bytes),
        weight_bytes=target.weight_bytes + draft.weight_bytes,
        kv_bytes=left,
        block_bytes=block_bytes,
    )
