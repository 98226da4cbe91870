"""Text to token ids and back, for whatever reads or writes text; planning and running see ids alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back.

    Decoding joins `token_bytes` and reads them as UTF-8, so it can go on token by token.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens after which the model has said all it wants to say."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that decoding leaves out with `skip_special_tokens`."""

    @property
    def strips_leading_space(self) -> bool:
        """Whether one space at the very start of a decoded text is not part of it."""

    @property
    def chat_template(self) -> str | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for (special tokens: their name in UTF-8)."""

    def token_entry(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it, such as `Ġis`; empty where it has no such token."""

    def token_text(self, token_id: int) -> str:
        """Return a token as shown in logprobs: its bytes as UTF-8, undecodable bytes replaced."""
