"""What a step gives to requests: made when somebody reads it, as an output or as a message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onbeat.core.request import RequestOutput
from onbeat.core.slo import Fate
from onbeat.scheduler.replica.request_state import RequestState


class Outputs(Sequence[RequestOutput]):
    """What a step gave to requests, by its rows; made for plain tokens when somebody reads it.

    What becomes of these meanwhile is told as it stands then, but no later token.

    Parameters
    ----------
    streams : requests with a plain token.
    others : outputs of all others.
    places : how many streams are before each of these.
    """

    def __init__(self, streams: list[RequestState], others: list[RequestOutput], places: list[int]) -> None:
        self.others, self._streams, self._places = others, streams, places
        self._num_tokens = [state.num_tokens for state in streams]
        self._made: list[RequestOutput] | None = None

    def __len__(self) -> int:
        return len(self._streams) + len(self.others)

    def __getitem__(self, index: Any) -> Any:
        if self._made is None:
            self._made = self.each(RequestOutput)
        return self._made[index]

    def each(self, make: Callable[..., Any]) -> list[Any]:
        """Return the outputs of others, and what something makes of the fields of the remaining ones."""
        if self._made is not None:
            return self._made
        made: list[Any] = []
        for state, num_tokens in zip(self._streams, self._num_tokens, strict=True):
            end, slo = num_tokens - state.num_prompt_tokens, state.slo
            fields = (state.request_id, state.output_token_ids[end - 1 : end], None, None)
            counts = (state.num_cached_tokens, state.num_preemptions, state.scheduled_time, end - 1)
            output = make(*fields, *counts)
            output.fate = Fate.RELEGATED if slo.is_best_effort else None
            output.predicted_ttft, slo.predicted_ttft = slo.predicted_ttft, None  # told once
            made.append(output)
        for index, (place, other) in enumerate(zip(self._places, self.others, strict=True)):
            made.insert(index + place, other)
        return made
