"""Hidden states to embeddings: the last token's of a prompt, or the mean of all of them, chunk by chunk.

Legend: P tokens whose hidden states are wanted, D model width.
"""

# ruff: noqa: N803 -- tensor names carry shape suffixes

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ModelLoadError, NeedsVllm
from onbeat.core.request import Pooling
from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.files import read

OWN_POOLINGS: tuple[Pooling, ...] = ("last", "mean")
"""What the engines here do."""


def choose_pooling(
    asked: Literal["auto"] | Pooling, model: ModelConfig, known: Sequence[Pooling] = OWN_POOLINGS
) -> Pooling:
    """Return how the embeddings of a model are pooled.

    Parameters
    ----------
    known : what the backend does.

    Raises
    ------
    NeedsVllm : its files ask for what is not supported, and the user for nothing else.
    """
    if asked != "auto":
        return asked
    if model.pooling is None:
        return "last"
    if (found := next((each for each in known if each == model.pooling), None)) is None:
        raise NeedsVllm(
            f"the model's files say that its embeddings are pooled by {model.pooling!r}, which is not "
            "supported; choose --pooling last or --pooling mean to have others"
        )
    return found


class PooledPrompt:
    """A prompt that becomes an embedding, as far as it has been computed.

    Parameters
    ----------
    pooling : of its hidden states.
    num_tokens : of the prompt.
    """

    def __init__(self, pooling: Pooling, num_tokens: int) -> None:
        self._pooling = pooling
        self._num_tokens = num_tokens
        self._num_pooled = 0
        self._sum_D: NDArray[np.float64] = np.zeros(1)

    def tokens(self, num_computed: int, tokens: range) -> range:
        """Return those of a chunk's tokens whose hidden states are wanted.

        Parameters
        ----------
        num_computed : tokens before the chunk.
        tokens : the chunk's, by their place among all of the step.
        """
        if self._pooling == "mean":
            return tokens
        return tokens[-1:] if num_computed + len(tokens) == self._num_tokens else tokens[:0]

    def take(self, hidden_PD: NDArray[Any]) -> bytes | None:
        """Take the hidden states of a chunk; return the embedding once all that it needs are there.

        Returns
        -------
        float32, little-endian, neither cut nor normalised.
        """
        self._num_pooled += len(hidden_PD)
        self._sum_D = self._sum_D + hidden_PD.sum(axis=0, dtype=np.float64)
        if self._num_pooled < (self._num_tokens if self._pooling == "mean" else 1):
            return None
        return (self._sum_D / self._num_pooled).astype("<f4").tobytes()


class PooledTokens(NamedTuple):
    """A row of a step whose hidden states are pooled."""

    request_id: str
    prompt: PooledPrompt
    tokens: range
    """Whose hidden states are wanted, by their place among all tokens of the step."""


class Embeddings(NamedTuple):
    """What a step's hidden states have come to."""

    done: dict[str, bytes]
    """Request id -> embedding."""
    failed: dict[str, str]
    """Request id -> what is wrong with its hidden states."""

    def add(self, request_id: str, embedding: bytes) -> None:
        """Take a prompt's embedding, float32 and little-endian, if it is finite."""
        if np.isfinite(np.frombuffer(embedding, "<f4")).all():
            self.done[request_id] = embedding
        else:
            self.failed[request_id] = "the model produced an embedding that is not finite"


def pool(rows: Sequence[PooledTokens], hidden_PD: NDArray[Any] | None) -> Embeddings:
    """Pool a step's hidden states, row by row, in the order of `StepInputs.pooled_tokens`."""
    found = Embeddings({}, {})
    start = 0
    for row in rows:
        end = start + len(row.tokens)
        if start < end:
            assert hidden_PD is not None, "this forward pass gives hidden states"
            if (embedding := row.prompt.take(hidden_PD[start:end])) is not None:
                found.add(row.request_id, embedding)
        start = end
    return found


_NAMES = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls"}
_HARMLESS = ("Transformer", "Pooling", "Normalize")
"""Modules that change nothing about the direction of a vector, pooling aside."""


class _Module(msgspec.Struct):
    type: str = ""


def hf_pooling(directory: Path) -> str | None:
    """Return how `1_Pooling/config.json` pools: `last`, `mean`, or what is not supported; None without one.

    Raises
    ------
    ModelLoadError : `modules.json` puts more behind the model than pooling and a norm.
    """
    modules = directory / "modules.json"
    for module in read(list[_Module], modules, hint="; fetch the file again") if modules.is_file() else ():
        kind = module.type.rpartition(".")[2]
        if kind not in _HARMLESS:
            raise ModelLoadError(
                f"{modules} puts a module {kind!r} behind the model, which is not supported; supported: "
                f"{', '.join(_HARMLESS)}"
            )
    path = directory / "1_Pooling" / "config.json"
    if not path.is_file():
        return None
    config = read(dict[str, Any], path)
    modes = [config["pooling_mode"]] if "pooling_mode" in config else _modes(config)
    name = "+".join(_NAMES.get(mode, mode) for mode in modes) or "none"
    return name if config.get("include_prompt", True) else f"{name} without prompts"


def _modes(config: dict[str, Any]) -> list[str]:
    prefix = "pooling_mode_"
    return [
        key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value is True
    ]
