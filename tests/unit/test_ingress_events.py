"""Messages of the side channel within their tenant's budget."""

import pytest

from scout_sdk import SessionEvent, ToolEvent, ToolState, _wire
from scout_server.ingress import EventDesk, IngressSettings


def message(n, session="s"):
    tool = ToolEvent(name="t", state=ToolState.STARTED)
    return _wire.encode_events([SessionEvent(session=f"{session}{i}", tool=tool) for i in range(n)])


def test_a_message_within_the_budget_is_taken_whole():
    """
    Every event counts, in the message's order, and the answer says 202.
    """
    taken = EventDesk(IngressSettings()).take(message(3), "t", now=0.0)

    assert [event.session for event in taken.events] == ["s0", "s1", "s2"]
    assert taken.answer() == {"accepted": 3, "rejected": 0}
    assert taken.status == 202


def test_over_the_budget_the_newest_events_are_kept():
    """
    Ten seconds' worth may come at once; the rest is clipped and said, and comes back with time.
    """
    desk = EventDesk(IngressSettings(events_per_s=1))
    taken = desk.take(message(12), "t", now=0.0)

    assert [event.session for event in taken.events] == [f"s{i}" for i in range(2, 12)]
    assert taken.answer() == {"accepted": 10, "rejected": 0, "clipped": 2}
    again = desk.take(message(1), "t", now=0.5)
    assert (again.answer()["clipped"], again.status) == (1, 202)
    assert desk.take(message(1), "t", now=1.5).answer()["accepted"] == 1


def test_a_tenant_does_not_pay_for_another():
    """
    One tenant over its budget leaves the others theirs.
    """
    desk = EventDesk(IngressSettings(events_per_s=1))
    desk.take(message(200), "loud", now=0.0)

    assert desk.take(message(10), "quiet", now=0.0).clipped == 0


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"version": 1, "events": [{}]}'])
def test_what_is_no_message_costs_nothing(body):
    """
    It is rejected with 400 and books nothing.
    """
    desk = EventDesk(IngressSettings(events_per_s=1))
    taken = desk.take(body, "t", now=0.0)

    assert (taken.events, taken.rejected, taken.status) == ((), 1, 400)
    assert desk.take(message(10), "t", now=0.0).clipped == 0
