"""Conversations in the ShareGPT format: the first question and the length of the first answer.

The file is a JSON list of ``{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from onbeat.core.errors import ConfigError
from onbeat.files import read_text
from onbeat.typed import decode
from onbeat.workload.offered import OfferedLoad

MIN_TOKENS = 4
MAX_PROMPT_TOKENS = 1024
MAX_TOTAL_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and its answer."""

    question: str
    answer: str


def read_sharegpt(path: Path) -> list[Exchange]:
    """Return the first exchange of each conversation that has at least two turns.

    Raises
    ------
    ConfigError : the file cannot be read or is not in the ShareGPT format.
    """
    hint = "; give a file in the ShareGPT format"
    conversations = decode(list[_Conversation], read_text(path), str(path), hint=hint)
    found = (each.conversations or each.conversation or () for each in conversations)
    return [Exchange(turns[0].value, turns[1].value) for turns in found if len(turns) > 1]


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: tuple[_Turn, ...] | None = None
    conversation: tuple[_Turn, ...] | None = None

    def __post_init__(self) -> None:
        if self.conversations is None and self.conversation is None:
            raise ValueError("it has no conversations, a list of turns that have a value")


def sharegpt_load(
    exchanges: Sequence[Exchange],
    *,
    num_requests: int,
    output_len: int | None,
    count_tokens: Callable[[str], int],
    order: np.random.Generator | None,
) -> OfferedLoad:
    """Return requests that ask the recorded questions for answers as long as the recorded ones.

    Very short exchanges (below 4 tokens) and long ones (a prompt above 1,024 or a sum above 2,048 tokens)
    are passed over, as is usual with this data set.

    Parameters
    ----------
    output_len : length of all answers; None takes the recorded ones.
    order : draws the order of the conversations; None keeps the file's.

    Raises
    ------
    ConfigError : fewer usable conversations than requests.
    """
    positions = np.arange(len(exchanges)) if order is None else order.permutation(len(exchanges))
    prompts: list[str] = []
    lengths: list[tuple[int, int]] = []
    for position in positions.tolist():
        exchange = exchanges[position]
        num_prompt, num_answer = count_tokens(exchange.question), count_tokens(exchange.answer)
        if _is_usable(num_prompt, output_len or num_answer, has_fixed_output=output_len is not None):
            prompts.append(exchange.question)
            lengths.append((num_prompt, output_len or num_answer))
        if len(prompts) == num_requests:
            break
    if len(prompts) < num_requests:
        raise ConfigError(
            f"the ShareGPT file has {len(prompts)} usable conversations (of {len(exchanges)}), "
            f"{num_requests} were asked for with --num-prompts"
        )
    return OfferedLoad(
        name="sharegpt",
        num_prompt_tokens=np.array([prompt for prompt, _ in lengths], dtype=np.int64),
        num_output_tokens=np.array([output for _, output in lengths], dtype=np.int64),
        texts=tuple(prompts),
    )


def _is_usable(num_prompt: int, num_output: int, *, has_fixed_output: bool) -> bool:
    if num_prompt < MIN_TOKENS or (num_output < MIN_TOKENS and not has_fixed_output):
        return False
    return num_prompt <= MAX_PROMPT_TOKENS and num_prompt + num_output <= MAX_TOTAL_TOKENS
