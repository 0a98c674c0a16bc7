"""`scout bench`: figures that the project promises, measured."""

import typer

from scout_server.bench.agreement import agreement
from scout_server.bench.callback import callback
from scout_server.bench.engine import engine
from scout_server.bench.gateway import gateway
from scout_server.bench.hotpath import hotpath
from scout_server.bench.planner import planner
from scout_server.bench.prediction import prediction
from scout_server.bench.readiness import readiness
from scout_server.bench.retention import retention
from scout_server.bench.sim import sim
from scout_server.bench.tao import tao
from scout_server.bench.taoengines import tao_engines
from scout_server.bench.zerohint import zero_hint

__all__ = ["bench_app"]

bench_app = typer.Typer(no_args_is_help=True, add_completion=False)
bench_app.command()(agreement)
bench_app.command()(callback)
bench_app.command()(engine)
bench_app.command()(gateway)
bench_app.command()(planner)
bench_app.command()(readiness)
bench_app.command()(sim)
bench_app.command()(tao)
bench_app.command("tao-engines")(tao_engines)
bench_app.command()(hotpath)
bench_app.command()(prediction)
bench_app.command()(retention)
bench_app.command()(zero_hint)
