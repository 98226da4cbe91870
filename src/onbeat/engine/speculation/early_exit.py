"""Drafts by the target's own first layers, with its own final norm and output head.

No second model and no second KV cache: the first layers' KV of a draft is what verification writes there
again. How often such drafts are accepted is the model's matter; models trained for it (LayerSkip) leave early
far better than others.

References
----------
Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", ACL 2024.
"""

from __future__ import annotations

from functools import partial

from onbeat.engine.forward import LayeredForward
from onbeat.engine.input_batch import InputBatch
from onbeat.engine.sampler import Sampler
from onbeat.engine.speculation.guesser import Guesser, GuessRow
from onbeat.engine.speculation.proposer import DraftRow, Proposer


class EarlyExitProposer(Proposer):
    """Guesses with the first layers of the target.

    Parameters
    ----------
    forward : the target; its KV cache holds all tokens of a request but the last.
    num_layers : layers that make the drafts, at least 1.
    """

    def __init__(self, forward: LayeredForward, num_layers: int) -> None:
        vocab_size = forward.config.vocab_size
        run = partial(forward.run, num_layers=num_layers)
        self._guesser = Guesser(run, Sampler(vocab_size, forward.device), vocab_size)
        self._broken: set[int] = set()
        """Requests on which the layers gave no numbers; they get no more drafts."""

    def admit(self, batch: InputBatch, slot: int, num_computed_tokens: int) -> None:
        """Need nothing: the tokens' KV is the target's."""

    def release(self, slot: int) -> None:
        """Forget a request; see `Proposer.release`."""
        self._guesser.release(slot)
        self._broken.discard(slot)

    def propose(self, batch: InputBatch, rows: list[DraftRow]) -> list[list[int]]:
        """Return the drafts of each row."""
        drafts: list[list[int]] = [[] for _ in rows]
        places = [place for place, row in enumerate(rows) if row.slot not in self._broken]
        if not places:
            return drafts
        guess_rows = [
            GuessRow(row.slot, row.num_tokens - 1, row.num_tokens, row.num_drafts)
            for row in (rows[place] for place in places)
        ]
        guesses = self._guesser.guess(batch, guess_rows)
        for place, found in zip(places, guesses.drafts, strict=True):
            drafts[place] = found
        # What their last token left in the KV cache, verification writes anew or reports as failed itself.
        self._broken.update(guess_rows[index].slot for index in guesses.failed)
        return drafts

    def close(self) -> None:
        """Let go of nothing: the model is the target's."""
