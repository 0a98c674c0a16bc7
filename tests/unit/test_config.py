import json

import pytest

from scout_sdk import ConfigError
from scout_server.config import SECTIONS, describe, load, merge
from scout_server.policy.runtime import PolicySettings


@pytest.fixture(autouse=True)
def _no_file(monkeypatch):
    monkeypatch.delenv("SCOUT_CONFIG", raising=False)


def test_defaults():
    """
    With nothing set, every section has its dataclass's defaults.
    """
    assert PolicySettings() == load().of(PolicySettings)


def test_values_win_over_the_file(tmp_path, monkeypatch):
    """
    Values given by the caller win key by key over the file that SCOUT_CONFIG names.
    """
    file = tmp_path / "scout.yaml"
    file.write_text("policy: {max_agents: 7, max_sessions: 9}\n")
    monkeypatch.setenv("SCOUT_CONFIG", str(file))

    policy = load({"policy": {"max_agents": 8}}).of(PolicySettings)

    assert (8, 9) == (policy.max_agents, policy.max_sessions)


def test_json_file(tmp_path):
    """
    A `.json` file is read as JSON.
    """
    file = tmp_path / "scout.json"
    file.write_text(json.dumps({"policy": {"hints": False}}))

    assert load(path=file).of(PolicySettings).hints is False


def test_every_error_is_listed():
    """
    One error names every wrong value, unknown setting and unknown section, and what is allowed.
    """
    with pytest.raises(ConfigError) as caught:
        load({"policy": {"max_agents": 0, "max_sessions": "many", "hint": True}, "polcy": {}})

    message = str(caught.value)
    assert "4 error(s)" in message
    assert "policy.max_agents" in message
    assert "greater than or equal to 1, not 0" in message
    assert "policy.max_sessions" in message
    assert "not 'many'" in message
    assert "policy.hint: unknown setting; known: " in message
    assert "polcy: unknown section; known: policy" in message


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.yaml", "a: [", "is not YAML"),
        ("a.yaml", "- 1", "is a list, not a mapping"),
    ],
)
def test_unreadable_files(tmp_path, name, text, complaint):
    """
    A file that is not JSON, not YAML or not a mapping is a ConfigError that says so.
    """
    file = tmp_path / name
    file.write_text(text)

    with pytest.raises(ConfigError, match=complaint):
        load(path=file)


def test_missing_file(tmp_path):
    """
    A file that is not there is a ConfigError with its name.
    """
    with pytest.raises(ConfigError, match="nowhere"):
        load(path=tmp_path / "nowhere.yaml")


def test_every_setting_has_a_meaning_and_a_default_that_loads():
    """
    Every setting of every section has a documented meaning, and the defaults pass the schema.
    """
    listed = describe()
    document: dict[str, object] = {section.name: {} for section in SECTIONS}
    for info in listed:
        value: object = info.default
        for name in reversed([info.section, *info.name.split(".")]):
            value = {name: value}
        document = merge(document, value)

    undocumented = [f"{info.section}.{info.name}" for info in listed if not info.meaning]
    assert [] == undocumented
    assert load().as_dict() == load(document).as_dict()


def test_unknown_settings_of_a_group():
    """
    An unknown setting within a group is answered with the settings of that group.
    """
    with pytest.raises(ConfigError, match=r"gateway\.tao\.search\.beam: .*beam_width"):
        load({"gateway": {"tao": {"search": {"beam": 1}}}})
