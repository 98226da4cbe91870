"""What a server's speculation did in a run: from its metrics, or from the usage of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from onbeat.bench.bench_config import TargetConfig
from onbeat.bench.probe import PROBE_TIMEOUT
from onbeat.bench.record import RequestRecord
from onbeat.metrics.exposition import Scrape, read_exposition
from onbeat.report.drafts import MeasuredDrafts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """How a kind of server calls its counters."""

    drafts: str
    draft_tokens: str
    accepted_tokens: str
    accepted_at: str
    """With a label `position`, the first at 0."""


_NAMES = (
    _Names(
        drafts="onbeat_spec_drafts_total",
        draft_tokens="onbeat_spec_draft_tokens_total",
        accepted_tokens="onbeat_spec_accepted_tokens_total",
        accepted_at="onbeat_spec_accepted_tokens_at_position_total",
    ),
    _Names(
        drafts="vllm:spec_decode_num_drafts_total",
        draft_tokens="vllm:spec_decode_num_draft_tokens_total",
        accepted_tokens="vllm:spec_decode_num_accepted_tokens_total",
        accepted_at="vllm:spec_decode_num_accepted_tokens_per_pos_total",
    ),
)


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


def draft_counts(scrape: Scrape) -> DraftCounts | None:
    """Return the counts among a server's metrics, over all its engines; None where it does not speculate."""
    for names in _NAMES:
        num_drafted_tokens = scrape.total(names.draft_tokens)
        if num_drafted_tokens is None:
            continue
        positions = sorted(map(int, scrape.label_values(names.accepted_at, "position")))
        accepted = [scrape.total(names.accepted_at, position=str(position)) for position in positions]
        return DraftCounts(
            num_drafts=round(scrape.total(names.drafts) or 0),
            num_drafted_tokens=round(num_drafted_tokens),
            num_accepted_tokens=round(scrape.total(names.accepted_tokens) or 0),
            accepted_at=tuple(round(number or 0) for number in accepted),
        )
    return None


async def look_at_drafts(session: aiohttp.ClientSession, target: TargetConfig) -> DraftCounts | None:
    """Return what a server's /metrics say of drafts; None where it has none, or does not show them."""
    try:
        async with session.get(
            f"{target.root}/metrics", headers=dict(target.headers), timeout=PROBE_TIMEOUT
        ) as response:
            if response.status != 200:
                return None
            return draft_counts(read_exposition(await response.text()))
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
        return None


async def drafts_since(
    before: DraftCounts | None, session: aiohttp.ClientSession, target: TargetConfig
) -> DraftCounts | None:
    """Return what a server has counted since an earlier look; None where either look says nothing."""
    after = None if before is None else await look_at_drafts(session, target)
    return None if before is None or after is None else after.since(before)


def measured_drafts(counts: DraftCounts | None, records: Sequence[RequestRecord]) -> MeasuredDrafts | None:
    """Return what is known of the drafts of a run; None without drafts, or where the server was started anew.

    Parameters
    ----------
    counts : the server's, of the time of the run; other clients' requests are in them too. Without them the
        usage of the run's own answers tells less: not how often drafts were verified, nor at which position
        they were accepted.
    """
    if counts is None:
        num_drafted = sum(record.num_drafted_tokens for record in records)
        num_accepted = sum(record.num_accepted_tokens for record in records)
        drafts = MeasuredDrafts(
            num_drafted_tokens=num_drafted, num_accepted_tokens=num_accepted, source="usage"
        )
    else:
        drafts = MeasuredDrafts(
            num_drafted_tokens=counts.num_drafted_tokens,
            num_accepted_tokens=counts.num_accepted_tokens,
            source="metrics",
            num_drafts=counts.num_drafts if counts.num_drafts > 0 else None,
            accepted_at=counts.accepted_at,
        )
    return drafts if drafts.num_drafted_tokens > 0 else None
