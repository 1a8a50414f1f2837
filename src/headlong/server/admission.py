"""The way in, the same for every generating endpoint: lease the model, take a place, make the job, check it."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from starlette.requests import Request

from headlong.server.generation import Generation, Job
from headlong.server.key_limits import Account
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
        account = server.keys.account(request.state.caller)
        try:
            stack.enter_context(server.keys.hold(request.state.caller, num_rows))
        finally:
            request.state.limit_headers = account.headers()
        prepare = partial(_prepare, model, make_job, account, request.state.caller.name)
        try:
            job, generation = await asyncio.to_thread(prepare, compiling=False)
        except CompileElsewhere:
            job, generation = await server.compilers.run(prepare, compiling=True)
        account.spend(sum(map(len, job.prompts)))
        exchange = Exchange(request, job, generation, stack.pop_all())
        exchange.held.callback(lambda: account.spend(exchange.num_tokens))
        return model, exchange
    raise AssertionError("the stack swallows nothing")


def _prepare(
    model: Model, make_job: Callable[[Model], Job], account: Account, tenant: str, *, compiling: bool
) -> tuple[Job, Generation]:
    with account.compiling() if compiling else not_compiling():
        job = replace(make_job(model), tenant=tenant)
        return job, Generation.prepare(model, job)
