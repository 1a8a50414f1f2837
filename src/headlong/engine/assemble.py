"""Makes an engine of built models and a config: how much fits, who drafts, and who runs the steps."""

from collections.abc import Collection
from contextlib import nullcontext

from torch import Tensor

from headlong.config import EngineConfig
from headlong.engine.accounting import plan_memory, refusing_oom
from headlong.engine.build import Built
from headlong.engine.chunk_pace import ChunkPace
from headlong.engine.draft_vocab import draft_tokens
from headlong.engine.engine import Drafting, Engine, Parts
from headlong.engine.proposers import head_place, make_proposer, resolve_proposer
from headlong.engine.runner import Runner
from headlong.engine.scheduler import Scheduler
from headlong.engine.step.steppers import make_steppers
from headlong.ops.native import threads_for_native
from headlong.sampling.sampler import Sampler
from headlong.sampling.table import SamplingTable
from headlong.speculate.depth import AdaptiveDepths, Depths, FixedDepths
from headlong.speculate.profile import conditions
from headlong.speculate.profile import load as load_profile
from headlong.state.specs import Capacity, PrefixCapacity
from headlong.state.state import State
from headlong.text.tokenizer import Tokenizer


def assemble(
    built: Built,
    config: EngineConfig,
    tokenizer: Tokenizer | None = None,
    drafter: Built | None = None,
    stop_ids: Collection[int] = (),
) -> Engine:
    """`drafter` is the model that the proposer `draft` drafts with; `stop_ids` are the tokens that end a text."""
    model, ops, who = built.model, built.ops, resolve_proposer(config, built, drafter)
    head = built.head if "mtp" in who.parts else None
    max_drafts = config.max_draft_tokens if who.parts else 0
    memory = plan_memory(config, built, head, drafter, max_drafts)
    specs = model.state_specs | (head.state_specs if head is not None else {})
    capacity = Capacity(
        num_pages=memory.num_pages,
        page_size=config.page_size,
        num_slots=config.max_rows,
        max_drafts=max_drafts,
        kv_dtype=ops.dtype,
        dtype=ops.activation_dtype,
        device=ops.device,
        head=head_place(built, head),
    )
    prefix = PrefixCapacity(
        device_bytes=memory.checkpoint_bytes,
        host_bytes=config.prefix_host_bytes,
        head=head is not None,
    )
    chosen = None
    if head is not None:
        chosen = draft_tokens(config.draft_vocab, model.config.vocab_size, tokenizer, stop_ids)
    with refusing_oom(memory):
        state = State(specs, model.tap_width, capacity, prefix if config.prefix_cache else None)
    table = SamplingTable(config.max_rows, model.config.vocab_size, ops.device)
    sampler = Sampler(table, ops.argmax, ops.draw, ops.sample, ops.penalise)
    with refusing_oom(memory):
        proposer = make_proposer(who, config, built, drafter, state, sampler, chosen)
    steppers = make_steppers(Runner(model, state), proposer, sampler, memory.max_len)
    costs = conditions(model.config, ops.dtype, ops.device, _drafted_by(config, chosen))
    depths: Depths = FixedDepths()
    if max_drafts:
        depths = AdaptiveDepths(max_drafts, load_profile(costs), whole=steppers.graph is not None)
    compiled = model.program is not None and (head is None or head.is_one_call)
    return Engine(
        Parts(
            model=model,
            tokenizer=tokenizer,
            memory=memory,
            state=state,
            sampler=sampler,
            steppers=steppers,
            scheduler=Scheduler(
                state, table, depths, config.resolve_chunk_tokens(), proposer.flush_deferred, _pace(config)
            ),
            drafting=Drafting(
                max_drafts, min(config.drafts, max_drafts), config.draft_tokens == "auto", costs
            ),
            threads=threads_for_native if compiled else nullcontext(),
            check_every_step=config.check_every_step,
        )
    )


def _pace(config: EngineConfig) -> ChunkPace | None:
    """What keeps prompts from holding up rows that decode, on devices that read many tokens in the time of few. Who
    says how many tokens a step reads has chosen."""
    if config.resolve_device().type != "cuda" or config.chunk_tokens is not None:
        return None
    return ChunkPace(config.page_size, config.resolve_chunk_tokens())


def _drafted_by(config: EngineConfig, chosen: Tensor | None) -> str:
    """What drafts, as a profile of its costs is known by."""
    drafted_by = f"{config.proposer} {config.drafter} {config.draft_quantization} {config.draft_dtype}"
    drafted_by += "" if chosen is None else f" {len(chosen)}"
    return drafted_by + ("" if config.draft_device is None else f" on {config.draft_device}")
