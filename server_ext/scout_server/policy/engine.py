"""TAO without I/O: requests come in, placements come out. Gateway, Ray and simulator drive it."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from scout_sdk._hints import SessionEvent
from scout_server.policy.admission import Plan, best_room
from scout_server.policy.evaluators import evaluator
from scout_server.policy.ledger import Ledger, Session, SessionState
from scout_server.policy.placement import Candidate, Placement, Room
from scout_server.policy.readiness import Readiness
from scout_server.policy.turns import (
    Applied,
    Snapshot,
    TaoSettings,
    Turn,
    beside,
    make_plan,
    with_named_prefix,
)

__all__ = ["Applied", "Snapshot", "TaoEngine", "TaoSettings", "Turn", "make_plan"]


@dataclass(slots=True)
class _Waiting:
    turn: Turn
    arrived: float
    kept: bool = False
    """Its session kept its room when the request came."""
    cold: tuple[int, Candidate] | None = None
    """What it is while its session has no credit, and the session's version then."""


class TaoEngine:
    """
    The waiting pool, the ledger and the readiness of sessions, with explicit time.

    One writer. Order of calls for a request: submit, then (a placement out of apply), then finish
    or cancel; cancel, finish and renew of unknown requests are ignored. `now` never goes back.
    """

    def __init__(self, settings: TaoSettings | None = None) -> None:
        self.settings = settings or TaoSettings()
        make_plan(Snapshot(now=0, candidates=(), rooms=(), reserved=(), settings=self.settings))
        self._evaluator = evaluator(self.settings.evaluator, self.settings.objective)
        self.ledger = Ledger(self.settings.ledger, self.settings.credit)
        self.readiness = Readiness(self.settings.readiness)
        self.waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self.reserved: dict[str, str] = {}
        self._joint = 0.0
        """When kept rooms are weighed again."""
        self.changed = False
        """True when something happened since the last snapshot that may let a request in."""

    def configure(self, settings: TaoSettings) -> None:
        """Take other settings from the next decision on; ConfigError leaves the old ones."""
        judge = evaluator(settings.evaluator, settings.objective)
        make_plan(Snapshot(now=0, candidates=(), rooms=(), reserved=(), settings=settings))
        self.settings, self._evaluator = settings, judge
        self.ledger.settings = settings.ledger
        self.ledger.credit_settings = settings.credit
        self.readiness.settings = settings.readiness
        for held in self.waiting.values():
            held.cold = None
        self.changed = True

    # ---- facts -----------------------------------------------------------------------------

    def set_node(self, name: str, *, capacity: int, slots: int) -> None:
        """Add a node, change its size, or take it back after it was down."""
        node = self.ledger.set_node(name, capacity=capacity, slots=slots)
        node.up, self.changed = True, True

    def drain_node(self, name: str, *, draining: bool = True) -> None:
        """Stop (or resume) sending new turns to a node; those that run there go on."""
        node = self.ledger.nodes.get(name)
        if node is not None:
            node.draining, self.changed = draining, True

    def press_node(self, name: str, *, pressed: bool) -> None:
        """Say whether the engine makes requests wait by itself."""
        node = self.ledger.nodes.get(name)
        if node is not None and node.pressed != pressed:
            node.pressed, self.changed = pressed, True

    def lose_node(self, name: str, *, forget: bool = False) -> list[str]:
        """A node died, or was taken out (*forget*); return the requests that ran there."""
        self.changed = True
        return self.ledger.lose_node(name, forget=forget)

    def submit(self, turn: Turn, *, now: float) -> bool:
        """Put a request into the pool; False: the pool is full and it was not taken."""
        turn = with_named_prefix(turn)
        old = self.waiting.get(turn.key)
        booking = self.ledger.release(turn.key)
        if old is None and len(self.waiting) >= self.settings.max_waiting:
            return False
        session = self.ledger.session((turn.tenant, turn.session), now=now)
        if session.state is SessionState.FINISHED:
            session.state = SessionState.NEW  # it came back after its goodbye
        arrived = now if old is None else old.arrived
        if old is None and booking is not None:
            arrived = booking.since  # a retry is not sent to the end of the queue
        kept = session.state is SessionState.TOOL and old is None and booking is None
        self.waiting[turn.key] = _Waiting(turn, arrived, kept)
        session.waiting.add(turn.key)
        self.ledger.settle(session)
        hints = turn.hints
        self.readiness.turn(
            turn.session,
            hints.tools if hints else (),
            agent=hints.agent if hints else None,
            tenant=turn.tenant,
            now=now,
        )
        self.changed = True
        return True

    def cancel(self, key: str, *, now: float) -> bool:
        """A request's client left, waiting or running; False: it was unknown."""
        held = self.waiting.pop(key, None)
        self.reserved.pop(key, None)
        if held is not None:
            session = self.ledger.session((held.turn.tenant, held.turn.session), now=now)
            session.waiting.discard(key)
            self.ledger.settle(session)
        released = self.ledger.release(key)
        self.changed = True
        return held is not None or released is not None

    def finish(
        self,
        key: str,
        *,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
        cached_tokens: int | None = None,
        held_tokens: int | None = None,
        tools: Sequence[tuple[str, float | None]] = (),
        final: bool = False,
        now: float,
    ) -> None:
        """A request ended; its session goes off to run *tools*, or ends when *final*."""
        booking = self.ledger.finish(
            key,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            cached_tokens=cached_tokens,
            held_tokens=held_tokens,
            now=now,
        )
        if booking is None:
            return
        self.changed = True
        tenant, name = booking.session
        if final:
            self.readiness.forget(name, tenant=tenant, now=now)
            self.ledger.finish_session(booking.session)
            return
        session = self.ledger.sessions.get(booking.session)
        if session is not None and not session.running and not session.waiting:
            self.readiness.gap(name, tools, tenant=tenant, now=now)

    def observe_held(
        self, session: str, node: str, tokens: int, *, tenant: str = "", used: bool, now: float
    ) -> None:
        """A node said what it holds for a session, which *used* it just now, or lost some."""
        if self.ledger.observe_held((tenant, session), node, tokens, used=used, now=now):
            self.changed = True

    def event(self, event: SessionEvent, *, tenant: str = "", now: float) -> None:
        """Learn from the side channel; events of unknown sessions are ignored."""
        key = (tenant, event.session)
        session = self.ledger.sessions.get(key)
        if session is None:
            return
        session.seen = now
        self.readiness.event(event, tenant=tenant, now=now)
        if event.final:
            self.ledger.finish_session(key)
        self.changed = True

    def renew(self, key: str, *, now: float) -> None:
        """A running request shows life."""
        self.ledger.renew(key, now=now)

    def expire(self, *, now: float) -> list[str]:
        """Drop what outlived its lease; return the requests that were released."""
        late = self.ledger.expire(now=now)
        self.changed = self.changed or bool(late)
        return late

    # ---- decisions -------------------------------------------------------------------------

    def snapshot(self, *, now: float) -> Snapshot | None:
        """Return what a decision needs, None when nothing could be let in; forget the change."""
        self.changed = False
        if not self.waiting:
            return None
        rooms = self._rooms()
        if not self._any_fits(rooms):
            return None
        if now < self._joint and not self._any_fits(beside(rooms, self._kept(now=now))):
            return None  # somebody would have to lose a kept room: weighed at intervals
        gaps = self._gaps(now=now)
        self._joint = now + self.settings.joint_s
        most = self.settings.admission.max_pool
        held = sorted(self.waiting.values(), key=lambda w: (w.arrived, w.turn.key))[:most]
        candidates = [self._waiting(w, now=now) for w in held]
        gaps.sort(key=lambda c: (-max(c.credits.values()), c.key))
        candidates += gaps[: most - len(candidates)]
        return Snapshot(
            now=now,
            candidates=tuple(candidates),
            rooms=tuple(rooms),
            reserved=tuple(sorted(self.reserved.items())),
            settings=self.settings,
        )

    def apply(self, plan: Plan, *, now: float) -> Applied:
        """Start what the plan places and the present still allows; report the rest as dropped."""
        placements: list[Placement] = []
        dropped: list[tuple[str, str]] = []
        for placement in plan.placements:
            reason = self._objection(placement)
            if reason is not None:
                dropped.append((placement.key, reason))
                continue
            turn = self.waiting.pop(placement.key).turn
            self.reserved.pop(placement.key, None)
            forced = placement.key in plan.forced
            self._book(turn, placement.node, forced=forced, now=now)
            placements.append(placement)
        kept = {p.key for p in plan.kept}
        for session in self.ledger.gaps.values():
            session.state = SessionState.TOOL if _gap_key(session) in kept else SessionState.PAUSED
        self.reserved = {k: n for k, n in plan.reserved.items() if k in self.waiting}
        if dropped:
            self.changed = True
        return Applied(placements=tuple(placements), dropped=tuple(dropped))

    def resume(self, key: str, *, now: float) -> Placement | None:
        """
        Start a request at once where no decision is needed; None: it waits for one.

        That is when its session kept its room, or when nobody else waits and it fits beside every
        kept room: a decision over one request and nobody's loss would say the same.
        """
        held = self.waiting.get(key)
        if held is None or self.reserved:
            return None
        if len(self.waiting) > 1 and not held.kept:
            return None
        turn = held.turn
        candidate = self._waiting(held, now=now)
        origin = candidate.origin
        kept = held.kept and origin is not None and candidate.credits.get(origin, 0) > 0
        held.kept = False
        if not kept and len(self.waiting) > 1:
            return None
        home = origin if kept else None
        rooms = beside(self._rooms(home), self._kept(now=now), idle=True)
        fitting = [
            room
            for room in rooms
            if room.slots > 0
            and turn.tokens <= room.tokens
            and (candidate.nodes is None or room.node in candidate.nodes)
            and (candidate.homes is None or room.node in candidate.homes)
        ]
        if not fitting:
            return None
        node = best_room(candidate, fitting, self._evaluator)
        del self.waiting[key]
        self._book(turn, node, now=now)
        return Placement(
            key=key, session=turn.session, node=node, credit=candidate.credits.get(node, 0)
        )

    def step(self, *, now: float) -> Applied:
        """Decide and apply at once, for drivers without a worker."""
        snapshot = self.snapshot(now=now)
        if snapshot is None:
            return Applied(placements=(), dropped=())
        return self.apply(make_plan(snapshot), now=now)

    def view(self, *, now: float) -> list[dict[str, object]]:
        """Return the sessions for the admin view."""
        return [
            {
                "tenant": s.id[0],
                "session": s.id[1],
                "state": s.state.value,
                "origin": s.origin,
                "footprint": s.footprint,
                "credit": self.ledger.credits(s, now=now),
                "turns": s.turns,
                "moves": s.moves,
                "waiting": len(s.waiting),
                "running": len(s.running),
                "silent_s": round(now - s.seen, 3),
            }
            for s in self.ledger.sessions.values()
        ]

    # ---- inside ----------------------------------------------------------------------------

    def _waiting(self, held: _Waiting, *, now: float) -> Candidate:
        turn = held.turn
        session = self.ledger.sessions[turn.tenant, turn.session]
        if held.cold is not None and held.cold[0] == session.version:
            return held.cold[1]
        credits = self.ledger.credits(session, now=now)
        homes = frozenset(
            name
            for name, k in credits.items()
            if k >= self.settings.origin_share * turn.tokens
            and not self.ledger.nodes[name].draining
            and name not in turn.avoid
        )
        nodes = turn.nodes
        if turn.avoid:
            up = {n.name for n in self.ledger.nodes.values() if n.up and not n.draining}
            others = (up if nodes is None else nodes & up) - turn.avoid
            nodes = frozenset(others) or nodes
        candidate = Candidate(
            key=turn.key,
            session=turn.session,
            tenant=turn.tenant,
            footprint=max(1, turn.tokens - turn.prefix_tokens),
            prefix=turn.prefix,
            prefix_tokens=turn.prefix_tokens,
            arrived=held.arrived,
            credits=credits,
            nodes=nodes,
            homes=homes or None,
            origin=session.origin,
            turns=session.turns,
            attained=session.attained,
            expected=max(0, turn.tokens - max(credits.values(), default=0)),
        )
        if not credits and not turn.avoid:
            held.cold = session.version, candidate  # credit only fades: it stays what it is
        return candidate

    def _kept(self, *, now: float) -> dict[str, int]:
        """Return node -> tokens of the rooms that gaps keep there."""
        taken: dict[str, int] = {}
        for session in self.ledger.gaps.values():
            if session.origin is not None:
                k = self.ledger.credit_on(session, session.origin, now=now)
                if k and not self.ledger.nodes[session.origin].draining:
                    taken[session.origin] = taken.get(session.origin, 0) + k
        return taken

    def _gaps(self, *, now: float) -> list[Candidate]:
        """Return the candidates that gaps are; those that hold nothing any more are let go."""
        found: list[Candidate] = []
        for key, session in list(self.ledger.gaps.items()):
            gap = self._gap(session, now=now)
            if gap is not None:
                found.append(gap)
            elif not self.ledger.credits(session, now=now):
                session.state = SessionState.PAUSED
                del self.ledger.gaps[key]
        return found

    def _gap(self, session: Session, *, now: float) -> Candidate | None:
        """Return the candidate that a session in a gap is; None: it holds nothing any more."""
        if session.origin is None:
            return None
        k = self.ledger.credit_on(session, session.origin, now=now)
        if k <= 0 or self.ledger.nodes[session.origin].draining:
            return None
        tenant, name = session.id
        ready = False
        if self.settings.use_readiness:
            forecast = self.readiness.assess(name, tenant=tenant, now=now)
            ready = forecast is not None and forecast.ready
        return Candidate(
            key=_gap_key(session),
            session=name,
            tenant=tenant,
            footprint=k,
            waiting=False,
            ready=ready,
            arrived=session.seen,
            credits={session.origin: k},
            nodes=frozenset((session.origin,)),
            turns=session.turns,
            attained=session.attained,
        )

    def _rooms(self, only: str | None = None) -> list[Room]:
        """Return what is left on nodes that take turns (on *only* one), beside what runs."""
        rooms = []
        resident: dict[str, int] = {}
        for session in self.ledger.gaps.values():
            if session.origin is not None:
                resident[session.origin] = resident.get(session.origin, 0) + 1
        for node in self.ledger.by_name():
            if not node.up or node.draining or (only is not None and node.name != only):
                continue
            tokens, requests = self.ledger.used(node.name)
            slots = node.slots - requests
            if node.pressed and requests:
                slots = 0
            rooms.append(
                Room(
                    node=node.name,
                    tokens=max(0, node.capacity - tokens),
                    slots=max(0, slots),
                    prefixes=self.ledger.prefixes(node.name),
                    running=requests,
                    capacity=node.capacity,
                    forced=self.ledger.forced(node.name),
                    resident=resident.get(node.name, 0),
                    served=node.served,
                )
            )
        return rooms

    def _book(self, turn: Turn, node: str, *, forced: bool = False, now: float) -> None:
        self.ledger.book(
            turn.key,
            self.ledger.session((turn.tenant, turn.session), now=now),
            node,
            tokens=max(1, turn.tokens - turn.prefix_tokens),
            prefix=turn.prefix,
            prefix_tokens=turn.prefix_tokens,
            forced=forced,
            now=now,
        )

    def _any_fits(self, rooms: Sequence[Room]) -> bool:
        """Whether any waiting request fits any node as it is now; cheap, and never wrongly no."""
        open_rooms = [room for room in rooms if room.slots > 0 and room.tokens > 0]
        if not open_rooms:
            return False
        most = max(room.tokens for room in open_rooms)
        whole = any(room.tokens >= room.capacity for room in open_rooms)
        return any(
            whole or held.turn.tokens - held.turn.prefix_tokens <= most
            for held in self.waiting.values()
        )

    def _objection(self, placement: Placement) -> str | None:
        """Return why a placement is void by now; None: it stands."""
        held = self.waiting.get(placement.key)
        if held is None:
            return "gone"
        node = self.ledger.nodes.get(placement.node)
        if node is None or not node.up or node.draining:
            return "node"
        tokens, requests = self.ledger.used(node.name)
        turn = held.turn
        need = turn.tokens
        if turn.prefix is not None and turn.prefix in self.ledger.prefixes(node.name):
            need -= turn.prefix_tokens
        if requests >= node.slots or tokens + min(need, node.capacity) > node.capacity:
            return "room"
        return None


def _gap_key(session: Session) -> str:
    return f"gap:{session.id[0]}:{session.id[1]}"
