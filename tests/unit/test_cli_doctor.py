import http.server
import io
import json
import threading
from importlib import metadata

import pytest
from rich.console import Console
from typer.testing import CliRunner

from scout_server.cli import app
from scout_server.doctor import Package, client_notes, examine, packages, server_root, show


@pytest.fixture
def serve():
    """Start a loopback server that answers paths from a table of (status, body)."""
    servers = []

    def start(answers):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                status, body = answers.get(self.path, (404, b"{}"))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_hint_aware_server(serve):
    """
    A server with capabilities is hint-aware, and they are shown; a /v1 in the URL does no harm.
    """
    url = serve(
        {
            "/v1/models": (200, b'{"data": [{"id": "m"}]}'),
            "/v1/scout/capabilities": (200, b'{"features": ["events"]}'),
        }
    )

    report = examine(f"{url}/v1/")

    assert (True, True, ("m",)) == (report.reachable, report.hint_aware, report.models)
    assert {"features": ["events"]} == report.capabilities


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((404, b"{}"), "not hint-aware"),
        ((200, b"<html>"), "not hint-aware"),
        ((401, b"{}"), "API key"),
    ],
)
def test_other_servers(serve, answer, problem):
    """
    A server without the endpoint, with another page there, or behind a key is not hint-aware.
    """
    report = examine(serve({"/v1/scout/capabilities": answer}))

    assert (True, False) == (report.reachable, report.hint_aware)
    assert problem in report.problem


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9", "http://[broken", "nowhere.invalid:1", "ftp://host"]
)
def test_no_server(url):
    """
    An address without a server, or that is none, is reported, not raised.
    """
    report = examine(url, timeout_s=2.0)

    assert (False, False) == (report.reachable, report.hint_aware)
    assert report.problem


def test_command(serve):
    """
    `scout doctor URL --json` prints one object with versions, packages and the server.
    """
    url = serve({"/v1/scout/capabilities": (200, b"{}")})
    result = CliRunner().invoke(app, ["doctor", url, "--json"])

    assert 0 == result.exit_code
    document = json.loads(result.stdout)
    assert {"versions", "packages", "client", "server"} == set(document)
    assert document["server"]["hint_aware"]
    assert document["client"] == []


def test_why_a_client_sends_nothing(monkeypatch):
    """
    What keeps hints from a server that would take them is said, with what to do.
    """
    monkeypatch.setenv("SCOUT_TIMEOUT", "soon")
    monkeypatch.setenv("SCOUT_SDK_ENABLED", "0")
    shown = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "300"}).stdout
    assert "SCOUT_TIMEOUT='soon': not a number of seconds" in shown
    assert "SCOUT_SDK_ENABLED switches the client off" in shown

    monkeypatch.setenv("SCOUT_SDK_ENABLED", "1")
    monkeypatch.delenv("SCOUT_TIMEOUT")
    (note,) = client_notes("gpu.invalid:8000/v1")
    assert "SCOUT_BASE_URL=http://gpu.invalid:8000/v1" in note
    monkeypatch.setenv("SCOUT_BASE_URL", "http://gpu.invalid:8000/v1")
    assert client_notes("gpu.invalid:8000") == client_notes("http://[broken") == []


def test_supported_versions_are_stated():
    """
    Every package has a supported range; what is installed and in range is ok.
    """
    found = {package.name: package for package in packages()}

    assert {"vllm", "langgraph", "autogen-agentchat", "openai"} <= set(found)
    assert all(package.supported for package in found.values())
    assert [p.name for p in found.values() if p.ok and p.installed is None] == []


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("https://host/v1", "https://host"),
        ("http://host/base/v1/", "http://host/base"),
    ],
)
def test_server_root(url, root):
    """
    A server's root has a scheme and neither a trailing slash nor /v1.
    """
    assert root == server_root(url)


def test_names_with_brackets_are_shown_as_they_are(serve):
    """Square brackets in a model's or feature's name are text, not the terminal's markup."""
    url = serve(
        {
            "/v1/models": (200, b'{"data": [{"id": "[/red]m[bold]"}]}'),
            "/v1/scout/capabilities": (200, b'{"[x]": "[/y]"}'),
        }
    )

    found = CliRunner().invoke(app, ["doctor", url])

    assert found.exit_code == 0, found.output
    assert "[/red]m[bold]" in found.output
    assert "[x]" in found.output
    assert "[/y]" in found.output


def test_missing_package_names_the_whole_extra():
    """What to install is named with its extra in brackets."""
    console = Console(file=io.StringIO(), width=200)
    absent = Package(
        name="ray", installed=None, supported="", ok=False, note="pip install 'scout-sdk[ray]'"
    )

    show([absent], None, console)

    assert "scout-sdk[ray]" in console.file.getvalue()


def test_absent_package_is_brought_by_its_own_extra(monkeypatch):
    """For a framework that is not there the smallest extra is named, not one with everything."""

    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    notes = {package.name: package.note for package in packages()}

    assert notes["langgraph"] == "pip install 'scout-sdk[langgraph]'"
    assert notes["autogen-ext"] == "pip install 'scout-sdk[autogen]'"
    assert notes["openai-agents"] == "pip install 'scout-sdk[openai-agents]'"
    assert notes["ray"] == "pip install 'scout-sdk[ray]'"
