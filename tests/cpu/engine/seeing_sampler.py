"""What test samplers share that want to see all logits on the host."""

from __future__ import annotations

from collections.abc import Sequence

from onbeat.core.request import TokenLogprobs
from onbeat.engine.sampling_row import SamplingRow


class SeesLogits:
    """Wants them even where a device could choose, and scores no prompts."""

    trusts_device = False

    def needs_logits(self, rows: Sequence[SamplingRow]) -> bool:
        return True

    def score(self, *_: object) -> list[TokenLogprobs]:
        raise NotImplementedError
