import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _python(*args, path, cwd, check=True):
    env = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=check)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from this tree with what is installed."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), ROOT],
        check=True,
        capture_output=True,
    )
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """The wheel installed into a folder of its own, without what it depends on."""
    target = tmp_path_factory.mktemp("site")
    command = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([sys.executable, *command, str(target), str(wheel)], check=True)
    return target


def test_contents(wheel):
    """
    The wheel has the three packages, typed, the examples, the licence, and no tests.
    """
    names = set(zipfile.ZipFile(wheel).namelist())

    assert {
        "scout_sdk/py.typed",
        "scout_integrations/py.typed",
        "scout_server/py.typed",
        "scout_server/demo/examples/plain_openai.py",
    } <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert [] == [name for name in names if name.startswith(("tests/", "examples/"))]


def test_imports_without_any_dependency(site, tmp_path):
    """
    With no other package at all, the client imports, and `scout` says which extra it needs.
    """
    _python("-S", "-c", "import scout_sdk, scout_integrations", path=site, cwd=tmp_path)
    command = _python(
        "-S", "-m", "scout_server.cli", "--help", path=site, cwd=tmp_path, check=False
    )

    assert 1 == command.returncode
    assert "pip install 'scout-sdk[server]'" in command.stderr


def test_runs_elsewhere(site, tmp_path):
    """
    Installed elsewhere, the commands run, and the demo finds its examples in the package.
    """
    script = (
        "import scout_server.demo.workload as w; m = w.load_example('plain_openai');"
        "print(w.__file__); print(m.__file__)"
    )
    ours, example = _python("-c", script, path=site, cwd=tmp_path).stdout.split()
    shown = _python("-m", "scout_server.cli", "config", path=site, cwd=tmp_path).stdout

    assert Path(ours).is_relative_to(site)
    assert Path(example).is_relative_to(site / "scout_server" / "demo")
    assert "policy:" in shown


def test_entry_points(site, tmp_path):
    """
    The wheel registers the command and the plugins of vLLM.
    """
    (folder,) = site.glob("scout_sdk-*.dist-info")
    text = (folder / "entry_points.txt").read_text()

    assert "scout = scout_server.cli:main" in text
    assert "[vllm.general_plugins]" in text
    assert "[vllm.endpoint_plugins]" in text
