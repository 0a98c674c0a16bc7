"""Asks a running server what kind of server it is."""

import re

import httpx

from scout_sdk._errors import ConfigError
from scout_server.sim.livecells import ServerKind

__all__ = ["server_at"]


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
