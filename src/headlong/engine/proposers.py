"""Builds the drafter that a config names, and says what is missing where it cannot.

A name is a part (mtp, ngram, draft), or parts joined: by `+`, where each row takes the first that has something for
it, or by `>`, where the second goes on after the first one's drafts.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headlong.checkpoint import source
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.config import EngineConfig
from headlong.engine.build import Built, build, survey
from headlong.engine.runner import Runner
from headlong.errors import ConfigError
from headlong.models.mtp import MtpHead
from headlong.progress import ProgressFn, silent
from headlong.sampling.sampler import Sampler
from headlong.speculate.chain import First, Then
from headlong.speculate.draft_model import DraftModelProposer, check_vocabulary
from headlong.speculate.mtp import MtpProposer
from headlong.speculate.ngram import MAX_MATCH, MIN_MATCH, NgramProposer
from headlong.speculate.proposer import NoDrafts, Proposer
from headlong.speculate.remote_head import RemoteHead
from headlong.state.specs import Capacity, HeadPlace
from headlong.state.state import State

PARTS = ("mtp", "ngram", "draft")
BEFORE_NGRAM = 3
"""Drafts of the part before `>`, where more are wanted."""
SURE_MATCH = 4
"""What n-gram lookup calls a match where another part would draft too: shorter ones are right less often than that."""


@dataclass(frozen=True)
class Drafting:
    """Who drafts: for each row the first of the `chains` that has something; within one, part after part."""

    chains: tuple[tuple[str, ...], ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(part for chain in self.chains for part in chain)


def resolve_proposer(config: EngineConfig, built: Built, drafter: Built | None) -> Drafting:
    """What the config's proposer means for these models. No parts: there is nobody to draft."""
    name = config.proposer
    if name == "auto" and drafter is None:
        return Drafting((("mtp",),) if built.head is not None else ())
    drafting = Drafting((("draft",),)) if name == "auto" else parse(name)
    if "mtp" not in drafting.parts and config.draft_device is not None:
        raise ConfigError(
            f"draft_device is where the MTP head drafts, but {'+'.join(drafting.parts)} drafts without it; "
            "leave draft_device out, or use proposer='mtp'"
        )
    if "mtp" in drafting.parts and built.head is None:
        raise ConfigError(
            f"proposer {name!r} needs an MTP head, but {built.head_refusal}; use 'ngram', or 'auto' to do without"
        )
    if "draft" in drafting.parts and drafter is None:
        raise ConfigError(
            f"proposer {name!r} needs drafter, a smaller model with the same tokenizer; name one"
        )
    if "draft" not in drafting.parts and drafter is not None:
        raise ConfigError(
            f"drafter is given, but proposer {name!r} does not use it; use proposer='draft' or leave it out"
        )
    return drafting


def parse(name: str) -> Drafting:
    """Reads a name; whether the parts are there is not asked."""
    drafting = Drafting(tuple(tuple(chain.split(">")) for chain in name.split("+")))
    for part in drafting.parts:
        if part not in PARTS:
            raise ConfigError(
                f"proposer {name!r}: {part!r} is none of {', '.join(PARTS)}; use 'auto', one of them, or a chain "
                "such as 'ngram+mtp' or 'mtp>ngram'"
            )
        if drafting.parts.count(part) > 1:
            raise ConfigError(f"proposer {name!r} names {part!r} twice; name each part once")
    for chain in drafting.chains:
        if any(part != "ngram" for part in chain[1:]):
            raise ConfigError(f"proposer {name!r}: after '>' only ngram can go on; use '+' for {chain[-1]!r}")
    return drafting


def load_draft_model(
    config: EngineConfig, vocab_size: int, device: torch.device, progress: ProgressFn = silent
) -> Built | None:
    """The config's draft model without its own head, if one is named. One that cannot serve is refused before
    its weights are read."""
    if config.drafter is None:
        return None
    checkpoint = Checkpoint.open(source.resolve(config.drafter, progress=progress))
    blueprint = survey(checkpoint, replace(config, mtp="off"))
    check_vocabulary(blueprint.config.vocab_size, vocab_size)
    return build(blueprint, device=device, progress=progress)


def make_proposer(
    drafting: Drafting,
    config: EngineConfig,
    built: Built,
    drafter: Built | None,
    state: State,
    sampler: Sampler,
    draft_tokens_T: Tensor | None = None,
) -> Proposer:
    """The drafter over the target's state; a head drafts among the tokens `draft_tokens_T`, if they are given."""
    made: dict[str, Proposer] = {}
    if "mtp" in drafting.parts:
        assert built.head is not None
        if built.lent is None:
            made["mtp"] = MtpProposer(built.model, built.head, state, sampler, draft_tokens_T)
        else:
            made["mtp"] = RemoteHead(built.lent, built.head, state, sampler, draft_tokens_T)
    if "draft" in drafting.parts:
        assert drafter is not None
        runner = Runner(drafter.model, _draft_state(drafter, config, state))
        made["draft"] = DraftModelProposer(runner, state, sampler, config.resolve_chunk_tokens())
    least = SURE_MATCH if len(drafting.parts) > 1 else MIN_MATCH
    made["ngram"] = ngram = NgramProposer(state, built.model.config.vocab_size, least, MAX_MATCH)
    links = [
        Then(made[first], ngram, BEFORE_NGRAM) if rest else made[first] for first, *rest in drafting.chains
    ]
    if not links:
        return NoDrafts()
    return First(*links) if len(links) > 1 else links[0]


def head_place(built: Built, head: MtpHead | None) -> HeadPlace | None:
    """Where the state of a head goes that is not where its target is."""
    if head is None or built.lent is None:
        return None
    ops = built.lent.ops
    return HeadPlace(frozenset(head.state_specs), ops.dtype, ops.device)


def _draft_state(drafter: Built, config: EngineConfig, state: State) -> State:
    """A state as large as the target's."""
    capacity = Capacity(
        num_pages=state.pages.size,
        page_size=config.page_size,
        num_slots=state.slots.size,
        max_drafts=state.max_drafts,
        kv_dtype=drafter.ops.dtype,
        dtype=drafter.ops.activation_dtype,
        device=drafter.ops.device,
    )
    return State(drafter.model.state_specs, drafter.model.tap_width, capacity)
