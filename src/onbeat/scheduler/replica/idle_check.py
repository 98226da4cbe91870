"""Which objectives a machine cannot meet even when it has nothing else to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from onbeat.core.slo import SLO
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel


def idle_misses(
    model: StepTimeModel,
    classes: Mapping[str, SLO],
    *,
    prompt_tokens: Sequence[int] = (128, 1024),
    context: int = 1024,
) -> list[str]:
    """Return a sentence for each objective that is missed although a request has the machine to itself.

    Parameters
    ----------
    model : asked for mean step times: what the mean misses, planning cannot save.
    classes : objectives by name.
    prompt_tokens : lengths of prompts that ought to keep the TTFT objective, each run as one chunk.
    context : tokens that the one decode attends to.

    Returns
    -------
    Sentences such as `class chat: TBT 50 ms, but one decode alone takes 63 ms here`; none where all is well.
    """
    lengths = sorted(prompt_tokens)
    return [
        f"class {name}: {miss}"
        for name, slo in classes.items()
        for miss in _misses(model, slo, lengths, context)
    ]


def _misses(model: StepTimeModel, slo: SLO, lengths: Sequence[int], context: int) -> Iterator[str]:
    decode = _step_seconds(model, num_computed_tokens=context - 1, num_new_tokens=1)
    if slo.ttft is not None and _prefill_seconds(model, lengths[-1]) > slo.ttft:
        yield _ttft_miss(model, slo.ttft, lengths)
    if slo.tbt is not None and decode > slo.tbt:
        yield f"TBT {_ms(slo.tbt)}, but one decode alone takes {_ms(decode)} here"
    shortest = _prefill_seconds(model, lengths[0])
    if slo.e2e is not None and shortest > slo.e2e:
        yield f"E2E {_ms(slo.e2e)}, but a prompt of {lengths[0]} tokens alone takes {_ms(shortest)} here"


def _ttft_miss(model: StepTimeModel, ttft: float, lengths: Sequence[int]) -> str:
    longest = model.max_chunk_tokens(BatchShape(), 0, ttft)
    if not longest:
        return f"TTFT {_ms(ttft)}: every prompt misses it even when idle"
    taken = _prefill_seconds(model, lengths[0])
    if taken > ttft:
        return (
            f"TTFT {_ms(ttft)}: prompts above {longest} tokens miss it even when idle "
            f"({lengths[0]} tokens take {_ms(taken)})"
        )
    return f"TTFT {_ms(ttft)}: prompts above {longest} tokens miss it even when idle"


def _prefill_seconds(model: StepTimeModel, num_tokens: int) -> float:
    return _step_seconds(model, num_computed_tokens=0, num_new_tokens=num_tokens)


def _step_seconds(model: StepTimeModel, *, num_computed_tokens: int, num_new_tokens: int) -> float:
    shape = BatchShape()
    shape.add(num_computed_tokens, num_new_tokens, samples=True)
    return model.step_time(shape)


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.2g} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"
