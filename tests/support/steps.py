"""Drives a model step by step below the scheduler: the test says what is fed, drafted and accepted.

Goes through the engine's own runner, state and proposer, in the order of `Engine.step`; only planning and
verifying are replaced by the test's word.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headlong import SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.config import EngineConfig
from headlong.engine.assemble import assemble
from headlong.engine.build import Built, build, survey
from headlong.models.config import ModelConfig
from headlong.state.compressed_kv import CompressedKv, CompressedKvSpec
from headlong.state.delta_net import DeltaNetState
from headlong.state.latent_kv import LatentKv
from headlong.state.paged_kv import PagedKv
from headlong.state.state import RowState
from headlong.types import Draft, Plan, Request, RowPlan, Verdict

CPU = torch.device("cpu")


def load(folder: Path, dtype: str = "float32", *, device: torch.device = CPU, **options: Any) -> Built:
    return build(survey(Checkpoint.open(folder), EngineConfig(dtype=dtype, **options)), device=device)


@dataclass(frozen=True)
class Chunk:
    """Feed the next `count` tokens of a row as known ones. Of a prompt's chunks only the last samples."""

    row: str
    count: int
    samples: bool = True


@dataclass(frozen=True)
class Decode:
    """Feed a row's last token and `drafts`; the target accepts the first `accept`, which must be the row's
    own next tokens."""

    row: str
    drafts: tuple[int, ...] = ()
    accept: int = 0


Part = Chunk | Decode


@dataclass(frozen=True)
class Result:
    """One row's share of a step, its accepted drafts included and the rejected left out."""

    hidden: Tensor
    logits: Tensor


