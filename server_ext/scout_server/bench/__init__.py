"""`scout bench`: what the policies are worth, and what they cost."""

import typer

__all__ = ["bench_app"]

bench_app = typer.Typer(no_args_is_help=True, help="Measure the policies and the hot path.")


def _register() -> None:
    """Add every command; each module imports what it needs only when it runs."""
    from scout_server.bench import hotpath, prediction, retention

    for module in (hotpath, retention, prediction):
        module.register(bench_app)


_register()
