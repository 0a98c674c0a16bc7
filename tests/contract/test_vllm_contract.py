"""The names of vLLM that the extension stands on."""

import importlib.util
import os
from pathlib import Path

import pytest

from scout_server.vllm.contract import CONTRACT, Probe, supported, violations

SOURCES = "SCOUT_VLLM_SOURCES"
"""Folders of unpacked wheels (each with a `vllm` folder), separated like PATH."""


@pytest.mark.vllm
def test_the_installed_vllm_keeps_the_contract() -> None:
    """Every name and signature that we rely on is in the installed vLLM."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    assert violations(Path(spec.origin).parent) == []


@pytest.mark.skipif(not os.environ.get(SOURCES), reason=f"{SOURCES} is not set")
def test_unpacked_wheels_keep_the_contract() -> None:
    """Every name and signature that we rely on is in the sources of the wheels given."""
    for folder in os.environ[SOURCES].split(os.pathsep):
        assert violations(Path(folder) / "vllm") == [], folder


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.32.0", True),
        ("0.32.7+cpu", True),
        ("0.33.0rc1", True),
        ("0.31.9", False),
        ("0.34.0", False),
        ("0.320.0", False),
        ("1.32.0", False),
        ("", False),
    ],
)
def test_supported_versions(version: str, expected: bool) -> None:
    """Only the stated release series are supported, whatever their patch or local part."""
    assert supported(version) is expected


def test_violations_name_what_is_missing(tmp_path: Path) -> None:
    """A missing module, class, name and a changed signature are each named."""
    (tmp_path / "core.py").write_text(
        "class Pool:\n"
        "    def __init__(self, n):\n"
        "        self.blocks = local = n\n"
        "    def take(self, count, *, why=None): ...\n"
        "    @staticmethod\n"
        "    def check(n): ...\n"
    )
    kept = (
        Probe("core", "", "Pool"),
        Probe("core", "Pool", "blocks"),
        Probe("core", "Pool", "take", ("count",)),
        Probe("core", "Pool", "take"),
        Probe("core", "Pool", "check", ("n",)),
    )
    broken = (
        Probe("gone", "", "x"),
        Probe("core", "Queue", "x"),
        Probe("core", "Pool", "local"),
        Probe("core", "Pool", "take", ("number",)),
    )

    assert violations(tmp_path, kept) == []
    assert violations(tmp_path, broken) == [
        "vllm.gone is missing (needed: vllm.gone.x)",
        "class vllm.core.Queue is missing",
        "vllm.core.Pool.local is missing",
        "vllm.core.Pool.take(number) takes (count) instead",
    ]


def test_the_contract_has_no_duplicates() -> None:
    """Each name is probed once."""
    assert len({(p.module, p.owner, p.name) for p in CONTRACT}) == len(CONTRACT)
