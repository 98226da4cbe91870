"""What speculation did in a run, measured or simulated, as tables show it and files have it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol


class Drafts(Protocol):
    """Drafts that were verified in a run."""

    @property
    def acceptance_percent(self) -> float | None:
        """Accepted draft tokens in a hundred verified ones, for a table of several measured runs."""
        ...

    def rows(self) -> list[tuple[str, str]]:
        """Return what a table shows, as (name, value)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDrafts:
    """What a server said of its drafts; one draft token at least was verified."""

    num_drafted_tokens: int
    num_accepted_tokens: int
    source: Literal["metrics", "usage"]
    """Where the numbers come from: the server's metrics, or the usage of the run's own answers."""
    num_drafts: int | None = None
    """Rows of a step that verified drafts; None where the source does not say."""
    accepted_at: tuple[int, ...] = ()
    """Index j counts the drafts accepted at position j of their row; empty without `num_drafts`."""

    @property
    def acceptance_percent(self) -> float:
        return 100 * self.num_accepted_tokens / self.num_drafted_tokens

    def rows(self) -> list[tuple[str, str]]:
        rows = [
            ("draft tokens verified", f"{self.num_drafted_tokens:,}"),
            ("accepted", f"{self.acceptance_percent:.1f}%"),
        ]
        if self.num_drafts:
            rows += [
                ("verifications", f"{self.num_drafts:,}"),
                ("tokens each", f"{1 + self.num_accepted_tokens / self.num_drafts:.2f}"),
            ]
            if self.accepted_at:
                rates = " / ".join(f"{accepted / self.num_drafts:.0%}" for accepted in self.accepted_at)
                rows.append(("accepted by position", rates))
        return rows

    def keys(self) -> dict[str, Any]:
        """Return what is saved, under the keys of `vllm bench serve`."""
        keys: dict[str, Any] = {
            "spec_decode_acceptance_rate": self.acceptance_percent,
            "spec_decode_draft_tokens": self.num_drafted_tokens,
            "spec_decode_accepted_tokens": self.num_accepted_tokens,
            "spec_decode_source": self.source,
        }
        if self.num_drafts:
            keys |= {
                "spec_decode_acceptance_length": 1 + self.num_accepted_tokens / self.num_drafts,
                "spec_decode_num_drafts": self.num_drafts,
                "spec_decode_per_position_acceptance_rates": [
                    accepted / self.num_drafts for accepted in self.accepted_at
                ],
            }
        return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDrafts:
    """What was speculated in a simulated run."""

    num_speculative_tokens: int
    """Most draft tokens of a row."""
    draft_length: str
    """How the length of a row's drafts is chosen."""
    num_drafted_tokens: int
    num_accepted_tokens: int
    accepted_share: float | None
    """Of the draft tokens; None without one."""
    verifying_share: float | None
    """Share of the decode rows that verified drafts; None without a row."""
    tokens_per_decode: float
    """Mean tokens that a decode row made."""

    @property
    def acceptance_percent(self) -> None:
        """None: a simulation shows a share of its own (`accepted_share`)."""
        return

    def rows(self) -> list[tuple[str, str]]:
        accepted, verifying = self.accepted_share, self.verifying_share
        return [
            ("drafts of a row", f"{self.draft_length}, at most {self.num_speculative_tokens}"),
            ("draft tokens verified", f"{self.num_drafted_tokens:,}"),
            ("accepted", "-" if accepted is None else f"{accepted:.1%}"),
            ("decode rows with drafts", "-" if verifying is None else f"{verifying:.1%}"),
            ("tokens of a decode row", f"{self.tokens_per_decode:.2f}"),
        ]

    def keys(self) -> dict[str, Any]:
        """Return what is saved."""
        return asdict(self)
