"""What a server's speculation did in a run: from what it counts, or from the usage of its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from onbeat.bench.bench_config import TargetConfig
from onbeat.bench.probe import PROBE_TIMEOUT
from onbeat.bench.record import SentRequest
from onbeat.report.result import Fact
from onbeat.report.units import whole_percent

Drafts = Counter[str]
"""What a server has counted since its start: `drafts` (rows of a step that verified some), `draft_tokens`,
`accepted_tokens`, and by the position in a row (`0`, `1`, ...) the drafts accepted there."""

_COUNTERS = ("onbeat_spec_", "vllm:spec_decode_num_")
"""How counters of drafts begin: onbeat's, and vLLM's, which an onbeat server may have beside its own."""
_ACCEPTED = "accepted_tokens"


def drafts_of(metrics: bytes) -> Drafts:
    """Return the counts in a server's `/metrics`, over all its engines; none where it does not speculate."""
    samples = [each for family in text_string_to_metric_families(metrics.decode()) for each in family.samples]
    for start in _COUNTERS:
        found = Drafts()
        for sample in samples:
            name = sample.name.removeprefix(start).removesuffix("_total")
            if sample.name.startswith(start) and name in ("drafts", "draft_tokens", _ACCEPTED):
                found[name] += round(sample.value)
            elif sample.name.startswith(f"{start}{_ACCEPTED}_"):
                found[sample.labels["position"]] += round(sample.value)
        if found:
            return found
    return Drafts()


async def look_at_drafts(session: aiohttp.ClientSession, target: TargetConfig) -> Drafts:
    """Return what a server says of drafts; none where it has none, or says nothing of them."""
    url = f"{target.root}/metrics"
    try:
        async with session.get(url, headers=target.headers, timeout=PROBE_TIMEOUT) as response:
            return drafts_of(await response.read()) if response.status == 200 else Drafts()
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
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
