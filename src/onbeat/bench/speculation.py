"""What a server's speculation did in a run: from what it counts, or from the usage of its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from onbeat.bench.bench_config import TargetConfig
from onbeat.bench.probe import PROBE_TIMEOUT
from onbeat.bench.record import SentRequest
from onbeat.report.live_state import Window
from onbeat.report.result import Fact
from onbeat.report.units import whole_percent

Drafts = Counter[str]
"""What a server has counted since its start: `drafts` (rows of a step that verified some), `draft_tokens`,
`accepted_tokens`, and by the position in a row (`0`, `1`, ...) the drafts accepted there."""

_VLLM = "vllm:spec_decode_num_"
"""How vLLM's counters of drafts begin."""


def drafts_of_state(body: bytes) -> Drafts:
    """Return the counts in an answer of onbeat's `GET /state`; none where it does not speculate."""
    state = orjson.loads(body)
    own, found = Window(None, state), Drafts()
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        if (value := own.value(f"spec_{name}_total")) is not None:
            found[name] = round(value)
    for accepted in state.get("spec_accepted_tokens_at_position_total", {}).values():
        found.update(accepted)
    return found


def drafts_of_vllm(body: bytes) -> Drafts:
    """Return the counts in vLLM's `/metrics`, over all its engines; none where it does not speculate."""
    found = Drafts()
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            if sample.name.startswith(_VLLM) and sample.name.endswith("_total"):
                own = sample.name.removeprefix(_VLLM).removesuffix("_total")
                found[sample.labels.get("position", own)] += round(sample.value)
    return found


async def look_at_drafts(session: aiohttp.ClientSession, target: TargetConfig) -> Drafts:
    """Return what a server says of drafts; none where it has none, or says nothing of them."""
    for path, read in (("state", drafts_of_state), ("metrics", drafts_of_vllm)):
        try:
            async with session.get(
                f"{target.root}/{path}", headers=target.headers, timeout=PROBE_TIMEOUT
            ) as response:
                if response.status == 200:
                    return read(await response.read())
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            break
    return Drafts()


def measured_drafts(counts: Drafts, records: Sequence[SentRequest]) -> list[Fact]:
    """Return what is known of the drafts of a run, under the keys of `vllm bench serve`.

    Nothing without drafts, or where the server was started anew.

    Parameters
    ----------
    counts : the server's, of the time of the run; empty where it said nothing. Other clients' requests are in
        them too. Without them the usage of the run's own answers tells less: not how often drafts were
        verified, nor at which position they were accepted.
    """
    num_drafted, num_accepted = counts["draft_tokens"], counts["accepted_tokens"]
    if not counts:
        num_drafted = sum(record.num_drafted_tokens for record in records)
        num_accepted = sum(record.num_accepted_tokens for record in records)
    if num_drafted <= 0:
        return []
    facts = [
        Fact("spec_decode_draft_tokens", num_drafted, "draft tokens verified"),
        Fact("spec_decode_accepted_tokens", num_accepted),
        Fact("spec_decode_acceptance_rate", 100 * num_accepted / num_drafted, "accepted", "{:.1f}%".format),
        Fact("spec_decode_source", "metrics" if counts else "usage"),
    ]
    if (num_drafts := counts["drafts"]) <= 0:
        return facts
    rates = [counts[place] / num_drafts for place in sorted(filter(str.isdigit, counts), key=int)]
    return [
        *facts,
        Fact("spec_decode_num_drafts", num_drafts, "verifications"),
        Fact("spec_decode_acceptance_length", 1 + num_accepted / num_drafts, "tokens each"),
        Fact(
            "spec_decode_per_position_acceptance_rates",
            rates,
            "accepted by position" if rates else "",
            lambda own: " / ".join(map(whole_percent, own)),
        ),
    ]
