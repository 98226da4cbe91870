"""What a server's speculation did in a run: from what it counts, or from the usage of its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from onbeat.bench.bench_config import TargetConfig
from onbeat.bench.probe import PROBE_TIMEOUT
from onbeat.bench.record import SentRequest
from onbeat.report.live_state import Window
from onbeat.report.result import Fact
from onbeat.report.units import whole_percent

_VLLM = "vllm:spec_decode_num_"
"""How vLLM's counters of drafts begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """What a server has counted since its start, or since another look at it."""

    num_drafts: int
    """Rows of a step that verified drafts."""
    num_drafted_tokens: int
    num_accepted_tokens: int
    accepted_at: tuple[int, ...]
    """Index j counts the drafts accepted at position j of their row."""

    def since(self, before: DraftCounts) -> DraftCounts:
        """Return what has been counted since an earlier look."""
        return DraftCounts(
            num_drafts=self.num_drafts - before.num_drafts,
            num_drafted_tokens=self.num_drafted_tokens - before.num_drafted_tokens,
            num_accepted_tokens=self.num_accepted_tokens - before.num_accepted_tokens,
            accepted_at=tuple(
                new - (before.accepted_at[position] if position < len(before.accepted_at) else 0)
                for position, new in enumerate(self.accepted_at)
            ),
        )


def drafts_of_state(state: Mapping[str, Any]) -> DraftCounts | None:
    """Return the counts in an answer of onbeat's `GET /state`; None where it does not speculate."""
    own = Window(None, state)
    num_drafted = own.value("spec_draft_tokens_total")
    if num_drafted is None:
        return None
    by_proposer = state.get("spec_accepted_tokens_at_position_total", {}).values()
    accepted = Counter({int(place): count for counts in by_proposer for place, count in counts.items()})
    return DraftCounts(
        num_drafts=round(own.value("spec_drafts_total") or 0),
        num_drafted_tokens=round(num_drafted),
        num_accepted_tokens=round(own.value("spec_accepted_tokens_total") or 0),
        accepted_at=tuple(accepted[place] for place in sorted(accepted)),
    )


def drafts_of_vllm(metrics: str) -> DraftCounts | None:
    """Return the counts in vLLM's `/metrics`, over all its engines; None where it does not speculate."""
    totals, accepted = Counter[str](), Counter[int]()
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            totals[sample.name.removeprefix(_VLLM)] += round(sample.value)
            if sample.name == f"{_VLLM}accepted_tokens_per_pos_total":
                accepted[int(sample.labels["position"])] += round(sample.value)
    if "draft_tokens_total" not in totals:
        return None
    return DraftCounts(
        num_drafts=totals["drafts_total"],
        num_drafted_tokens=totals["draft_tokens_total"],
        num_accepted_tokens=totals["accepted_tokens_total"],
        accepted_at=tuple(accepted[place] for place in sorted(accepted)),
    )


async def look_at_drafts(session: aiohttp.ClientSession, target: TargetConfig) -> DraftCounts | None:
    """Return what a server says of drafts; None where it has none, or says nothing of them."""
    for path, read in (
        ("state", lambda body: drafts_of_state(orjson.loads(body))),
        ("metrics", drafts_of_vllm),
    ):
        try:
            async with session.get(
                f"{target.root}/{path}", headers=dict(target.headers), timeout=PROBE_TIMEOUT
            ) as response:
                if response.status == 200:
                    return read(await response.text())
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None
    return None


async def drafts_since(
    before: DraftCounts | None, session: aiohttp.ClientSession, target: TargetConfig
) -> DraftCounts | None:
    """Return what a server has counted since an earlier look; None where either look says nothing."""
    after = None if before is None else await look_at_drafts(session, target)
    return None if before is None or after is None else after.since(before)


def measured_drafts(counts: DraftCounts | None, records: Sequence[SentRequest]) -> list[Fact]:
    """Return what is known of the drafts of a run, under the keys of `vllm bench serve`.

    Nothing without drafts, or where the server was started anew.

    Parameters
    ----------
    counts : the server's, of the time of the run; other clients' requests are in them too. Without them the
        usage of the run's own answers tells less: not how often drafts were verified, nor at which position
        they were accepted.
    """
    if counts is None:
        num_drafted = sum(record.num_drafted_tokens for record in records)
        num_accepted = sum(record.num_accepted_tokens for record in records)
    else:
        num_drafted, num_accepted = counts.num_drafted_tokens, counts.num_accepted_tokens
    if num_drafted <= 0:
        return []
    facts = [
        Fact("spec_decode_draft_tokens", num_drafted, "draft tokens verified"),
        Fact("spec_decode_accepted_tokens", num_accepted),
        Fact("spec_decode_acceptance_rate", 100 * num_accepted / num_drafted, "accepted", "{:.1f}%".format),
        Fact("spec_decode_source", "usage" if counts is None else "metrics"),
    ]
    if counts is None or counts.num_drafts <= 0:
        return facts
    rates = [accepted / counts.num_drafts for accepted in counts.accepted_at]
    return [
        *facts,
        Fact("spec_decode_num_drafts", counts.num_drafts, "verifications"),
        Fact("spec_decode_acceptance_length", 1 + num_accepted / counts.num_drafts, "tokens each"),
        Fact(
            "spec_decode_per_position_acceptance_rates",
            rates,
            "accepted by position" if rates else "",
            lambda own: " / ".join(map(whole_percent, own)),
        ),
    ]