class Driver:
    """Rows follow scripts: the tokens they are to consist of, known to the test beforehand."""

    def __init__(
        self, built: Built, *, max_rows: int = 4, page_size: int = 16, context: int = 512, drafts: int = 8
    ) -> None:
        self.device = built.ops.device
        config = EngineConfig(
            device=self.device.type,
            max_rows=max_rows,
            page_size=page_size,
            cache_tokens=max_rows * context,
            max_draft_tokens=drafts,
        )
        self.engine = assemble(built, config)
        self.state = self.engine.state
        self.scripts: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}

    def open(self, row: str, script: list[int]) -> None:
        request = Request(row, tuple(script), SamplingParams(), 0, draft_tokens=self.engine.max_drafts)
        held = self.state.admit(row)
        assert held is not None
        self.engine.sampler.table.set(held.slot, request, [])
        self.scripts[row], self.requests[row] = script, request

    def close(self, row: str) -> None:
        self.state.release(row)
        del self.scripts[row], self.requests[row]

    def length(self, row: str) -> int:
        return self.state.rows[row].length

    @torch.inference_mode()
    def step(self, *parts: Part) -> dict[str, Result]:
        """One pass over all parts at once."""
        # The plan is ordered by certain tokens, longest first.
        parts = tuple(sorted(parts, key=lambda p: -(p.count if isinstance(p, Chunk) else 1)))
        plan = Plan(tuple(self._plan(part) for part in parts), max(_depth(part) for part in parts))
        draft = self._draft(parts, plan.num_drafts)
        batch = self.engine.runner.batch(plan, draft)
        context = self.engine.runner.context(batch)
        hidden, logits = self.engine.runner.forward(batch, context)
        verdict = self._verdict(parts, plan)
        self.state.commit(plan, verdict.accepted, verdict.tokens_L)
        self.engine.proposer.observe(plan, batch, context, hidden, verdict)
        every, hidden = self.engine.model.logits(hidden), self.engine.model.finish(hidden)
        results, first, sampled = {}, 0, 0
        for part, row in zip(parts, plan.rows, strict=True):
            kept = row.num_certain + _accepted(part)
            results[part.row] = Result(hidden[first : first + kept], every[first : first + kept])
            # What the runner gives the sampler is what it would give for all tokens, bit for bit.
            tail = every[first + row.query_len - row.num_logits : first + row.query_len]
            assert torch.equal(logits[sampled : sampled + row.num_logits], tail)
            first, sampled = first + row.query_len, sampled + row.num_logits
        return results

    def propose(self, row: str, depth: int) -> list[int]:
        """What the head drafts after a row's settled tokens."""
        return self.propose_all({row: depth})[row]

    @torch.inference_mode()
    def propose_all(self, depths: dict[str, int]) -> dict[str, list[int]]:
        """The same for several rows at once, each to its own depth."""
        rows = tuple(self._plan(Decode(row, (0,) * depth)) for row, depth in depths.items())
        draft = self.engine.proposer.propose(Plan(rows, max(depths.values())))
        assert draft is not None
        tokens = draft.tokens_RK.tolist()
        return {row: found[:depth] for (row, depth), found in zip(depths.items(), tokens, strict=True)}

    def feed(self, row: str, cuts: list[int]) -> Result:
        """Chunks of these sizes, one after the other, as one result."""
        last = len(cuts) - 1
        return _joined([self.step(Chunk(row, n, samples=i == last))[row] for i, n in enumerate(cuts)])

    def decode(self, row: str, count: int) -> Result:
        """`count` plain steps."""
        return _joined([self.step(Decode(row))[row] for _ in range(count)])

    def draft(self, row: str, depth: int, accept: int, seed: int) -> Decode:
        """A part that drafts `depth` tokens, right as far as `accept` and wrong after it."""
        script, length = self.scripts[row], self.length(row)
        right = script[length + 1 : length + 1 + accept]
        generator = torch.Generator().manual_seed(seed)
        wrong = torch.randint(self.engine.model.config.vocab_size, (depth - accept,), generator=generator)
        return Decode(row, (*right, *wrong.tolist()), accept)

    def _plan(self, part: Part) -> RowPlan:
        held, script = self.state.rows[part.row], self.scripts[part.row]
        depth = _depth(part)
        query_len = part.count if isinstance(part, Chunk) else 1 + depth
        assert self.state.reserve(part.row, held.length + query_len)
        return RowPlan(
            request=self.requests[part.row],
            slot=held.slot,
            start=held.length,
            query_len=query_len,
            num_drafts=depth,
            num_replay=held.num_replay,
            pages=tuple(held.pages),
            samples=part.samples if isinstance(part, Chunk) else True,
            num_generated=0,
            known_tokens=(
                tuple(script[held.length : held.length + query_len + 1]) if isinstance(part, Chunk) else ()
            ),
        )

    def _draft(self, parts: tuple[Part, ...], depth: int) -> Draft | None:
        if not depth:
            return None
        rows = [part.drafts if isinstance(part, Decode) else () for part in parts]
        padded = [[*row, *([0] * (depth - len(row)))] for row in rows]
        return Draft(torch.tensor(padded, device=self.device))

    def _verdict(self, parts: tuple[Part, ...], plan: Plan) -> Verdict:
        """Says of every row that its script stands; past the accepted drafts there is noise."""
        flat, accepted, emitted = [], [], []
        for part, row in zip(parts, plan.rows, strict=True):
            count, script = _accepted(part), self.scripts[part.row]
            accepted.append(count)
            if not row.samples:
                emitted.append(())
                continue
            first = row.start + row.num_certain
            if isinstance(part, Decode):
                assert list(part.drafts[:count]) == script[first : first + count], (
                    "these drafts are not right"
                )
            tokens = script[first : first + count + 1]
            assert len(tokens) == count + 1, "the script is too short to say what comes next"
            flat.extend([*tokens, *([1] * (row.num_drafts - count))])
            emitted.append(tuple(tokens))
        none = tuple(() for _ in parts)
        tokens_L = torch.tensor(flat, dtype=torch.long, device=self.device)
        return Verdict(tokens_L, tuple(accepted), tuple(emitted), none, none)


def _depth(part: Part) -> int:
    return len(part.drafts) if isinstance(part, Decode) else 0


