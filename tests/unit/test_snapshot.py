"""Learnt state survives a restart, and damage does not spread."""

import logging

import pytest

from scout_server import snapshot


def test_what_was_saved_is_loaded(tmp_path):
    """
    A state comes back as it was, also after it was saved twice.
    """
    path = tmp_path / "deep" / "state.json"
    snapshot.save(path, {"version": 1, "counts": [1, 2]})
    snapshot.save(path, {"version": 1, "counts": [3]})

    assert snapshot.load(path) == {"version": 1, "counts": [3]}
    assert [entry.name for entry in path.parent.iterdir()] == ["state.json"]


def test_no_file_is_no_state(tmp_path):
    """
    A first start has nothing to load and says nothing.
    """
    assert snapshot.load(tmp_path / "none.json") is None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"state": {}}',
        b'{"scout_snapshot": 9, "state": {}}',
        b"[" * 9000,
    ],
)
def test_a_damaged_file_is_set_aside_with_a_message(tmp_path, caplog, raw):
    """
    Damage costs the learnt state and nothing else; the file stays for a look.
    """
    path = tmp_path / "state.json"
    path.write_bytes(raw)

    with caplog.at_level(logging.WARNING, logger="scout"):
        assert snapshot.load(path) is None

    assert not path.exists()
    assert (tmp_path / "state.json.damaged").read_bytes() == raw
    assert "set aside" in caplog.text


def test_a_failed_save_keeps_the_old_state(tmp_path):
    """
    A state that is not JSON leaves the file as it was and no rubbish beside it.
    """
    path = tmp_path / "state.json"
    snapshot.save(path, {"a": 1})

    with pytest.raises(TypeError):
        snapshot.save(path, {"a": object()})
    with pytest.raises(ValueError, match="JSON"):
        snapshot.save(path, {"a": float("nan")})

    assert snapshot.load(path) == {"a": 1}
    assert len(list(tmp_path.iterdir())) == 1
