"""A router that prices the wait of a request in the prefill work that a choice costs the fleet.

Which replicas hold which prefixes, as far as whoever sends them prompts can know.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from onbeat.core.fleet import PrefillCosts, ReplicaLimits, ReplicaLoad
from onbeat.core.hashing import BlockHash
from onbeat.scheduler.cluster.events import RoutingRequest
from onbeat.scheduler.cluster.load_view import FirstToken, LoadView
from onbeat.scheduler.cluster.routing import NONE_EXCLUDED, LeastLoaded, Router, RoutingChoice


class Holders:
    """Who holds how much of a prompt; each answer costs O(levels), however many replicas hold it.

    Parameters
    ----------
    levels : numbers of blocks, the largest first, and the replicas that hold so many, a bit each.
    """

    __slots__ = ("_levels",)

    def __init__(self, levels: Sequence[tuple[int, int]]) -> None:
        self._levels = levels

    def num_held(self, replica: int) -> int:
        """Return how many of the first blocks a replica holds."""
        for depth, replicas in self._levels:
            if replicas >> replica & 1:
                return depth
        return 0

    def longest_first(self) -> Iterator[int]:
        """Yield the replicas that hold some, those that hold the most first."""
        for _, replicas in self._levels:
            left = replicas
            while left:
                lowest = left & -left
                yield lowest.bit_length() - 1
                left ^= lowest


class _Held:
    """The blocks that one replica is taken to hold, the least recently used first."""

    __slots__ = ("bit", "blocks", "num_blocks")

    def __init__(self, replica: int, num_blocks: int) -> None:
        self.blocks: OrderedDict[BlockHash, None] = OrderedDict()
        self.num_blocks = num_blocks
        self.bit = 1 << replica
        """As `PrefixMemory` writes it down. Most blocks have one holder alone, and all its blocks share this
        number: one of their own each, with a bit for any of 1,000 replicas, would be most of the memory."""


class PrefixMemory:
    """The prefixes that replicas were sent, less those that they must have evicted since.

    Each replica is taken to hold what it was sent most recently, up to its memory. A look-up costs O(blocks
    of the prompt), however many replicas there are.
    """

    def __init__(self) -> None:
        self._holders: dict[BlockHash, int] = {}
        """Block -> its replicas, a bit each."""
        self._held: dict[int, _Held] = {}

    def join(self, replica: int, num_blocks: int) -> None:
        """Count with a replica that holds nothing."""
        self._held[replica] = _Held(replica, num_blocks)

    def forget(self, replica: int) -> None:
        """Count no more with a replica. O(its blocks)."""
        held = self._held.pop(replica, None)
        if held is not None:
            for block in held.blocks:
                self._drop(block, replica)

    def look_up(self, blocks: Sequence[BlockHash]) -> Holders:
        """Return who holds how many of the first blocks of a prompt."""
        holders = self._holders
        levels: list[tuple[int, int]] = []
        alive, depth = -1, 0
        for block in blocks:
            still = alive & holders.get(block, 0)
            if still != alive:
                if depth:
                    levels.append((depth, alive & ~still))
                alive = still
                if not alive:
                    break
            depth += 1
        if depth and alive:
            levels.append((depth, alive))
        levels.reverse()
        return Holders(levels)

    def send(self, replica: int, blocks: Sequence[BlockHash]) -> None:
        """Take a replica to hold a prompt that it is sent."""
        held = self._held.get(replica)
        if held is None:
            return
        holders, own, bit = self._holders, held.blocks, held.bit
        for block in reversed(blocks):  # of a prefix, the end is evicted before the beginning
            if block in own:
                own.move_to_end(block)
            else:
                own[block] = None
                others = holders.get(block)
                holders[block] = others | bit if others else bit
        while len(own) > held.num_blocks:
            self._drop(own.popitem(last=False)[0], replica)

    def _drop(self, block: BlockHash, replica: int) -> None:
        rest = self._holders[block] & ~(1 << replica)
        if rest:
            self._holders[block] = rest
        else:
            del self._holders[block]


_PRICE = 0.3
"""Seconds of prefill work that a second until the first token is worth."""
_MOST_HOLDERS = _MOST_IDLE = 8
"""Replicas that are looked at, of those that hold the longest prefixes and of those with the least to do."""
_A_REQUEST = 1e-3
"""Seconds that a request counts as beside prefill work, where those with the least to do are looked for."""
_UNKNOWN_COSTS = PrefillCosts(token=5e-5, pair=0.0, step=0.01, decode=1e-4)
"""Of replicas that predict nothing: what is compared is work, in the unit of this guess."""


class _Offer(NamedTuple):
    """What a request would cost on a replica. The least is chosen."""

    cost: float
    num_requests: int
    last_choice: int
    """Of equal ones, the least recently chosen."""
    number: int
    first_token: FirstToken | None


class _Bid(NamedTuple):
    """What is known of an offer before anything is predicted."""

    least: float
    """A bound of what it costs, from below."""
    number: int
    work: float
    """Seconds of uncached prefill on the reference device."""
    seconds: float
    """Of the same work on the replica itself."""
    num_blocks: int
    """Of KV that the uncached prompt wants."""


class _Request(NamedTuple):
    """A request, and what is looked up of it once."""

    num_tokens: int
    deadline: float
    objective: float
    holders: Holders


class SLORouter(Router):
    """The replica where a request costs the fleet least: uncached prefill, and its wait at a price.

    The cost is that of its uncached prompt on one device for all, so that a slow replica does not look
    expensive, only slow; and `_PRICE` for each second until its first token, as predicted. Of more than 16
    replicas, those that hold the most of the prompt and those with the least to do are looked at, so a choice
    costs O(log replicas + blocks).
    """

    reads_reports = True

    def __init__(self) -> None:
        self._views: dict[int, LoadView] = {}
        self._members: dict[int, None] = {}
        self._by_work = LeastLoaded()
        self._num_choices = 0
        self._last_choices: dict[int, int] = {}
        self._prefixes = PrefixMemory()

    def route(
        self, request: RoutingRequest, now: float = 0.0, excluded: Collection[int] = NONE_EXCLUDED
    ) -> RoutingChoice | None:
        """Return the cheapest replica."""
        asked = self._look_up(request)
        best = self._best(asked, now, excluded)
        if best is None:
            return None
        number, view = best.number, self._views[best.number]
        self._last_choices[number] = self._num_choices = self._num_choices + 1
        num_cached = self._num_cached(number, asked)
        costs = view.load.costs or _UNKNOWN_COSTS
        seconds = costs.seconds(asked.num_tokens - num_cached, num_cached)
        num_blocks = view.limits.num_blocks_for(asked.num_tokens - num_cached)
        view.send(asked.deadline, seconds, num_blocks, request.request_id)
        self._weigh(number, now)
        if request.block_hashes:
            self._prefixes.send(number, request.block_hashes)
        first_token = best.first_token
        likely = None if first_token is None else first_token.likely
        return RoutingChoice(number, "prefix" if num_cached else "cost", likely)

    def take(self, replica: int, request: RoutingRequest) -> None:
        """Take it to hold the prompt; its next report counts the request."""
        if request.block_hashes:
            self._prefixes.send(replica, request.block_hashes)

    def num_held(self, request: RoutingRequest) -> Mapping[int, int]:
        """Return how many tokens of a prompt each replica is taken to hold, of those that hold some."""
        holders = self._prefixes.look_up(request.block_hashes)
        return {
            number: holders.num_held(number) * self._views[number].limits.block_size
            for number in holders.longest_first()
        }

    def on_finish(self, replica: int, request: RoutingRequest) -> None:
        """Count it no more."""
        view = self._views.get(replica)
        if view is not None:
            view.num_ended += 1
            if view.sent:
                view.take_back(request.request_id)

    def on_report(self, replica: int, load: ReplicaLoad, now: float) -> None:
        """Take a report."""
        view = self._views.get(replica)
        if view is not None:
            view.on_report(load, now)
            self._weigh(replica, now)

    def least_wait(self, request: RoutingRequest, now: float) -> float | None:
        """Return the predicted seconds until the first token where it is soonest."""
        asked = self._look_up(request)
        known = (self._first_token(number, asked, now) for number in self._candidates(asked, NONE_EXCLUDED))
        return min((each.seconds for each in known if each is not None), default=None)

    def join(self, replica: int, limits: ReplicaLimits | None = None) -> None:
        """Let a replica be chosen."""
        self._members[replica] = None
        self._by_work.join(replica)
        if replica not in self._views:
            limits = limits or ReplicaLimits(
                max_model_len=0, max_num_seqs=256, num_blocks=1 << 16, block_size=16
            )
            self._views[replica] = LoadView(limits)
            self._prefixes.join(replica, limits.num_blocks)

    def leave(self, replica: int) -> None:
        """Choose a replica no more; what it holds is forgotten."""
        self._members.pop(replica, None)
        self._by_work.leave(replica)
        self._views.pop(replica, None)
        self._last_choices.pop(replica, None)
        self._prefixes.forget(replica)

    def _look_up(self, request: RoutingRequest) -> _Request:
        num_tokens = request.num_prompt_tokens + request.num_output_tokens
        holders = self._prefixes.look_up(request.block_hashes)
        return _Request(num_tokens, request.ttft_deadline, request.ttft_objective, holders)

    def _num_cached(self, number: int, asked: _Request) -> int:
        """Return the tokens of a prompt that a replica holds; one at least is computed."""
        num_tokens = asked.holders.num_held(number) * self._views[number].limits.block_size
        return min(num_tokens, max(0, asked.num_tokens - 1))

    def _candidates(self, asked: _Request, excluded: Collection[int]) -> list[int]:
        """Return the replicas to look at."""
        if len(self._members) <= _MOST_HOLDERS + _MOST_IDLE:
            return [number for number in self._members if number not in excluded]
        holders = asked.holders.longest_first()
        allowed = (number for number in holders if number in self._members and number not in excluded)
        looked_at = list(islice(allowed, _MOST_HOLDERS))
        return looked_at + self._by_work.least(_MOST_IDLE, {*excluded, *looked_at})

    def _weigh(self, number: int, now: float) -> None:
        """Note how much a replica has to do."""
        view = self._views[number]
        work = view.work_left(now) + _A_REQUEST * view.num_requests
        self._by_work.add(number, work - self._by_work.loads[number])

    def _first_token(self, number: int, asked: _Request, now: float) -> FirstToken | None:
        view = self._views[number]
        costs = view.load.costs
        if costs is None:
            return None
        num_cached = self._num_cached(number, asked)
        seconds = costs.seconds(asked.num_tokens - num_cached, num_cached)
        num_blocks = view.limits.num_blocks_for(asked.num_tokens - num_cached)
        return view.first_token(asked.deadline, asked.objective, seconds, num_blocks, now)

    def _bids(self, asked: _Request, now: float, excluded: Collection[int]) -> list[_Bid]:
        """Return what is known at once of the replicas to look at, those first that may be the cheapest."""
        reference, num_tokens = self._reference, asked.num_tokens
        bids = []
        for number in self._candidates(asked, excluded):
            view, num_cached = self._views[number], self._num_cached(number, asked)
            work = reference.seconds(num_tokens - num_cached, num_cached)
            num_blocks = view.limits.num_blocks_for(num_tokens - num_cached)
            costs = view.load.costs
            if costs is None:
                bids.append(_Bid(work, number, work, 0.0, num_blocks))
            else:
                seconds = costs.seconds(num_tokens - num_cached, num_cached)
                least = work + _PRICE * view.soonest(seconds, now)
                bids.append(_Bid(least, number, work, seconds, num_blocks))
        bids.sort()
        return bids

    def _best(self, asked: _Request, now: float, excluded: Collection[int]) -> _Offer | None:
        """Return the least offer; where even the least that it can be is more, none is asked for."""
        best: _Offer | None = None
        for bid in self._bids(asked, now, excluded):
            if best is not None and bid.least > best.cost:
                break
            offer = self._offer(bid, asked, now)
            if best is None or offer < best:
                best = offer
        return best

    def _offer(self, bid: _Bid, asked: _Request, now: float) -> _Offer:
        """Return what a request would cost on a replica."""
        number = bid.number
        view = self._views[number]
        first_token = view.first_token(asked.deadline, asked.objective, bid.seconds, bid.num_blocks, now)
        if first_token is not None:
            wait = first_token.seconds
        else:
            wait = view.num_requests / view.limits.max_num_seqs
            wait += view.capacity_wait(asked.deadline, bid.num_blocks, now)
        last_choice = self._last_choices.get(number, -1)
        return _Offer(bid.work + _PRICE * wait, view.num_requests, last_choice, number, first_token)

    @property
    def _reference(self) -> PrefillCosts:
        """The costs by which the work of a choice is measured, wherever it is done."""
        first = next(iter(self._members), None)
        costs = None if first is None else self._views[first].load.costs
        return costs or _UNKNOWN_COSTS
