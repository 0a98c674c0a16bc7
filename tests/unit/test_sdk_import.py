"""What importing the SDK costs: the standard library only, and no effect."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import json, sys, threading, atexit, os
before = set(sys.modules)
registered = []
atexit.register = lambda *a, **k: registered.append(str(a))
os.register_at_fork = lambda *a, **k: registered.append(str(k))
import {module}
new = set(sys.modules) - before
top = sorted({{name.partition(".")[0] for name in new}})
foreign = [name for name in top if name not in sys.stdlib_module_names and name != "scout_sdk"]
ours = [r for r in registered if "scout" in r]
print(json.dumps([foreign, ours, threading.active_count()]))
"""


@pytest.mark.parametrize(
    "module",
    [
        "scout_sdk",
        "scout_sdk._capabilities",
        "scout_sdk._wire",
        "scout_sdk.events",
        "scout_sdk.fingerprint",
        "scout_sdk.recorder",
        "scout_sdk.sleep",
        "scout_sdk.testing",
    ],
)
def test_import_takes_the_standard_library_only(module):
    """Importing it loads no third-party module, registers nothing and starts no thread."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(module=module)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [[], [], 1]


def test_every_public_name_is_there():
    """Each name in `__all__` exists, and the lists are sorted."""
    import scout_sdk
    from scout_sdk import events, fingerprint, recorder, sleep, testing, transport

    for module in (scout_sdk, events, fingerprint, recorder, sleep, testing, transport):
        assert list(module.__all__) == sorted(module.__all__)
        assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = testing.Nonsense


def test_clients_tests_need_no_server_extra():
    """What scripts/test_openai2.sh runs imports nothing of the server, which is not there."""
    unit = Path(__file__).parent
    files = [
        path
        for pattern in ("integrations/*.py", "test_context_*.py", "test_inject_*.py")
        for path in unit.glob(pattern)
    ]
    assert len(files) > 8
    foreign = {"scout_server", "typer", "rich", "numpy", "starlette", "uvicorn"}

    found = {path.name: sorted(_imported(path) & foreign) for path in files}

    assert {name: modules for name, modules in found.items() if modules} == {}


def _imported(path: Path) -> set[str]:
    """Return the top packages that the file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found
