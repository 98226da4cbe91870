"""Somebody who carries out what a fleet decides, and holds it to its word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from random import Random

from onbeat.core.fleet import PrefillCosts, ReplicaLimits, ReplicaLoad
from onbeat.core.handover import MoveVerb
from onbeat.core.slo import SLO
from onbeat.scheduler.cluster.events import (
    Aborted,
    Answered,
    Arrived,
    Delivered,
    DrainAsked,
    FleetEvent,
    Joined,
    Lost,
    MoveStep,
    Refuse,
    Refused,
    Reported,
    RoutingRequest,
    ScaleAsked,
    Send,
    Start,
    Stop,
    Tick,
    Withdraw,
)
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.membership import FleetRules
from onbeat.scheduler.cluster.routers import make_router
from tests.owners import check_owners, owner_of
from tests.pure.scheduler.carried_engine import Engine

MOST_REPLICAS = 6
COSTS = PrefillCosts(token=3e-4, pair=1e-9, step=5e-3, decode=1e-4)


@dataclass
class Carrier:
    """Replicas and clients that know who has which request, whatever the fleet thinks.

    Every event is one that may come at that moment, late ones of replicas that have lost a request included.
    """

    fleet: Fleet
    now: float = 0.0
    held: dict[str, dict[str, int]] = field(default_factory=dict)
    """Replica that lives -> request -> tokens delivered there."""
    starting: list[str] = field(default_factory=list)
    owners: dict[str, str | None] = field(default_factory=dict)
    """Open request -> replica; None while it waits."""
    num_sent: dict[str, int] = field(default_factory=dict)
    num_arrived: int = 0
    num_ended: int = 0
    num_events: int = 0
    late: list[tuple[str, str]] = field(default_factory=list)
    """(replica, request) that were taken away: what the replica says of them comes late."""
    engines: dict[str, Engine] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """Open request -> its name where it is."""
    adopted: dict[str, str] = field(default_factory=dict)
    """Move -> the name that the request has at its destination."""
    origins: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Move -> source, and the name there."""
    num_names: int = 0
    num_moved: int = 0

    def tell(self, event: FleetEvent) -> None:
        """Tell the fleet, and carry out what it decides."""
        self.num_events += 1
        for action in self.fleet.on_event(event, self.now):
            match action:
                case Send(replica, request_id):
                    assert self.owners[request_id] is None, "it is somewhere else"
                    assert replica in self.held, "it goes to a replica that does not live"
                    self.owners[request_id] = replica
                    self.held[replica][request_id] = 0
                    self.engines[replica].running.add(self.new_name(request_id))
                    if action.stops:
                        self.engines[replica].stopping.add(self.names[request_id])
                    self.num_sent[replica] = self.num_sent.get(replica, 0) + 1
                case Withdraw(replica, request_id):
                    del self.held[replica][request_id]
                    self.late.append((replica, request_id))
                    self.engines[replica].inbox.append((None, self.names[request_id]))
                    if request_id in self.owners:
                        self.owners[request_id] = None
                case MoveStep():
                    self.take_step(action)
                case Refuse(request_id):
                    assert self.owners.pop(request_id) is None, "a replica still has it"
                    self.num_ended += 1
                case Start(replica):
                    assert replica not in self.held, "it lives"
                    assert replica not in self.starting, "it is starting"
                    self.starting.append(replica)
                case Stop(replica):
                    self.stop(replica)
        del self.late[:-20]

    def stop(self, replica: str) -> None:
        if replica in self.held:
            assert not self.held[replica], "it has requests"
            self.lose(replica)
        elif replica in self.starting:
            self.starting.remove(replica)

    def new_name(self, request_id: str) -> str:
        self.num_names += 1
        name = self.names[request_id] = f"{request_id}~{self.num_names}"
        return name

    def take_step(self, step: MoveStep) -> None:
        """Pass a step of a move on; a replica that is gone hears nothing."""
        replica, request_id, verb = step.replica, step.request_id, step.verb
        if verb is MoveVerb.TAKE:
            source, name = self.origins[step.move]
            assert self.owners[request_id] == source
            self.owners[request_id] = replica
            self.held[replica][request_id] = self.held[source].pop(request_id)
            self.names[request_id] = self.adopted[step.move]
            self.late.append((source, request_id))
            self.num_moved += 1
            self.engines[source].inbox.append((step, name))
        elif replica in self.engines:
            name = self.names.get(request_id, "")
            if verb is MoveVerb.ADOPT:
                self.num_names += 1
                name = self.adopted[step.move] = f"{request_id}~{self.num_names}"
            elif verb is MoveVerb.RELEASE:
                name = self.adopted.get(step.move, "")
            elif verb in (MoveVerb.HOLD, MoveVerb.FREEZE):
                self.origins[step.move] = replica, name
            elif verb in (MoveVerb.UNHOLD, MoveVerb.REATTACH):
                name = self.origins.get(step.move, ("", name))[1]
            self.engines[replica].inbox.append((step, name))

    def answer(self, rng: Random) -> None:
        """Let a replica do what it was asked for first."""
        busy = [replica for replica, engine in self.engines.items() if engine.inbox]
        if not busy:
            return
        replica = rng.choice(busy)
        engine = self.engines[replica]
        step, name = engine.inbox.pop(0)
        if step is None:
            engine.drop(name)
            return
        source, theirs = self.origins.get(step.move, ("", ""))
        giving = self.engines.get(source)
        is_lent = giving is not None and theirs in giving.lent | giving.detached
        ok = engine.do(step, name, rng, is_lent=is_lent)
        if ok is not None:
            self.tell(Answered(replica, step.move, step.verb, ok, rng.randrange(1, 40) if ok else 0))

    def lose(self, replica: str) -> None:
        """Let a replica be gone, with all that it has."""
        self.engines.pop(replica)
        for request_id in self.held.pop(replica):
            self.owners[request_id] = None
            self.late.append((replica, request_id))
        self.num_sent.pop(replica, None)

    def check(self) -> None:
        """Assert that the fleet knows where everything is, and that nothing is forgotten."""
        check_owners(self.fleet)
        assert {each: owner_of(self.fleet, each) for each in self.owners} == self.owners
        assert self.fleet.num_waiting == sum(owner is None for owner in self.owners.values())
        assert {
            each.replica: each.num_outstanding for each in self.fleet.replicas() if each.num_outstanding
        } == {replica: len(held) for replica, held in self.held.items() if held}
        assert self.num_arrived == self.num_ended + len(self.owners)

    # ---- what may happen ----

    def arrive(self, rng: Random) -> None:
        self.num_arrived += 1
        request_id = f"q{self.num_arrived}"
        self.owners[request_id] = None
        prefix = rng.randrange(6)
        request = RoutingRequest(
            request_id,
            tuple(prefix * 100 + each for each in range(rng.randrange(8))),
            num_prompt_tokens=rng.randrange(1, 200),
            max_tokens=rng.randrange(1, 100),
            arrival=self.now,
            slo=rng.choice((None, SLO(ttft=0.5, tbt=0.05), SLO(ttft=5.0))),
            resumes=rng.random() < 0.95,
            priority=rng.choice((0, 0, 0, -1)),
        )
        self.tell(Arrived(request))

    def join(self, rng: Random) -> None:
        if self.starting:
            replica = self.starting.pop(rng.randrange(len(self.starting)))
            self.held[replica], self.engines[replica] = {}, Engine()
            limits = ReplicaLimits(
                max_model_len=rng.choice((150, 400)),
                max_num_seqs=8,
                num_blocks=100,
                block_size=16,
                moves_streams=rng.random() < 0.9,
            )
            self.tell(Joined(replica, limits))

    def deliver(self, rng: Random) -> None:
        replica, request_id = self._any_held(rng)
        if request_id is None:
            return
        engine, name = self.engines[replica], self.names[request_id]
        if name not in engine.running:
            return  # it stands still
        is_finished = rng.random() < 0.12
        self.held[replica][request_id] += 1
        if is_finished:
            del self.held[replica][request_id], self.owners[request_id]
            engine.running.remove(name)
            self.num_ended += 1
        elif name in engine.stopping:
            engine.stopping.remove(name)
            engine.running.remove(name)
            engine.detached.add(name)
        self.tell(Delivered(replica, request_id, 1, 0, is_finished))

    def refuse(self, rng: Random) -> None:
        replica, request_id = self._any_held(rng)
        if request_id is None or self.held[replica][request_id]:
            return
        del self.held[replica][request_id]
        self.engines[replica].running.remove(self.names[request_id])
        self.owners[request_id] = None
        retry_after = rng.choice((None, 0.1, 3.0))
        self.tell(Refused(replica, request_id, rng.random() < 0.9, retry_after))

    def abort(self, rng: Random) -> None:
        if self.owners:
            request_id = rng.choice(list(self.owners))
            owner = self.owners.pop(request_id)
            self.num_ended += 1
            self.tell(Aborted(request_id))
            assert owner is None or request_id not in self.held.get(owner, {}), "nobody withdrew it"

    def die(self, rng: Random) -> None:
        candidates = [*self.held, *self.starting]
        if not candidates:
            return
        replica = rng.choice(candidates)
        if replica in self.held:
            self.lose(replica)
        else:
            self.starting.remove(replica)
        self.tell(Lost(replica, "killed"))

    def come_back_unseen(self, rng: Random) -> None:
        if self.held:
            replica = rng.choice(list(self.held))
            self.lose(replica)
            self.held[replica], self.engines[replica] = {}, Engine()
            self.tell(
                Joined(replica, ReplicaLimits(max_model_len=400, max_num_seqs=8, num_blocks=9, block_size=16))
            )

    def drain(self, rng: Random) -> None:
        replica = f"r{rng.randrange(MOST_REPLICAS)}"
        self.tell(DrainAsked(replica, rng.choice((0.0, 1.0, inf)), rng.random() < 0.5))

    def scale(self, rng: Random) -> None:
        self.tell(ScaleAsked(rng.randrange(MOST_REPLICAS)))

    def report(self, rng: Random) -> None:
        if self.held:
            replica = rng.choice(list(self.held))
            backlog = tuple((rng.random(), rng.random(), rng.randrange(3)) for _ in range(rng.randrange(3)))
            load = ReplicaLoad(
                time=self.now,
                num_taken=rng.randrange(self.num_sent.get(replica, 0) + 1),
                num_running=len(self.held[replica]),
                num_decodes=len(self.held[replica]),
                num_free_blocks=rng.choice((3, 50, 100)),
                num_wanted_blocks=rng.choice((0, 0, 0, 5)),
                blocked=rng.choice(("", "", "gone", *self.held[replica])),
                tightest_tbt=rng.choice((inf, inf, 0.005)),
                decode_seconds=rng.choice((0.001, 0.01)),
                backlog=tuple(sorted(backlog)),
                costs=rng.choice((None, COSTS)),
            )
            self.tell(Reported(replica, load))

    def tick(self, rng: Random) -> None:
        self.now = max(self.now, min(self.fleet.next_time, self.now + rng.choice((0.01, 1.0, 40.0))))
        self.tell(Tick())

    def say_late(self, rng: Random) -> None:
        """Tell what a replica said of a request that is no longer its own."""
        if self.late:
            replica, request_id = rng.choice(self.late)
            if self.owners.get(request_id) != replica:
                event = rng.choice(
                    (
                        Delivered(replica, request_id, 1, 0, is_finished=True),
                        Refused(replica, request_id, is_for_load=True),
                    )
                )
                self.tell(event)

    def _any_held(self, rng: Random) -> tuple[str, str | None]:
        busy = [replica for replica, held in self.held.items() if held]
        if not busy:
            return "", None
        replica = rng.choice(busy)
        return replica, rng.choice(list(self.held[replica]))

    def settle(self, rng: Random) -> None:
        """Let everything end well: no more deaths, and enough replicas, which report how they stand."""
        self.tell(ScaleAsked(2))
        for _ in range(10_000):
            if not self.owners:
                break
            self.now += 1.0
            self.join(rng)
            self.answer(rng)
            self.deliver(rng)
            self.report(rng)  # a stream may wait for one that shows room
            self.tell(Tick())
        self.check()
        assert not self.owners, "somebody never ends"
        while any(engine.inbox for engine in self.engines.values()):
            self.answer(rng)
        assert not any(engine.running for engine in self.engines.values()), "somebody runs unseen"
        assert not any(engine.has_kept for engine in self.engines.values()), "something is kept for nobody"


