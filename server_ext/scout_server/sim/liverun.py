"""Starts vLLM servers and runs the cells on them, a line for every repetition, resumable."""

import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx

from scout_sdk._errors import ConfigError
from scout_server.demo.servers import ServerSpec, start
from scout_server.sim.calibrate import fit_probes
from scout_server.sim.hardware.fitted import plain
from scout_server.sim.live import run_programs
from scout_server.sim.livecells import LiveCell, ServerKind, programs_of_cell
from scout_server.sim.livevalidate import load_measured, measured_line, measured_of
from scout_server.sim.probes import Calibration, probe_server

__all__ = ["Campaign", "measure", "measure_at", "roomiest", "server_at", "server_spec"]

_START_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """What is measured, and where it is written."""

    cells: Sequence[LiveCell]
    repetitions: int
    out: Path
    """Folder: `measured.jsonl`, and a profile a model and eviction, with its probes."""
    models: Path
    """Folder with the models' folders."""
    until: float
    """Nothing new is begun after this time, seconds of the monotonic clock."""
    calibration: Calibration

    @property
    def lines(self) -> Path:
        """The file of what was measured."""
        return self.out / "measured.jsonl"

    def profile(self, kind: ServerKind) -> Path:
        """Return the file with the step times of servers like *kind*: model and eviction."""
        return self.out / f"profile-{kind.model}-{kind.eviction}.json"

    def left(self, server: ServerKind) -> list[tuple[LiveCell, int]]:
        """Return what is still to be measured on *server*: all cells once, then again."""
        done = {(m.cell, m.repetition) for m in load_measured(self.lines)}
        return [
            (cell, repetition)
            for repetition in range(1, self.repetitions + 1)
            for cell in self.cells
            if cell.server == server and (cell.name, repetition) not in done
        ]

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self.until


def server_spec(kind: ServerKind, models: Path) -> ServerSpec:
    """Return how a server of that *kind* is started."""
    folder = models / kind.model
    about = folder / "scout-model.json"
    if not about.is_file():
        msg = f"no model in {folder}; run `make setup-vllm-cpu`, or name their folder with --models"
        raise ConfigError(msg)
    own = json.loads(about.read_text(encoding="utf-8")).get("vllm_arguments", [])
    args = (
        str(folder),
        *(("--scout-off",) if kind.eviction == "lru" else ()),
        "--dtype", "float32", "--enforce-eager", "--block-size", str(kind.block_tokens),
        "--max-num-seqs", str(kind.max_seqs), "--max-num-batched-tokens", str(kind.batched_tokens),
        "--num-gpu-blocks-override", str(kind.blocks), "--max-model-len",
        str(min(4096, kind.block_tokens * (kind.blocks - 1))),
        "--served-model-name", kind.model,
        # the first token at once, the others together: the client shares the cores
        "--stream-interval", "1000",
        *own,
    )  # fmt: skip
    environ = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    return ServerSpec(name=kind.name, args=args, environ=environ, start_s=_START_S)


async def measure(campaign: Campaign, say: Callable[[str], None]) -> None:
    """Measure what is left of *campaign*, until its time is over; each line is written at once."""
    campaign.out.mkdir(parents=True, exist_ok=True)
    kinds = dict.fromkeys(cell.server for cell in campaign.cells)
    for kind in dict.fromkeys(roomiest(each, kinds) for each in kinds):
        if campaign.over or campaign.profile(kind).is_file():
            continue
        say(f"{kind.name}: starting")
        async with start(server_spec(kind, campaign.models)) as server:
            await _calibrate(campaign, kind, server.root, say)
            await _cells(campaign, kind, server.root, server.model, say)
    for kind in kinds:
        if campaign.over or not campaign.left(kind):
            continue
        say(f"{kind.name}: starting")
        async with start(server_spec(kind, campaign.models)) as server:
            await _cells(campaign, kind, server.root, server.model, say)


def roomiest(kind: ServerKind, kinds: Iterable[ServerKind]) -> ServerKind:
    """Return *kind* with the largest pool of its model: nothing waits for blocks there."""
    return replace(kind, blocks=max(k.blocks for k in kinds if k.model == kind.model))


async def measure_at(campaign: Campaign, url: str, say: Callable[[str], None]) -> None:
    """Measure the cells of *campaign*, all of one server, at *url*."""
    campaign.out.mkdir(parents=True, exist_ok=True)
    kind = campaign.cells[0].server
    if not campaign.profile(kind).is_file():
        await _calibrate(campaign, kind, url, say)
    await _cells(campaign, kind, url, kind.model, say)


async def _calibrate(
    campaign: Campaign, kind: ServerKind, root: str, say: Callable[[str], None]
) -> None:
    probes = await probe_server(
        root,
        campaign.calibration,
        hints=kind.eviction == "scout",
        progress=lambda part: say(f"{kind.name}: calibrating: {part}"),
    )
    path = campaign.profile(kind)
    measured = json.dumps(asdict(probes), indent=1) + "\n"
    path.with_name(path.name.replace("profile", "probes", 1)).write_text(measured, "utf-8")
    profile = fit_probes(probes, gpu="CPU", source=f"measured on {kind.name}")
    path.write_text(json.dumps(plain(profile), indent=1) + "\n", "utf-8")


async def _cells(
    campaign: Campaign, kind: ServerKind, root: str, model: str, say: Callable[[str], None]
) -> None:
    # what a server that somebody else started has seen before is not known
    server_at, since = time.time(), time.monotonic()
    for cell, repetition in campaign.left(kind):
        if campaign.over:
            return
        say(f"{cell.name} {repetition}")
        begun = time.monotonic() - since
        run = await run_programs(
            root,
            model,
            programs_of_cell(cell, repetition),
            concurrency=cell.concurrency,
            events=kind.eviction == "scout",
        )
        with campaign.lines.open("a", encoding="utf-8") as file:
            line = measured_of(cell, repetition, run, server_at=server_at, begun_s=begun)
            file.write(measured_line(line))


async def server_at(client: httpx.AsyncClient, *, shape: str, batched_tokens: int) -> ServerKind:
    """Return what kind of server *client* talks to; ConfigError when it does not say."""
    url = client.base_url
    try:
        listed = await client.get("/v1/models")
        metrics = (await client.get("/metrics")).text
        state = await client.get("/v1/scout/state")
    except httpx.HTTPError as error:
        msg = f"{url}: {error!r}"
        raise ConfigError(msg) from error
    try:
        model = str(listed.json()["data"][0]["id"])
        info = dict(re.findall(r'\b(num_gpu_blocks|block_size)="(\d+)"', metrics))
        blocks, size = int(info["num_gpu_blocks"]), int(info["block_size"])
    except (ValueError, KeyError, IndexError) as error:
        msg = f"{url} is no vLLM: no model, or no vllm:cache_config_info on /metrics"
        raise ConfigError(msg) from error
    return ServerKind(
        model=model,
        blocks=blocks,
        eviction="scout" if state.status_code == httpx.codes.OK else "lru",
        shape=shape,
        block_tokens=size,
        max_seqs=256,
        batched_tokens=batched_tokens,
    )
