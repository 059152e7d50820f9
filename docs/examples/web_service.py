"""A web service that trains, shows its progress, and can be asked to stop.

    uvicorn web_service:app        # in docs/examples; then GET /metrics and POST /stop

Training is one task of the service's own event loop. The replicas decide together when to stop, because the request
may arrive when some of them have checked for it and others have not.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

import aiodist

try:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route
except ImportError:
    print("web_service.py needs Starlette, which is not installed: pip install starlette uvicorn")
    sys.exit()

STRATEGY = aiodist.MirroredStrategy([f"CPU:{k}" for k in range(4)])
TARGET = np.array([1.0, -2.0, 0.5])


async def train(job: dict[str, Any]) -> int:
    """Fit a linear model in a replica until the job is asked to stop; return the number of steps."""
    ctx = aiodist.get_replica_context()
    rng = np.random.default_rng(ctx.replica_id_in_sync_group)
    weights, steps = np.zeros(3), 0
    while not await ctx.all_reduce("MAX", job["stop"]):
        inputs = rng.standard_normal((16, 3))
        errors = inputs @ (weights - TARGET)
        gradient, loss = await ctx.all_reduce("MEAN", (errors @ inputs / 16, float(errors @ errors / 16)))
        weights, steps = weights - 0.1 * gradient, steps + 1
        job["metrics"] = {"step": steps, "loss": loss}
        await asyncio.sleep(0.01)  # load a batch
    return steps


@contextlib.asynccontextmanager
async def training(app: Starlette) -> AsyncIterator[None]:
    """Train while the service is up."""
    app.state.job = {"stop": False, "metrics": {"step": 0}}
    async with asyncio.TaskGroup() as tasks:
        run = STRATEGY.run(train, args=(app.state.job,))
        app.state.task = tasks.create_task(run)
        yield
        app.state.job["stop"] = True


async def metrics(request: Request) -> JSONResponse:
    """Return the newest metrics."""
    return JSONResponse(request.app.state.job["metrics"] | {"running": not request.app.state.task.done()})


async def stop(request: Request) -> JSONResponse:
    """Ask the job to stop, and respond once every replica has."""
    request.app.state.job["stop"] = True
    steps = await request.app.state.task
    return JSONResponse({"steps": STRATEGY.experimental_local_results(steps)})


app = Starlette(routes=[Route("/metrics", metrics), Route("/stop", stop, methods=["POST"])], lifespan=training)
