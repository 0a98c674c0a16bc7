"""The one method that API servers may call in an engine's process."""

import json

from scout_sdk import _wire
from scout_server.policy import Finish
from scout_server.vllm.bridge import Bridge

__all__ = ["answer"]


def answer(scheduler: object, operation: str, argument: str) -> str:
    """
    Answer an API server, as JSON: `state`, `events` with the side channel's message, or `warm`,
    which starts a warm-up where one is worth it and says in how many seconds to ask again.

    `endings` tells how responses ended, `key` with what an API server seals its requests. Runs
    between two steps of the engine, in the scheduler's thread.
    """
    bridge = getattr(scheduler, "scout", None)
    if not isinstance(bridge, Bridge):
        problems = getattr(scheduler, "scout_problems", ()) or ("another scheduler runs",)
        return json.dumps({"mode": "stock", "problems": list(problems)})
    if operation == "events":
        tenant, _, body = argument.partition("\n")
        events, rejected = _wire.decode_events(body.encode())
        for event in events:
            bridge.event(event, tenant=tenant)
        bridge.events["rejected"] += rejected
        return json.dumps({"accepted": len(events), "rejected": rejected})
    if operation == "endings":
        endings = json.loads(argument)
        for ending in endings:
            tools = tuple((name, seconds) for name, seconds in ending["tools"])
            bridge.ending(ending["call"], Finish(ending["finish"]), tools)
        return json.dumps({"heard": len(endings)})
    if operation == "key":
        bridge.seals.add(bytes.fromhex(argument))
        return json.dumps({"heard": 1})
    if operation == "state":
        return json.dumps(bridge.state())
    if operation == "warm":
        return json.dumps({"next_s": bridge.prefetch.poke() if bridge.prefetch else None})
    known = "events, state, warm, endings, key"
    return json.dumps({"error": f"unknown operation {operation[:40]!r}; known: {known}"})
