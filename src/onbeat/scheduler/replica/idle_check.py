"""Which objectives a machine cannot meet even when it has nothing else to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from onbeat.core.slo import SLO
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleCheck:
    """What a request does that has the machine to itself, and ought to keep its objectives.

    Models are asked for mean step times: what the mean misses, planning cannot save.
    """

    short: int = 128
    """Tokens of a prompt that ought to keep the E2E objective, in one chunk."""
    long: int = 1024
    """Tokens of a prompt that ought to keep the TTFT objective, likewise."""
    context: int = 1024
    """Tokens that a decode attends to, which ought to keep the TBT objective."""

    def misses(self, model: StepTimeModel, classes: Mapping[str, SLO]) -> list[str]:
        """Return a sentence for each objective of a class that is missed.

        Such as `class chat: TBT 50 ms, but one decode alone takes 63 ms here`; none where all is well.
        """
        return [f"class {name}: {miss}" for name, slo in classes.items() for miss in self._misses(model, slo)]

    def speeds(self, model: StepTimeModel) -> str:
        """Return how soon tokens come if nothing else runs."""
        first, further = _prefill_seconds(model, self.short), self._decode_seconds(model)
        return (
            f"the first token of a prompt of {self.short} tokens takes {ms_text(first)}, each further one "
            f"{ms_text(further)}"
        )

    def _misses(self, model: StepTimeModel, slo: SLO) -> Iterator[str]:
        for name, objective, seconds, what in self._steps(model, slo):
            if seconds > objective:
                stated, taken = f"{name} {ms_text(objective)}", f"{what} alone takes {ms_text(seconds)} here"
                yield self._ttft_miss(model, objective) if name == "TTFT" else f"{stated}, but {taken}"

    def _ttft_miss(self, model: StepTimeModel, ttft: float) -> str:
        longest = model.max_chunk_tokens(BatchShape(), 0, ttft)
        which = f"prompts above {longest} tokens miss" if longest else "every prompt misses"
        taken = _prefill_seconds(model, self.short)
        short = f" ({self.short} tokens take {ms_text(taken)})" if longest and taken > ttft else ""
        return f"TTFT {ms_text(ttft)}: {which} it even when idle{short}"

    def _steps(self, model: StepTimeModel, slo: SLO) -> Iterator[tuple[str, float, float, str]]:
        """Yield each objective with its name, the seconds of the step that has to keep it, and what it is."""
        if slo.tbt is not None:
            yield "TBT", slo.tbt, self._decode_seconds(model), "one decode"
        if slo.ttft is not None:
            yield "TTFT", slo.ttft, _prefill_seconds(model, self.long), f"a prompt of {self.long} tokens"
        if slo.e2e is not None:
            yield "E2E", slo.e2e, _prefill_seconds(model, self.short), f"a prompt of {self.short} tokens"

    def _decode_seconds(self, model: StepTimeModel) -> float:
        return _step_seconds(model, num_computed_tokens=self.context - 1, num_new_tokens=1)


def _prefill_seconds(model: StepTimeModel, num_tokens: int) -> float:
    return _step_seconds(model, num_computed_tokens=0, num_new_tokens=num_tokens)


def _step_seconds(model: StepTimeModel, *, num_computed_tokens: int, num_new_tokens: int) -> float:
    shape = BatchShape()
    shape.add(num_computed_tokens, num_new_tokens, samples=True)
    return model.step_time(shape)


def ms_text(seconds: float) -> str:
    """Return a time for people, in milliseconds of two digits or more."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:.2g} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"
