"""Prompts and decodes on replicas of their own: which replica runs which part of a request.

As in DistServe (Zhong et al., OSDI 2024, section 4): a prefill replica runs the prompt and delivers the
first token; its KV stays there until a decode replica has room and fetches it; the decode replica delivers
the further tokens. The wait for that room therefore lies between the first token and the second.
"""

from __future__ import annotations

from dataclasses import replace

from onbeat.core.errors import ConfigError
from onbeat.core.request import Request
from onbeat.core.slo import ShedMode
from onbeat.scheduler.cluster.routers import LeastOutstanding
from onbeat.scheduler.cluster.routing import Choice, RoutingRequest


class PoolRouter:
    """In each of two pools, the replica with the fewest requests (DistServe, section 4.3).

    Replicas are numbered through both pools, prefill replicas first.
    """

    def __init__(self, num_prefill: int, num_decode: int) -> None:
        self._num_prefill = num_prefill
        self._prefill = LeastOutstanding(num_prefill)
        self._decode = LeastOutstanding(num_decode)
        self._members = [
            frozenset(range(num_prefill)),
            frozenset(range(num_prefill, num_prefill + num_decode)),
        ]
        """Of the prefill pool and of the decode pool."""

    def is_decode(self, replica: int) -> bool:
        """Return whether a replica is one of the decode pool."""
        return replica >= self._num_prefill

    def route_prompt(self, request: RoutingRequest) -> int:
        """Return the prefill replica that runs the prompt."""
        return _chosen(self._prefill.route(request))

    def route_decodes(self, request: RoutingRequest) -> int:
        """Return the decode replica that runs all after the first token."""
        return self._num_prefill + _chosen(self._decode.route(request))

    def on_finish(self, replica: int, request: RoutingRequest) -> None:
        """Hear that a replica has ended its part of a request, however it ended."""
        pool, own = self._pool(replica)
        pool.on_finish(own, request)

    def join(self, replica: int) -> None:
        """Let a replica of either pool be chosen again."""
        pool, own = self._pool(replica)
        self._members[self.is_decode(replica)] |= {replica}
        pool.join(own)

    def leave(self, replica: int) -> None:
        """Choose a replica of either pool no more; raises ConfigError for the last one of a pool."""
        pool, own = self._pool(replica)
        others = self._members[self.is_decode(replica)] - {replica}
        if not others:
            raise cannot_leave(replica)
        self._members[self.is_decode(replica)] = others
        pool.leave(own)

    def _pool(self, replica: int) -> tuple[LeastOutstanding, int]:
        """Return the router of a replica's pool, and the replica's number there."""
        if self.is_decode(replica):
            return self._decode, replica - self._num_prefill
        return self._prefill, replica


def cannot_leave(replica: int) -> ConfigError:
    """Return the error of a replica that is to leave as the last one."""
    return ConfigError(
        f"replica {replica} cannot leave: no other takes requests; let another one join before"
    )


def _chosen(choice: Choice | None) -> int:
    assert choice is not None, "a pool never loses its last member"
    return choice.replica


def prompt_part(request: Request, *, num_output_tokens: int) -> Request:
    """Return what a prefill replica runs of a request: its prompt, and the first token alone.

    Parameters
    ----------
    num_output_tokens : that the request will have at most. With a single one it ends where its prompt ran;
        else its KV is kept there for a decode replica.
    """
    first_token_alone = replace(request.sampling, max_tokens=1)
    return replace(request, sampling=first_token_alone, keeps_kv=num_output_tokens > 1)


def decode_part(request: Request, now: float) -> Request:
    """Return what is left of a request after its first token: all but that token is computed.

    Its TTFT objective is behind it, and it has been taken: it is not asked again.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    return replace(
        request,
        prompt_token_ids=range(num_prompt_tokens + 1),
        sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - 1),
        arrival=now,
        num_external_tokens=num_prompt_tokens,
        slo=None if request.slo is None else replace(request.slo, ttft=None, e2e=None),
        shed=ShedMode.OFF,
    )
