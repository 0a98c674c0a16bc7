"""Requests of any sender become the same arrival, and nothing that they say can fail them."""

import pytest
from starlette.datastructures import Headers

from scout_sdk import HintOutcome, Hints, _wire
from scout_server.ingress import IngressSettings, RequestReader
from scout_server.ingress.crowding import _MAX_REMEMBERED, Crowding
from scout_server.priority import Polarity
from scout_server.tenancy import TenancySettings

OWN = Hints(session="s", agent="planner")


def reader(**more):
    values = {"max_agents": 100, "max_sessions": 100, "tenancy": TenancySettings()} | more
    tenancy = values.pop("tenancy")
    return RequestReader(values.pop("settings", IngressSettings()), tenancy, **values)


def test_own_headers_win_and_foreign_ones_fill_the_gaps():
    """
    A field of ours stays; what only another client's header says is added, and both are reported.
    """
    headers = {**_wire.encode(OWN), "x-dynamo-parent-session-id": "p", "thread-id": "other"}
    arrival = reader().read(headers, {"prompt_cache_key": "k"})

    assert arrival.hints == Hints(session="s", agent="planner", parent="p", anchor="k")
    assert arrival.outcomes["parent"] is HintOutcome.ACCEPTED
    assert arrival.outcomes["session"] is HintOutcome.ACCEPTED


def test_the_form_of_the_headers_does_not_matter():
    """
    A mapping, raw ASGI pairs and Starlette's headers give one and the same arrival.
    """
    plain = {**_wire.encode(OWN), "authorization": "Bearer k", "baggage": "session.id=b"}
    raw = [(name.upper().encode(), value.encode()) for name, value in plain.items()]
    read = reader().read

    assert read(plain) == read(raw) == read(Headers(raw=raw))


def test_foreign_hints_can_be_switched_off():
    """
    Without them only our own headers count.
    """
    read = reader(settings=IngressSettings(foreign_hints=False)).read

    assert read({"thread-id": "t"}, {"prompt_cache_key": "k"}).hints is None


def test_what_a_server_does_not_use_is_reported_as_ignored():
    """
    A priority is accepted only where the server has an order to put it into.
    """
    body = {"nvext": {"agent_hints": {"priority": 5, "osl": 10}}}
    plain = reader().read({}, body)
    using = reader(uses=frozenset({"priority"})).read({}, body)

    assert plain.outcomes["priority"] is HintOutcome.IGNORED
    assert using.outcomes["priority"] is HintOutcome.ACCEPTED
    assert using.outcomes["expected_output_tokens"] is HintOutcome.IGNORED
    assert using.priority is not None
    assert using.priority.as_(Polarity.LOW_FIRST) == -5
    assert using.expected_output_tokens == 10


def test_an_engine_without_scout_ignores_everything_but_the_tenant():
    """
    Every outcome that said `used` says `ignored`; what was rejected stays rejected.
    """
    headers = {**_wire.encode(OWN), "x-scout-turn": "no", "authorization": "k"}
    arrival = reader().read(headers)
    ignored = arrival.ignored()

    assert ignored.hints is None
    assert ignored.tenant == arrival.tenant != ""
    assert ignored.outcomes["session"] is HintOutcome.IGNORED
    assert ignored.outcomes["turn"] is HintOutcome.REJECTED


def test_a_repeated_trusted_header_names_no_tenant_of_either_value():
    """
    A client that sets the proxy's header too gets neither its own choice nor the proxy's tenant.
    """
    read = reader(tenancy=TenancySettings(tenant_header="X-Tenant"))
    one, two = [(b"x-tenant", b"victim")], [(b"x-tenant", b"mallory")]

    both = read.tenant([*one, *two])
    assert both not in (read.tenant(one), read.tenant(two), "")
    assert read.tenant([*one, *one]) == read.tenant(one)


def test_identities_over_the_budget_are_clipped():
    """
    The third agent of a tenant with room for two displaces one; another tenant's are not counted.
    """
    read = reader(max_agents=2, max_sessions=100).read
    for tenant in ("a", "b"):
        for agent in ("x", "y", "x"):
            headers = {**_wire.encode(Hints(agent=agent)), "authorization": tenant}
            assert read(headers).outcomes["agent"] is HintOutcome.ACCEPTED
    third = {**_wire.encode(Hints(agent="z")), "authorization": "a"}

    assert read(third).outcomes["agent"] is HintOutcome.CLIPPED
    assert read(third).outcomes["agent"] is HintOutcome.ACCEPTED
    gone = {**_wire.encode(Hints(agent="y")), "authorization": "a"}
    assert read(gone).outcomes["agent"] is HintOutcome.CLIPPED


def test_names_of_all_tenants_together_are_bounded():
    """
    However many tenants name however many sessions, a bounded number of hashes is kept.
    """
    crowding = Crowding(max_agents=10, max_sessions=60)
    for tenant in range(1200):
        for session in range(70):
            crowding.note(str(tenant), Hints(session=str(session)))
    kept = sum(len(names) for names in crowding._tenants.values())

    assert kept == crowding._size <= _MAX_REMEMBERED


class _Broken(dict):
    def get(self, *args):
        raise RuntimeError("broken")


def test_a_fault_in_reading_others_keeps_our_own_hints(caplog):
    """
    Whatever goes wrong with the body, our headers count and the fault is logged once.
    """
    read = reader().read
    for _ in range(2):
        arrival = read(_wire.encode(OWN), _Broken(a=1))
        assert arrival.hints == OWN
        assert arrival.outcomes["session"] is HintOutcome.ACCEPTED
    assert len([r for r in caplog.records if r.name == "scout"]) == 1


@pytest.mark.parametrize("body", [None, {}])
def test_a_request_that_says_nothing_is_nobody(body):
    """
    No credentials, no hints: the unnamed tenant, no outcome.
    """
    arrival = reader().read({}, body)

    assert (arrival.tenant, arrival.hints, dict(arrival.outcomes)) == ("", None, {})
