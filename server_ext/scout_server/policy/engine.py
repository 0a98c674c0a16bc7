"""TAO without I/O: requests come in, placements come out. Gateway, Ray and simulator drive it."""

from collections import OrderedDict
from collections.abc import Sequence

from scout_sdk._hints import SessionEvent
from scout_server.policy.admission import Plan, best_room
from scout_server.policy.books import SessionState
from scout_server.policy.discretise import cold
from scout_server.policy.evaluators import evaluator
from scout_server.policy.ledger import Ledger
from scout_server.policy.offers import Held, Offers, gap_key
from scout_server.policy.placement import Placement
from scout_server.policy.readiness import Readiness
from scout_server.policy.turns import (
    UNNAMED,
    Applied,
    Snapshot,
    TaoSettings,
    Turn,
    beside,
    make_plan,
    with_named_prefix,
)

__all__ = ["Applied", "Snapshot", "TaoEngine", "TaoSettings", "Turn", "make_plan"]


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
        self._offers = Offers(self.ledger, self.readiness, self.settings)
        self.waiting: OrderedDict[str, Held] = OrderedDict()
        self.reserved: dict[str, str] = {}
        self._joint = 0.0
        """When kept rooms are weighed again."""
        self._fresh: list[str] = []
        """Requests that came since the last look at all of them, which found none that fits."""
        self._moved = True
        """Something besides new requests changed since then."""
        self._gave = ("", 0)
        """The request whose coming was all that changed, and the room that it gave up."""
        self._look = 0.0
        """When all are looked at again, because credit fades."""
        self.changed = False
        """True when something happened since the last snapshot that may let a request in."""

    def configure(self, settings: TaoSettings) -> None:
        """Take other settings from the next decision on; ConfigError leaves the old ones."""
        judge = evaluator(settings.evaluator, settings.objective)
        make_plan(Snapshot(now=0, candidates=(), rooms=(), reserved=(), settings=settings))
        self.settings, self._offers.settings, self._evaluator = settings, settings, judge
        self.ledger.settings = settings.ledger
        self.ledger.credit_settings = settings.credit
        self.readiness.settings = settings.readiness
        for held in self.waiting.values():
            held.cold = None
        self._move()

    # ---- facts -----------------------------------------------------------------------------

    def set_node(self, name: str, *, capacity: int, slots: int) -> None:
        """Add a node, change its size, or take it back after it was down."""
        node = self.ledger.set_node(name, capacity=capacity, slots=slots)
        node.up = True
        self._move()

    def drain_node(self, name: str, *, draining: bool = True) -> None:
        """Stop (or resume) sending new turns to a node; those that run there go on."""
        node = self.ledger.nodes.get(name)
        if node is not None:
            node.draining = draining
            self._move()

    def press_node(self, name: str, *, pressed: bool) -> None:
        """Say whether the engine makes requests wait by itself."""
        node = self.ledger.nodes.get(name)
        if node is not None and node.pressed != pressed:
            node.pressed = pressed
            self._move()

    def lose_node(self, name: str, *, forget: bool = False) -> list[str]:
        """A node died, or was taken out (*forget*); return the requests that ran there."""
        self._move()
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
        self._fresh.append(turn.key)
        if not self._moved and (booking is not None or session.id in self.ledger.gaps):
            _, room = self.ledger.gap_room(session, now=now)
            self._moved, self._gave = True, (turn.key, room)
        self.waiting[turn.key] = Held(turn, session, arrived, kept)
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
        if held is not None:
            self._never_ran(held.session.id, now=now)
        elif released is not None:
            self._never_ran(released.session, now=now)
        else:
            return False
        self._move()
        return True

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
        self._move()
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
            self._move()

    def concerned(self, event: SessionEvent, *, tenant: str = "") -> tuple[str, ...]:
        """
        Return the nodes that an event should be told to.

        The end of a session concerns every node that still holds something of it, the rest the one
        where it goes on. Of a session that is unknown here any node may know.
        """
        session = self.ledger.sessions.get((tenant, event.session))
        if session is None:
            return tuple(n.name for n in self.ledger.by_name() if n.up)
        names = {session.origin, *(session.residues if event.final else ())}
        return tuple(sorted(name for name in names if name is not None))

    def event(self, event: SessionEvent, *, tenant: str = "", now: float) -> None:
        """Learn from the side channel; events of unknown sessions are ignored."""
        key = (tenant, event.session)
        session = self.ledger.sessions.get(key)
        if session is None:
            return
        session.seen = now
        self.readiness.event(event, tenant=tenant, now=now)
        self.changed = True
        if event.final:
            self.ledger.finish_session(key)
            self._move()

    def renew(self, key: str, *, now: float) -> None:
        """A running request shows life."""
        self.ledger.renew(key, now=now)

    def expire(self, *, now: float) -> list[str]:
        """Drop what outlived its lease; return the requests that were released."""
        late = self.ledger.expire(now=now)
        if late:
            self._move()
        return late

    # ---- decisions -------------------------------------------------------------------------

    def snapshot(self, *, now: float) -> Snapshot | None:
        """Return what a decision needs, None when nothing could be let in; forget the change."""
        self.changed = False
        if not self._decidable(now=now):
            return None
        rooms = self._offers.rooms(now=now)
        gaps = self._offers.gaps(now=now)
        self._joint = now + self.settings.joint_s
        most = self.settings.admission.max_pool
        held = sorted(self.waiting.values(), key=lambda w: (w.arrived, w.turn.key))[:most]
        candidates = [self._offers.waiting(w, now=now) for w in held]
        gaps.sort(key=lambda c: (-max(c.credits.values()), c.key))
        candidates += gaps[: most - len(candidates)]
        return Snapshot(
            now=now,
            candidates=tuple(candidates),
            rooms=tuple(rooms),
            reserved=tuple(sorted(self.reserved.items())),
            settings=self.settings,
        )

    def _decidable(self, *, now: float) -> bool:
        """Whether a decision could let anybody in; after a no, only what is new is looked at."""
        everybody = self._moved or now >= self._look
        looked = (
            list(self.waiting.values())
            if everybody
            else [self.waiting[key] for key in self._fresh if key in self.waiting]
        )
        self._fresh.clear()
        if not looked:
            return False
        rooms = self._offers.rooms(now=now)
        # Who fits only where a kept room would be lost is weighed at intervals.
        if now < self._joint:
            rooms = beside(rooms, self._offers.kept(now=now))
        self._gave = ("", 0)
        self._moved = self._offers.any_fits(looked, rooms, now=now)
        if everybody:
            self._look = now + self.settings.joint_s
        return self._moved

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
            session.state = SessionState.TOOL if gap_key(session) in kept else SessionState.PAUSED
        self.reserved = {k: n for k, n in plan.reserved.items() if k in self.waiting}
        if dropped:
            self._move()
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
        candidate = self._offers.waiting(held, now=now)
        origin = candidate.origin
        kept = held.kept and origin is not None and candidate.credits.get(origin, 0) > 0
        held.kept = False
        if not kept and len(self.waiting) > 1:
            return None
        home = origin if kept else None
        kept_rooms = self._offers.kept(home, now=now)
        rooms = beside(self._offers.rooms(home, now=now), kept_rooms, idle=True)
        fitting = [
            room
            for room in rooms
            if room.slots > 0
            and turn.tokens + (room.reserve if cold(candidate, room) else 0) <= room.tokens
            and (candidate.nodes is None or room.node in candidate.nodes)
            and (candidate.homes is None or room.node in candidate.homes)
        ]
        if not fitting:
            return None
        node = home or best_room(candidate, fitting, self._evaluator)
        del self.waiting[key]
        self._book(turn, node, now=now)
        if self._gave[0] == key and home is not None and turn.tokens >= self._gave[1]:
            self._moved = False  # it took back what it gave up
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

    def _never_ran(self, key: tuple[str, str], *, now: float) -> None:
        """Forget a session whose only requests ended early: of one without a name none returns."""
        session = self.ledger.sessions.get(key)
        if session is None or session.turns or session.waiting or session.running:
            return
        if session.origin is None or key[1].startswith(UNNAMED):
            self.readiness.forget(key[1], tenant=key[0], now=now)
            self.ledger.finish_session(key)

    def _move(self) -> None:
        """Something changed that may let any request in."""
        self.changed = self._moved = True
        self._gave = ("", 0)

    def _book(self, turn: Turn, node: str, *, forced: bool = False, now: float) -> None:
        self.ledger.book(
            turn.key,
            self.ledger.session((turn.tenant, turn.session), now=now),
            node,
            tokens=max(1, turn.tokens - turn.prefix_tokens),
            prefix=turn.prefix,
            prefix_tokens=turn.prefix_tokens,
            forced=forced,
            beside=turn.beside_tokens,
            now=now,
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
