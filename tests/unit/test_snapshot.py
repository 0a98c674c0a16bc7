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


class _Learner:
    def __init__(self, state=None):
        self.state = state or {"version": 1}

    def snapshot(self):
        return dict(self.state)

    def restore(self, state):
        if "bad" in state:
            raise ValueError("bad")
        self.state = dict(state)


def _written(keeper):
    if keeper._writer is not None:
        keeper._writer.join(10)


def test_a_keeper_writes_at_intervals_and_at_the_end(tmp_path):
    """
    Nothing is written before an interval has passed; the last word is what was known at the end.
    """
    path = tmp_path / "state.json"
    learner = _Learner()
    keeper = snapshot.Keeper(path, learner, interval_s=60, now=0.0)
    keeper.tick(now=59.0)
    assert not path.exists()
    learner.state = {"n": 1}
    keeper.tick(now=60.0)
    _written(keeper)
    assert snapshot.load(path) == {"n": 1}
    learner.state = {"n": 2}
    keeper.tick(now=119.0)
    _written(keeper)
    assert snapshot.load(path) == {"n": 1}
    keeper.close()
    assert snapshot.load(path) == {"n": 2}
    assert snapshot.Keeper(path, learner, interval_s=60, now=0.0).restored


def test_a_keeper_whose_file_cannot_be_written_says_it_once(tmp_path, caplog):
    """
    A full or forbidden disk is one line in the log, not a line a minute and not a fault.
    """
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    keeper = snapshot.Keeper(blocked / "state.json", _Learner(), interval_s=1, now=0.0)
    for minute in range(1, 4):
        keeper.tick(now=float(minute))
        _written(keeper)
    keeper.close()

    assert len([r for r in caplog.records if "cannot keep" in r.message]) == 1


def test_a_state_that_cannot_be_restored_is_set_aside(tmp_path):
    """
    The learner's refusal is damage like any other.
    """
    path = tmp_path / "state.json"
    snapshot.save(path, {"bad": 1})
    keeper = snapshot.Keeper(path, _Learner(), interval_s=60, now=0.0)

    assert not keeper.restored
    assert (tmp_path / "state.json.damaged").exists()


@pytest.mark.parametrize(("rank", "name"), [(0, "state.json"), (2, "state-rank2.json")])
def test_every_rank_has_a_file_of_its_own(tmp_path, rank, name):
    """
    Data-parallel ranks learn apart and are kept apart.
    """
    settings = snapshot.SnapshotSettings(state_file=str(tmp_path / "state.json"))
    snapshot.keeper_of(settings, _Learner(), now=0.0, rank=rank).close()

    assert (tmp_path / name).exists()
    assert snapshot.keeper_of(snapshot.SnapshotSettings(), _Learner(), now=0.0) is None
