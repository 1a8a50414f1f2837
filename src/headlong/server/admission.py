"""The way in, the same for every generating endpoint: lease the model, take a place, make the job, check it."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext

from starlette.requests import Request

from headlong.server.generation import Generation, Job
from headlong.server.model import Model
from headlong.server.reply import Exchange
from headlong.text.grammar import CompileElsewhere, not_compiling


async def admit(
    request: Request, model_name: str | None, num_rows: int, make_job: Callable[[Model], Job]
) -> tuple[Model, Exchange]:
    """Leases the model, takes a place and makes the job; all is let go again if anything on the way raises. `make_job`
    and the engine's checks of what it made run in one worker thread, one after the other; again, in a thread that may
    wait, where they find a grammar that has to be compiled."""
    server = request.app.state.server
    async with AsyncExitStack() as stack:
        admin = request.state.caller.admin
        model = await stack.enter_async_context(server.pool.lease(model_name, admin=admin))
        stack.enter_context(server.limit.admit(model, num_rows))
        try:
            job, generation = await asyncio.to_thread(_prepare, model, make_job, compiling=False)
        except CompileElsewhere:
            job, generation = await server.compilers.run(_prepare, model, make_job, compiling=True)
        return model, Exchange(request, job, generation, stack.pop_all())
    raise AssertionError("the stack swallows nothing")


def _prepare(model: Model, make_job: Callable[[Model], Job], *, compiling: bool) -> tuple[Job, Generation]:
    with nullcontext() if compiling else not_compiling():
        job = make_job(model)
        return job, Generation.prepare(model, job)