CHANCES: tuple[tuple[Callable[[Carrier, Random], None], int], ...] = (
    (Carrier.arrive, 30),
    (Carrier.deliver, 60),
    (Carrier.answer, 250),
    (Carrier.report, 30),
    (Carrier.join, 8),
    (Carrier.refuse, 6),
    (Carrier.abort, 5),
    (Carrier.die, 3),
    (Carrier.come_back_unseen, 1),
    (Carrier.drain, 2),
    (Carrier.scale, 3),
    (Carrier.tick, 5),
    (Carrier.say_late, 5),
)
"""What may happen, and how often of so many."""


NO_POOLS: tuple[int, str] = (0, "adaptive")


def new_carrier(
    router: str, num_prefill: int = 0, pool_rule: str = "adaptive", move_rule: str = "mend"
) -> Carrier:
    """Return somebody with a fleet of three that has not started."""
    config = FleetRules(drain_seconds=5.0, num_prefill=num_prefill, pool_rule=pool_rule, move_rule=move_rule)
    carrier = Carrier(Fleet(make_router(router), config))
    carrier.tell(ScaleAsked(3))
    return carrier


def run(
    router: str,
    *,
    num_events: int,
    seed: int,
    check_every: int = 1,
    pools: tuple[int, str] = NO_POOLS,
    move_rule: str = "mend",
) -> Carrier:
    """Let so much happen at random, then everything end."""
    rng = Random(seed)
    carrier = new_carrier(router, *pools, move_rule)
    kinds, chances = zip(*CHANCES, strict=True)
    next_check = 0
    while carrier.num_events < num_events:
        carrier.now += rng.expovariate(10.0)
        rng.choices(kinds, chances)[0](carrier, rng)
        if carrier.num_events >= next_check:
            next_check = carrier.num_events + check_every
            carrier.check()
    carrier.settle(rng)
    return carrier
