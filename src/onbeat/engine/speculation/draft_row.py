"""A request as the sampler sees it when one of its drafts is chosen."""

from __future__ import annotations

from onbeat.core.request import SamplingParams
from onbeat.engine.sampling_row import SamplingRow


class DraftSamplingRow(SamplingRow):
    """Draws with the random number that the request will draw the token at this position with.

    Two distributions that are near one another give the same token for the same number far more often than
    for two independent ones, so a draft is accepted as often as the models agree. Penalties, biases and bans
    are left out: they change few tokens, and drafts need not be exact.

    Parameters
    ----------
    row : the request.
    """

    def __init__(self, row: SamplingRow) -> None:
        params = row.params
        plain = SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed,
        )
        super().__init__(plain, (), [])
        self._num_prompt_tokens = len(row.prompt_token_ids)
        self._position = 0

    @property
    def position(self) -> int:
        """Index of the draft among the request's output tokens."""
        return self._position

    def move_to(self, num_tokens: int) -> None:
        """Stand behind so many tokens, prompt and earlier drafts included."""
        self._position = num_tokens - self._num_prompt_tokens
