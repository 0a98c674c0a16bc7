"""What the gateway tells nodes between requests."""

import asyncio
import json

from scout_sdk import SessionEvent, ToolEvent, ToolState
from scout_sdk.testing import FakeClock
from scout_server.gateway.posts import Posts


def test_times_of_events_that_wait_move_on() -> None:
    """An event that waited for the message before it says what remains when it is sent."""
    clock = FakeClock()
    free, bodies = asyncio.Event(), []

    async def send(url, body, headers):
        bodies.append(json.loads(body)["events"])
        await free.wait()

    async def told() -> None:
        posts = Posts(send, clock=clock)
        tool = ToolEvent(name="t", state=ToolState.STARTED, elapsed_s=0.0, remaining_s=5.0)
        posts.put("http://node", [SessionEvent(session="s")], {}, tenant="")
        await asyncio.sleep(0)
        posts.put("http://node", [SessionEvent(session="s", tool=tool)], {}, tenant="")
        clock.advance(2.0)
        free.set()
        await asyncio.sleep(0.01)
        await posts.stop()

    asyncio.run(told())
    (late,) = bodies[1]
    assert (2.0, 2.0, 3.0) == (
        late["age_s"],
        late["tool"]["elapsed_s"],
        late["tool"]["remaining_s"],
    )
