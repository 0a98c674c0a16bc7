"""Tenants are told apart, and each has its budget."""

from hypothesis import given
from hypothesis import strategies as st

from scout_server.policy.budgets import Budget, EventBudget
from scout_server.tenancy import TenancySettings, tenant_of

PLAIN = TenancySettings()
PROXY = TenancySettings(tenant_header="X-Tenant")


def test_the_api_key_tells_tenants_apart():
    """
    Two keys are two tenants, one key is one, and the key itself is not kept.
    """
    one = tenant_of({"authorization": "Bearer secret-one"}, PLAIN)
    two = tenant_of({"authorization": "Bearer secret-two"}, PLAIN)

    assert one != two
    assert one == tenant_of({"authorization": "Bearer secret-one"}, PLAIN)
    assert "secret" not in one


def test_a_tenant_header_counts_only_when_it_is_trusted():
    """
    A client cannot choose its tenant by a header that no operator configured.
    """
    headers = {"x-tenant": "other", "authorization": "Bearer k"}

    assert tenant_of(headers, PLAIN) == tenant_of({"authorization": "Bearer k"}, PLAIN)
    assert tenant_of(headers, PROXY) != tenant_of(headers, PLAIN)


def test_a_key_cannot_pose_as_a_tenant_of_the_proxy():
    """
    The same text as a key and as a trusted name gives two tenants.
    """
    assert tenant_of({"x-tenant": "k"}, PROXY) != tenant_of({"authorization": "k"}, PROXY)


def test_no_credentials_are_one_tenant():
    """
    Without a key everybody shares the unnamed tenant.
    """
    assert tenant_of({}, PLAIN) == ""


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 500)), max_size=30))
def test_a_tenant_never_gets_more_than_its_rate_and_one_burst(asks):
    """
    Over any time span the events granted are at most the burst plus rate times the span.
    """
    budget = EventBudget(Budget(events_per_s=10))
    now, granted = 0.0, 0
    for pause, n in asks:
        now += pause
        got = budget.take("t", n, now=now)
        assert 0 <= got <= n
        granted += got
        assert granted <= 10 * EventBudget.BURST_S + 10 * now + 1e-6


def test_one_tenant_does_not_use_up_anothers_events():
    """
    Budgets are apart, and the table of tenants is bounded.
    """
    budget = EventBudget(Budget(events_per_s=1), max_tenants=2)

    assert budget.take("a", 100, now=0.0) == 10
    assert budget.take("b", 100, now=0.0) == 10
    assert budget.take("a", 1, now=0.0) == 0
    assert budget.take("c", 1, now=0.0) == 1
    assert len(budget._buckets) == 2
