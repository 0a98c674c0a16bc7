"""A log of a policy core's decisions, and its replay: the same facts must give the same victims."""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import pydantic

from scout_sdk._errors import ConfigError
from scout_sdk._hints import SessionEvent
from scout_server.policy import (
    UNHASHED,
    FinishFacts,
    PolicyCore,
    PolicySettings,
    RequestFacts,
)

__all__ = ["DecisionLog", "Parity", "load_log", "record", "replay"]

_REQUEST = pydantic.TypeAdapter(RequestFacts)
_FINISH = pydantic.TypeAdapter(FinishFacts)
_EVENT = pydantic.TypeAdapter(SessionEvent)
_CORE = ("arrive", "segments", "finish", "event", "tick")
_ORDER = (
    "append", "prepend", "extend", "remove", "discard_all", "pop", "set_score", "used",
)  # fmt: skip

Entry = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionLog:
    """What a core was told, in order, and what it took as victims."""

    settings: PolicySettings
    capacity_blocks: int
    block_tokens: int
    entries: list[Entry]

    def write(self, path: Path) -> None:
        """Write the log as JSON lines: first what it was made with, then one call a line."""
        head = {
            "scout_decisions": 1,
            "settings": asdict(self.settings),
            "capacity_blocks": self.capacity_blocks,
            "block_tokens": self.block_tokens,
        }
        with path.open("w", encoding="utf-8") as out:
            for line in (head, *self.entries):
                out.write(json.dumps(line, separators=(",", ":")) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """How a replay compared."""

    pops: int
    victims: int
    equal: int
    first_difference: str = ""

    @property
    def share(self) -> float:
        """Return the share of victims that were the same."""
        return self.equal / self.victims if self.victims else 1.0


def _hash(value: Hashable) -> object:
    return value if isinstance(value, int) else f"x{bytes(cast(bytes, value)).hex()}"


def record(core: PolicyCore) -> DecisionLog:
    """
    Log every call on *core* and its order from now on; the calls do what they did.

    What the core itself does with its order while it is called is not logged: the replay does it
    again. Start before the core is told anything but the free blocks of its pool.
    """
    entries: list[Entry] = [
        {"op": "append", "block": block, "group": UNHASHED} for block in core.order.lru()
    ]
    depth = 0

    def wrap(owner: object, name: str, note: Callable[..., Entry]) -> None:
        call = getattr(owner, name)

        def logged(*values: object, **named: object) -> object:
            nonlocal depth
            depth += 1
            try:
                result = call(*values, **named)
            finally:
                depth -= 1
            if not depth:
                entry = {"op": name, **note(*values, **named)}
                if name == "pop":
                    entry["out"] = list(result)
                entries.append(entry)
            return result

        setattr(owner, name, logged)

    wrap(core, "arrive", lambda facts, now: {"facts": _facts(facts), "now": now})
    wrap(
        core,
        "segments",
        lambda request_id, block_hashes: {
            "request": request_id,
            "hashes": [_hash(h) for h in block_hashes],
        },
    )
    wrap(
        core,
        "finish",
        lambda facts, now: {"facts": _FINISH.dump_python(facts, mode="json"), "now": now},
    )
    wrap(
        core,
        "event",
        lambda event, tenant="", *, now: {
            "event": _EVENT.dump_python(event, mode="json"),
            "tenant": tenant,
            "now": now,
        },
    )
    wrap(core, "tick", lambda now: {"now": now})
    for name in ("append", "prepend"):
        wrap(core.order, name, lambda block, group: {"block": block, "group": group})
    wrap(core.order, "extend", lambda blocks, group: {"blocks": list(blocks), "group": group})
    wrap(core.order, "remove", lambda block: {"block": block})
    wrap(core.order, "discard_all", lambda blocks: {"blocks": list(blocks)})
    wrap(core.order, "pop", lambda n, now: {"n": n, "now": now})
    wrap(core.order, "set_score", lambda group, score: {"group": group, "score": repr(score)})
    wrap(core.order, "used", lambda group: {"group": group})
    return DecisionLog(
        settings=core.settings,
        capacity_blocks=core.order.capacity,
        block_tokens=core.block_tokens,
        entries=entries,
    )


def _facts(facts: RequestFacts) -> object:
    raw = cast(dict[str, object], _REQUEST.dump_python(_plain(facts), mode="json"))
    raw["block_hashes"] = [_hash(h) for h in facts.block_hashes]
    return raw


def _plain(facts: RequestFacts) -> RequestFacts:
    return RequestFacts(
        request_id=facts.request_id,
        hints=facts.hints,
        block_hashes=(),
        prompt_tokens=facts.prompt_tokens,
        tenant=facts.tenant,
        warmup=facts.warmup,
    )


def load_log(path: Path) -> DecisionLog:
    """Read what `DecisionLog.write` wrote; ConfigError names file and line."""
    entries: list[Entry] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                entries.append(json.loads(line))
            except ValueError as error:
                msg = f"{path.name}:{number}: is not JSON: {error}"
                raise ConfigError(msg) from error
    if not entries or entries[0].get("scout_decisions") != 1:
        msg = f"{path.name}:1: scout_decisions must be 1"
        raise ConfigError(msg)
    head = entries.pop(0)
    settings = pydantic.TypeAdapter(PolicySettings).validate_python(head["settings"])
    return DecisionLog(
        settings=settings,
        capacity_blocks=cast(int, head["capacity_blocks"]),
        block_tokens=cast(int, head["block_tokens"]),
        entries=entries,
    )


def replay(log: DecisionLog, core: PolicyCore | None = None) -> Parity:
    """Tell a fresh core (or *core*) everything in *log*; compare every victim."""
    if core is None:
        core = PolicyCore(
            log.settings, capacity_blocks=log.capacity_blocks, block_tokens=log.block_tokens
        )
    pops = victims = equal = 0
    difference = ""
    for number, entry in enumerate(log.entries):
        taken = _apply(core, entry)
        if taken is None:
            continue
        wanted = cast(list[int], entry["out"])
        pops += 1
        victims += len(wanted)
        same = sum(1 for a, b in zip(taken, wanted, strict=True) if a == b)
        equal += same
        if same < len(wanted):
            difference = f"entry {number}: recorded {wanted[:8]}, replayed {taken[:8]}"
            # From here on the pools differ: what follows would say nothing.
            break
    return Parity(pops=pops, victims=victims, equal=equal, first_difference=difference)


def _hashes(raw: object) -> list[Hashable]:
    return list(cast(Sequence[Hashable], raw))


def _apply(core: PolicyCore, entry: Mapping[str, object]) -> list[int] | None:
    order = core.order
    now = cast(float, entry.get("now", 0.0))
    block, group = cast(int, entry.get("block", 0)), cast(int, entry.get("group", 0))
    match entry["op"]:
        case "pop":
            return order.pop(cast(int, entry["n"]), now=now)
        case "append":
            order.append(block, group)
        case "prepend":
            order.prepend(block, group)
        case "extend":
            order.extend(cast(list[int], entry["blocks"]), group)
        case "remove":
            order.remove(block)
        case "discard_all":
            order.discard_all(cast(list[int], entry["blocks"]))
        case "set_score":
            order.set_score(group, float(cast(str, entry["score"])))
        case "used":
            order.used(group)
        case "arrive":
            raw = dict(cast(Mapping[str, object], entry["facts"]))
            hashes = _hashes(raw.pop("block_hashes"))
            facts = _REQUEST.validate_python({**raw, "block_hashes": hashes})
            core.arrive(facts, now=now)
        case "segments":
            core.segments(cast(str, entry["request"]), _hashes(entry["hashes"]))
        case "finish":
            core.finish(_FINISH.validate_python(entry["facts"]), now=now)
        case "event":
            event = _EVENT.validate_python(entry["event"])
            core.event(event, tenant=cast(str, entry["tenant"]), now=now)
        case "tick":
            core.tick(now=now)
        case other:
            msg = f"unknown entry {other!r}; known: {', '.join((*_CORE, *_ORDER))}"
            raise ConfigError(msg)
    return None
