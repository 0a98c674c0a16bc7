"""Two engine cores in one process stand for two data-parallel ranks."""

import json
from typing import Any

import pytest

from scout_sdk import Evidence, Hints, SessionEvent, ToolEvent, ToolState, _wire

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def ranks(lab: Any, runner: Any) -> list[Any]:
    """Two schedulers; each has served a session of its own."""
    from scout_server.vllm import ScoutScheduler

    made = []
    for rank in range(2):
        ours = lab.scheduler(ScoutScheduler, blocks=50)
        xargs = dict(_wire.to_xargs(Hints(session=f"s{rank}", agent="coder")))
        ours.add_request(lab.request(ours, "r", list(range(5, 100)), xargs=xargs))
        runner(ours).drain()
        made.append(ours)
    return made


def tell(ranks: list[Any], event: SessionEvent, tenant: str = "") -> list[dict[str, Any]]:
    """Tell all ranks, as an API server does; return what each counted."""
    from scout_server.vllm.utility import answer

    message = f"{tenant}\n{_wire.encode_events([event]).decode()}"
    for rank in ranks:
        assert json.loads(answer(rank, "events", message)) == {"accepted": 1, "rejected": 0}
    return [json.loads(answer(rank, "state", ""))["events"] for rank in ranks]


def test_an_event_is_taken_by_the_rank_that_holds_the_session(ranks: list[Any]) -> None:
    """A tool of session s1: rank 1 expects it back in four seconds, rank 0 knows nothing of it."""
    tool = ToolEvent(
        name="shell", state=ToolState.STARTED, remaining_s=4.0, evidence=Evidence.SLEEP
    )
    counted = tell(ranks, SessionEvent(session="s1", tool=tool))
    assert [each.get("accepted", 0) for each in counted] == [0, 1]
    assert [each.get("unknown", 0) for each in counted] == [1, 0]
    sessions = [rank.scout.core.tenant("").sessions for rank in ranks]
    assert sessions[0].get("s1") is None
    promise = sessions[1].get("s1").promise
    assert promise is not None
    assert 3.9 < promise.back - promise.said < 4.1


def test_events_of_unknown_sessions_leave_nothing(ranks: list[Any]) -> None:
    """However many sessions and tenants are named, no rank remembers one of them."""
    for number in range(300):
        tell(ranks, SessionEvent(session=f"x{number}", final=True), tenant=f"t{number}")
    for rank in ranks:
        core = rank.scout.core
        assert list(core._tenants) == [""]
        assert len(core.tenant("").sessions) == 1


def test_the_end_of_a_session_is_the_end_on_its_rank_alone(ranks: list[Any]) -> None:
    """After `final` for s0, rank 0 has ended it and rank 1 still waits for s1."""
    tell(ranks, SessionEvent(session="s0", final=True))
    ended = [rank.scout.state()["core"]["sessions_ended"] for rank in ranks]
    assert ended == [1, 0]
