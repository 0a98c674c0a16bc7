"""Who runs where, with how much room: nodes, sessions, bookings and their leases."""

from collections import OrderedDict
from collections.abc import Iterator

from scout_server.policy.books import Booking, LedgerSettings, Node, Session, SessionState, Tally
from scout_server.policy.credit import (
    CacheRate,
    CreditSettings,
    Residue,
    credit,
    initial_credit,
    kept_room,
)
from scout_server.policy.shelf import Shelf

__all__ = ["Ledger"]


_GROWTH_WEIGHT = 0.02
"""Weight of the latest turn in the average growth."""


class Ledger:
    """
    Books room for running requests; every booking ends by finish, cancel, node loss or lease.

    Sessions are found by (tenant, session). Those with nothing waiting or running are forgotten
    after `session_s`, the longest silent one first when there are too many. `now` never goes back.
    """

    def __init__(
        self,
        settings: LedgerSettings | None = None,
        credit_settings: CreditSettings | None = None,
    ) -> None:
        self.settings = settings or LedgerSettings()
        self.credit_settings = credit_settings or CreditSettings()
        self.nodes: dict[str, Node] = {}
        self.bookings: dict[str, Booking] = {}
        self.sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self.gaps: dict[tuple[str, str], Session] = {}
        """Sessions in a gap of which a node may still hold something."""
        self.growth = 0.0
        """Tokens by which a session's turns grow on average, learnt from those that ended."""
        self._grown = 0
        self._tallies: dict[str, Tally] = {}
        self._shelves: dict[str, Shelf] = {}

    # ---- nodes -----------------------------------------------------------------------------

    def set_node(self, name: str, *, capacity: int, slots: int) -> Node:
        """Add a node, or change its size; it is up and takes sessions."""
        node = self.nodes.get(name)
        if node is None:
            rate = CacheRate(self.credit_settings.rate_weight)
            node = self.nodes[name] = Node(name, capacity, slots, rate=rate)
        node.capacity, node.slots = capacity, slots
        return node

    def by_name(self) -> list[Node]:
        """Return the nodes in order of their names."""
        return [self.nodes[name] for name in sorted(self.nodes)]

    def lose_node(self, name: str, *, forget: bool = False) -> list[str]:
        """Mark a node as down (or *forget* it); return the requests that ran there, released."""
        node = self.nodes.get(name)
        if node is None:
            return []
        lost = [key for key, b in self.bookings.items() if b.node == name]
        for key in lost:
            self.release(key)
        for session in self.sessions.values():
            session.residues.pop(name, None)  # what was cached there is gone
            session.version += 1
            if session.origin == name:
                session.origin = None
        self._shelves.pop(name, None)
        node.up = False
        if forget:
            del self.nodes[name]
        return lost

    def used(self, name: str) -> tuple[int, int]:
        """Return (tokens, requests) booked on a node; a shared prefix counts once."""
        tally = self._tallies.get(name)
        if tally is None:
            return 0, 0
        return tally.tokens + sum(max(s) for s in tally.prefixes.values()), tally.requests

    def forced(self, name: str) -> bool:
        """Whether a request that was held too long runs on a node."""
        tally = self._tallies.get(name)
        return tally is not None and tally.forced > 0

    def prefixes(self, name: str) -> frozenset[str]:
        """Return the shared prefixes that running requests hold on a node."""
        tally = self._tallies.get(name)
        return frozenset() if tally is None else frozenset(tally.prefixes)

    # ---- sessions --------------------------------------------------------------------------

    def session(self, key: tuple[str, str], *, now: float) -> Session:
        """Return the session, a new one when it is unknown, and mark it as seen."""
        session = self.sessions.get(key)
        if session is None:
            if len(self.sessions) >= self.settings.max_sessions:
                self._forget_silent()
            session = self.sessions[key] = Session(key)
        session.seen = now
        self.sessions.move_to_end(key)
        return session

    def credit_on(self, session: Session, name: str, *, now: float) -> int:
        """Return what a node that is up still holds for a session."""
        residue, node = session.residues.get(name), self.nodes.get(name)
        if residue is None or node is None or not node.up:
            return 0
        k = credit(residue, self.credit_settings, now=now)
        return min(k, self._fits(session, residue, node)) if k > 0 else 0

    def _fits(self, session: Session, residue: Residue, node: Node) -> int:
        """Return the most that a node can still hold for a session, whatever its age."""
        runs = any(self.bookings[key].node == node.name for key in session.running)
        if runs or residue.told or not self.credit_settings.bounded:
            return residue.tokens
        shelf = self._shelves.get(node.name)
        if shelf is None:
            return 0
        return shelf.room(session.id, capacity=node.capacity, used=self.used(node.name)[0])

    def gap_room(self, session: Session, *, now: float) -> tuple[int, int]:
        """Return (credit, tokens of room) that a session in a gap keeps on its origin."""
        if session.origin is None:
            return 0, 0
        k = self.credit_on(session, session.origin, now=now)
        if k <= 0 or self.nodes[session.origin].draining:
            return 0, 0
        residue = session.residues[session.origin]
        return k, kept_room(residue, k, self.credit_settings, now=now)

    def credits(self, session: Session, *, now: float) -> dict[str, int]:
        """Return what each node that is up still holds for a session; zeros left out."""
        if not session.residues:
            return {}
        found = {
            name: k
            for name in session.residues
            if (k := self.credit_on(session, name, now=now)) > 0
        }
        return dict(sorted(found.items()))

    def finish_session(self, key: tuple[str, str]) -> None:
        """Forget a session that said it is done; its requests still in flight go on."""
        session = self.sessions.get(key)
        if session is None:
            return
        session.state = SessionState.FINISHED
        session.residues.clear()
        session.version += 1
        self.gaps.pop(key, None)
        if not session.waiting and not session.running:
            del self.sessions[key]

    # ---- bookings --------------------------------------------------------------------------

    def book(
        self,
        key: str,
        session: Session,
        node: str,
        *,
        tokens: int,
        prefix: str | None = None,
        prefix_tokens: int = 0,
        forced: bool = False,
        beside: int = 0,
        now: float,
    ) -> None:
        """Book room for a request that starts to run."""
        session.waiting.discard(key)
        session.running.add(key)
        if session.origin is not None and session.origin != node:
            session.moves += 1
        session.origin = node
        session.seen = now
        session.version += 1
        if (known := self.nodes.get(node)) is not None:
            known.served += 1
            known.pace.runs(now)
        self.bookings[key] = Booking(
            key,
            session.id,
            node,
            tokens,
            prefix,
            prefix_tokens,
            now,
            now + self.settings.lease_s,
            forced,
            beside,
        )
        self._shelf(node).take(session.id)
        tally = self._tallies.setdefault(node, Tally())
        tally.tokens += tokens
        tally.requests += 1
        tally.forced += forced
        if prefix is not None:
            tally.prefixes.setdefault(prefix, []).append(prefix_tokens)
        self.settle(session)

    def renew(self, key: str, *, now: float) -> None:
        """Prolong the lease of a running request that shows life; unknown keys are ignored."""
        booking = self.bookings.get(key)
        if booking is not None:
            booking.lease = now + self.settings.lease_s

    def release(self, key: str) -> Booking | None:
        """Give a request's room back and forget it; None when it has none."""
        booking = self._take_back(key)
        if booking is not None and not self.used(booking.node)[1]:
            node = self.nodes.get(booking.node)
            if node is not None:
                node.pace.stopped()
        return booking

    def finish(
        self,
        key: str,
        *,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
        cached_tokens: int | None = None,
        held_tokens: int | None = None,
        now: float,
    ) -> Booking | None:
        """Give a request's room back and remember what its node now holds for the session."""
        booking = self._take_back(key)
        if booking is None:
            return None
        session = self.sessions.get(booking.session)
        node = self.nodes.get(booking.node)
        if node is not None:
            computed = max(0, (prompt_tokens or 0) - (cached_tokens or 0)) + (output_tokens or 0)
            node.pace.ended(computed, now=now, idle=not self.used(node.name)[1])
        if node is not None and prompt_tokens is not None and cached_tokens is not None:
            follow_up = session is not None and session.turns > 0
            if follow_up or cached_tokens > 0:
                node.rate.observe(cached_tokens, prompt_tokens)
        if session is None:
            return booking
        own = booking.tokens - booking.beside
        if prompt_tokens is not None:
            own = prompt_tokens + (output_tokens or 0)
        tokens = own + booking.beside
        if session.turns:
            self._learn_growth(max(0, tokens - session.footprint))
        session.turns += 1
        session.version += 1
        session.footprint = tokens
        session.attained += max(0, own - (cached_tokens or 0))
        session.seen = now
        if booking.prefix is None:
            self._shelf(booking.node).put(session.id, tokens)
        if session.state is SessionState.FINISHED or node is None:
            return booking
        k0 = initial_credit(
            held_tokens=held_tokens,
            cached_tokens=cached_tokens,
            tokens=tokens,
            rate=node.rate.value,
            caches=self.credit_settings.trust_computed and bool(node.rate.value),
        )
        session.residues[booking.node] = Residue(k0, now, told=bool(held_tokens))
        if session.state is SessionState.TOOL and k0 > 0:
            self.gaps[session.id] = session
        return booking

    def observe_held(
        self, key: tuple[str, str], node: str, tokens: int, *, used: bool, now: float
    ) -> bool:
        """
        Take what a node itself says it holds for a session; False: one of them is unknown.

        *used*: the session just used it, so that its age begins anew.
        """
        session, known = self.sessions.get(key), self.nodes.get(node)
        if session is None or known is None or session.state is SessionState.FINISHED:
            return False
        old = session.residues.get(node)
        session.version += 1
        if tokens <= 0:
            session.residues.pop(node, None)
        elif used or old is None:
            session.residues[node] = Residue(tokens, now, told=True)
        else:
            session.residues[node] = Residue(min(tokens, old.tokens), old.seen, told=True)
        if session.state is SessionState.TOOL and tokens > 0 and session.origin == node:
            self.gaps[session.id] = session
        return True

    def expire(self, *, now: float) -> list[str]:
        """Release requests whose lease ran out and forget silent sessions; return the requests."""
        late = [key for key, b in self.bookings.items() if b.lease <= now]
        for key in late:
            self.release(key)
        for silent in list(self._silent(before=now - self.settings.session_s)):
            del self.sessions[silent]
            self.gaps.pop(silent, None)
        return late

    # ---- inside ----------------------------------------------------------------------------

    def _take_back(self, key: str) -> Booking | None:
        """Take a request out of all books; what it used is the last to be evicted."""
        booking = self.bookings.pop(key, None)
        if booking is not None:
            self._untally(booking)
            self._shelf(booking.node).put(booking.session, booking.tokens)
            session = self.sessions.get(booking.session)
            if session is not None:
                session.running.discard(key)
                self.settle(session)
        return booking

    def _shelf(self, node: str) -> Shelf:
        return self._shelves.setdefault(node, Shelf())

    def _learn_growth(self, tokens: int) -> None:
        self._grown += 1
        weight = max(_GROWTH_WEIGHT, 1 / self._grown)
        self.growth += weight * (tokens - self.growth)

    def _untally(self, booking: Booking) -> None:
        tally = self._tallies[booking.node]
        tally.tokens -= booking.tokens
        tally.requests -= 1
        tally.forced -= booking.forced
        if booking.prefix is not None:
            sizes = tally.prefixes[booking.prefix]
            sizes.remove(booking.prefix_tokens)
            if not sizes:
                del tally.prefixes[booking.prefix]
        if not tally.requests:
            del self._tallies[booking.node]

    def _silent(self, *, before: float) -> Iterator[tuple[str, str]]:
        for key, session in self.sessions.items():
            if session.seen > before:
                return
            if not session.waiting and not session.running:
                yield key

    def _forget_silent(self) -> None:
        for key, session in self.sessions.items():
            if not session.waiting and not session.running:
                del self.sessions[key]
                self.gaps.pop(key, None)
                return

    def settle(self, session: Session) -> None:
        """Derive a session's state from its requests."""
        if session.running:
            state = SessionState.RUNNING
        elif session.waiting:
            state = SessionState.WAITING
        else:
            state = SessionState.TOOL
        if session.state is SessionState.FINISHED:
            if state is SessionState.TOOL:
                self.sessions.pop(session.id, None)
            return
        session.state = state
        if state is not SessionState.TOOL:
            self.gaps.pop(session.id, None)
