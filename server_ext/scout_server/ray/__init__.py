"""
TAO as a Ray Serve application: `serve run scout_server.ray:app`, or `build` with arguments.

Importing this package imports no Ray and does nothing; `app` and `build` are made when they are
asked for, and say what is missing when Ray is not there.
"""

from typing import TYPE_CHECKING, Any

from scout_server.ray.versions import require_ray

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["app", "build"]

app: Any
"""The application as SCOUT_CONFIG configures it."""


def build(args: "Mapping[str, Any]") -> Any:
    """
    Return the application; *args* is a configuration document, as in a Serve YAML's `args`.

    `serve run` gives `section.name=value` words as one flat mapping; both forms are taken. What is
    not given comes from the file that SCOUT_CONFIG names. ConfigError lists everything wrong.
    """
    require_ray()
    from scout_server.ray._compat import application
    from scout_server.ray.settings import document_of

    return application(document_of(args))


def __getattr__(name: str) -> Any:
    if name == "app":
        return build({})
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
