"""A command that is told to terminate leaves no server behind."""

import subprocess
import sys

import httpx
import pytest

HOLD = """
import asyncio
from scout_server import cli
from scout_server.demo.servers import ServerSpec, start

async def hold():
    async with start(ServerSpec(name="held", args=("--embedded",))) as server:
        print(server.root, flush=True)
        await asyncio.sleep(60)

cli.app = lambda: asyncio.run(hold())
cli.main()
"""


def test_termination_stops_the_servers():
    """
    After SIGTERM the server that a command had started no longer answers.
    """
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        root = process.stdout.readline().strip()
        assert httpx.get(f"{root}/health").status_code == 200

        process.terminate()

        assert process.wait(timeout=60) == 143
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{root}/health")
