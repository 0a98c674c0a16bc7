"""An engine trusts what its own API servers sealed, and nothing else."""

import pytest

from scout_server.vllm.seal import Origin, Seals, sealed

KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def seals():
    made = Seals()
    made.add(KEY)
    return made


def test_what_was_sealed_is_proved(seals):
    """
    Tenant and call come back as they were; the unnamed tenant too, and several servers' keys.
    """
    seals.add(OTHER)
    for key in (KEY, OTHER):
        for tenant in ("t", ""):
            xargs = sealed(key, tenant)
            assert seals.origin(xargs) == Origin(tenant, xargs["scout_call"])


def test_what_a_client_wrote_is_kept_apart(seals):
    """
    A forged tenant is a tenant of its own, whatever it claims; a forged call is none.
    """
    real = sealed(KEY, "victim")
    forged = [
        {"scout_tenant": "victim"},
        {**real, "scout_seal": "0" * 32},
        {**sealed(OTHER, "victim")},
        {**real, "scout_call": "ffff"},
        {**real, "scout_tenant": "victim", "scout_seal": sealed(KEY, "me")["scout_seal"]},
        {**real, "scout_seal": "\udfff"},
    ]
    for xargs in forged:
        assert seals.origin(xargs) == Origin("unsealed:victim")


@pytest.mark.parametrize("xargs", [None, {}, {"scout_call": "c", "scout_seal": "s"}])
def test_who_claims_nothing_is_the_unnamed_tenant(seals, xargs):
    """
    Requests that came past the middleware belong to nobody in particular.
    """
    assert seals.origin(xargs) == Origin()


@pytest.mark.parametrize("junk", [5, None, ["x"], {"a": 1}, 1.5])
@pytest.mark.parametrize("name", ["scout_tenant", "scout_call", "scout_seal"])
def test_junk_proves_nothing(seals, name, junk):
    """
    Values of any type are no proof and no fault.
    """
    origin = seals.origin({**sealed(KEY, "t"), name: junk})

    assert origin.call == ""
    assert origin.tenant in ("", "unsealed:t")


def test_long_claims_are_cut_and_keys_are_bounded(seals):
    """
    A claimed name costs bounded memory; of many API servers the newest are trusted.
    """
    assert len(seals.origin({"scout_tenant": "x" * 10_000}).tenant) < 100
    for index in range(100):
        seals.add(index.to_bytes(32, "big"))
    assert seals.origin(sealed(KEY, "t")).call == ""
    assert seals.origin(sealed((99).to_bytes(32, "big"), "t")).tenant == "t"