def _accepted(part: Part) -> int:
    return part.accept if isinstance(part, Decode) else 0


def _joined(results: list[Result]) -> Result:
    return Result(torch.cat([r.hidden for r in results]), torch.cat([r.logits for r in results]))


def kept(driver: Driver, row: str) -> dict[str, Tensor]:
    """Everything a row's future depends on; its recurrent memories only where no accepted draft is still to
    be replayed into them."""
    state, held = driver.state, driver.state.rows[row]
    slot, pages = held.slot, torch.tensor(held.pages)
    head_dim = driver.engine.model.config.attention.head_dim  # what pads it is nobody's business
    found = {"carry": state.carry_SD[slot], "last token": state.last_token_S[slot]}
    for name, layer in state.layers.items():
        if isinstance(layer, PagedKv):
            for kind, cache in (("keys", layer.keys), ("values", layer.values)):
                whole = cache[pages].transpose(1, 2).flatten(0, 1)  # [positions, heads, head dim]
                found[f"{name} {kind}"] = whole[: held.length, :, :head_dim]
        elif isinstance(layer, LatentKv):
            first, width = _latents(driver.engine.model.config, held.length)
            found[f"{name} latents"] = layer.latents[pages].flatten(0, 1)[first : held.length, :width]
        elif isinstance(layer, CompressedKv):
            spec = driver.engine.model.state_specs[name]
            assert isinstance(spec, CompressedKvSpec)
            parts = _compressed(layer, spec, held, pages, state.page_size)
            found |= {f"{name} {kind}": part for kind, part in parts.items()}
        elif isinstance(layer, DeltaNetState):
            past = driver.engine.runner.conv_kernel - 1
            found[f"{name} window"] = layer.windows[slot, held.num_replay : held.num_replay + past]
            if not held.num_replay:
                found[f"{name} memory"] = layer.delta.committed_SHDE[slot]
    return {name: tensor.clone() for name, tensor in found.items()}


def _latents(config: ModelConfig, length: int) -> tuple[int, int]:
    """The first position of those that will be read, and how wide a vector is."""
    if config.compressed is not None:
        return max(0, length - config.compressed.window + 1), config.compressed.head_dim
    assert config.latent is not None
    return 0, config.latent.rank + config.latent.rope_dim


def _compressed(
    layer: CompressedKv, spec: CompressedKvSpec, held: RowState, pages: Tensor, page_size: int
) -> dict[str, Tensor]:
    """The latest tokens of each ring as far as they will be read, and the entries that have ended."""
    found = {}
    rings = [("window", layer.window, spec.window)]
    for number, compressor in enumerate(spec.compressors):
        ring, entries = layer.compressor(number)
        rings.append((f"ring {number}", ring, compressor.span))
        ends = torch.arange(1, 1 + held.length // compressor.ratio) * compressor.ratio - 1
        found[f"entries {number}"] = entries[pages[ends // page_size], ends % page_size // compressor.ratio]
    for what, ring, span in rings:
        latest = torch.arange(max(0, held.length - span + 1), held.length)
        found[what] = ring[held.slot, latest % ring.shape[1]]
    return found


def poison(driver: Driver) -> None:
    """Fills every place of the state with NaN: what is read without having been written shows."""
    for name, layer in driver.state.layers.items():
        if isinstance(layer, DeltaNetState):
            tensors = [layer.windows, *vars(layer.delta).values()]
        elif isinstance(layer, CompressedKv):
            spec = driver.engine.model.state_specs[name]
            assert isinstance(spec, CompressedKvSpec)
            numbers = range(len(spec.compressors))
            tensors = [layer.window, *(tensor for n in numbers for tensor in layer.compressor(n))]
        else:
            tensors = vars(layer).values()
        for tensor in tensors:
            tensor.fill_(torch.nan)
    driver.state.carry_SD.fill_(torch.nan)
    driver.state.last_token_S.fill_(1 << 40)
