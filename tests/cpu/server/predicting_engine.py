"""A fake engine that predicts, relegates, and refuses single choices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from onbeat.core.errors import OnbeatError
from onbeat.core.protocols import Delivery, StepOutputs
from onbeat.core.request import FinishReason, Request, RequestOutput
from onbeat.core.slo import Fate
from tests.fakes_engine import FakeEngine


@dataclass
class PredictingEngine(FakeEngine):
    predicted_ttft: float | None = None
    """On the first output of each request, as the engine has it."""
    relegates: bool = False
    refusals: dict[str, OnbeatError] = field(default_factory=dict)
    """End of a request id -> what `generate` raises for it."""
    expires: tuple[str, ...] = ()
    """Ends of the ids of requests whose deadline passes in the queue."""
    wait: float = 0.0
    """Seconds until a refusal."""
    room_in: float | None = None
    """Seconds until those that `expires` may come again; None where it was their own deadline."""

    asked: list[str] = field(default_factory=list)
    """Ids of the requests, in their order."""

    async def generate(self, request: Request) -> AsyncGenerator[Delivery, None]:
        request_id = request.request_id
        self.asked.append(request_id)
        for ending, error in self.refusals.items():
            if request_id.endswith(ending):
                await asyncio.sleep(self.wait)
                raise error
        if any(request_id.endswith(ending) for ending in self.expires):
            await asyncio.sleep(self.wait)
            yield self._expire(request_id)
            return
        is_first = True
        async with aclosing(super().generate(request)) as deliveries:
            async for delivery in deliveries:
                if is_first:
                    delivery.output.predicted_ttft = self.predicted_ttft
                    is_first = False
                delivery.output.fate = Fate.RELEGATED if self.relegates else None
                yield delivery

    def _expire(self, request_id: str) -> Delivery:
        output = RequestOutput(
            request_id=request_id,
            new_token_ids=[],
            finish_reason=FinishReason.EXPIRED,
            fate=Fate.EXPIRED if self.room_in is None else Fate.OVERDUE,
            error="waited 600 ms, the TTFT objective is 500 ms",
            predicted_ttft=self.predicted_ttft,
            retry_after=self.room_in,
        )
        now = time.monotonic()
        for observer in self.observers:
            observer.on_step(StepOutputs(now, [output]))
        return Delivery(now, output)
