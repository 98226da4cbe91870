"""The seam between the model runner and what computes a step's logits.

Legend: R tokens that the host samples, V vocabulary, P tokens whose hidden states are wanted, D model width.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import memmove
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from onbeat.engine.device import Device
from onbeat.engine.draw import Logits
from onbeat.engine.input_batch import IntArray, StepInputs
from onbeat.engine.kv_access import KVRegion
from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.sampled import BestTokens


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What a forward pass gives the sampling rows of a step."""

    values_RV: Logits | None
    """On the host: float32 (float64 in a float64 model), contiguous, may be modified; None where nobody wants
    them. What was chosen already (`BestTokens.is_chosen_R`) has no row."""
    best: BestTokens | None = None
    """Where the forward pass found them on the way, or chose for the rows that are plain (`SamplingRow`)."""
    seconds: float | None = None
    """How long the pass took, where it was measured inside."""
    hidden_PD: NDArray[Any] | None = None
    """Hidden states of `StepInputs.pooled_tokens` behind the final norm, float32 (float64 in a float64
    model); None where none are wanted."""


class Computes(Protocol):
    """A model with its KV cache, apart from how steps run on it.

    Those that inherit from it take no memory ahead and hold no threads, unless they say otherwise.
    """

    config: ModelConfig
    device: Device
    """Where steps are computed."""
    settings: Mapping[str, str]
    """What a reader of measurements wants to know of what computes."""

    def scrub(self, block_ids: IntArray) -> None:
        """Make stored values of KV blocks finite."""

    def state_regions(self) -> list[KVRegion]:
        """Return where the parts of states lie, slot after slot; nothing where the model keeps none."""
        return []

    def copy_state(self, source: int, target: int) -> None:
        """Let a request's slot have the state that is kept in another; of models that keep states."""
        for address, num_bytes in self.state_regions():
            memmove(address + target * num_bytes, address + source * num_bytes, num_bytes)

    def touch_ahead(self) -> bool:
        """Take a little of the memory that later steps will need; return whether there was any to take.

        Called over and over while nothing runs; a call takes some milliseconds at most.
        """
        return False

    def close(self) -> None:
        """Let go of threads; no step may run any more."""
        return


class ForwardPass(Computes, Protocol):
    """Runs the new tokens of a step, one step after the other."""

    def run(self, inputs: StepInputs, *, wants_logits: bool) -> StepLogits:
        """Store the keys and values of all tokens, and compute what is wanted of some.

        That is the logits of the sampling rows, and the hidden states of `StepInputs.pooled_tokens`.

        Parameters
        ----------
        inputs : the step.
        wants_logits : False where each row's most likely token suffices; the logits may be returned all the
            same.
        """


class Mark(Protocol):
    """A point in a device's queue."""

    def is_passed(self) -> bool:
        """Whether all work before it is done."""

    def wait(self) -> None:
        """Return when it is."""

    def seconds_since(self, earlier: Any) -> float:
        """Return the device's time from a mark of the same queue to this one; both are passed."""


class ChosenTokens(Protocol):
    """The tokens of a step that may still run."""

    def wait(self) -> BestTokens:
        """Return once the step is done: each sampling row's token, and its largest logit.

        A row whose largest logit is not finite has no token.

        Raises
        ------
        EngineDead : no step can run any more.
        """


@runtime_checkable
class LaunchesSteps(Protocol):
    """A forward pass that can take the next step while one runs, for it chooses the tokens itself."""

    def launch(self, inputs: StepInputs, settle: Callable[[], None] | None) -> ChosenTokens:
        """Queue a step and return.

        Parameters
        ----------
        inputs : a token id is `UNKNOWN_TOKEN` where it is what the last step chose for the row's slot.
        settle : waits until the tokens are known that decide how those of this step are chosen; called once
            the device has what it needs to compute the step. None where all rows are plain.
        """

    def mark(self) -> Mark:
        """Return the present end of the queue; called by the thread that launches."""
