"""How many tokens each row drafts in a step. Its choices change speed, never tokens."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from headlong.speculate.acceptance import Acceptance
from headlong.speculate.costs import Costs
from headlong.speculate.draft_stop import UtilityStop
from headlong.speculate.probing import Probing
from headlong.speculate.profile import Profile
from headlong.speculate.tour import Tours
from headlong.speculate.utility import GOING_ON, MARGIN, Candidate, Step, best
from headlong.types import DraftStop, Plan, RowPlan, StepTimes, Verdict

TOUR_AGAIN = 256
"""Hopeless looks after which the machine may have changed."""
GATED_ROWS = 2
"""The most rows that are asked how sure their drafts are. Of more, one nearly always goes on, and the others save less
by stopping than asking costs."""
WORTH_ASKING = 2e-3
"""Seconds of a plain step from which on they are asked: an answer takes the host a twentieth of a millisecond."""
MORE = 3
"""Drafts beyond the best common depth that a row may have as long as they look good."""
RESTING, STANDING = 4, 3
"""One in so many steps is measured where steps are like the one before: where nobody drafts, and where rows do."""
KEEP, KEEP_PLAIN = 8, 64
"""Steps for which a choice stands if nothing new was learned of acceptance: one with drafts, and one without, whose
steps teach nothing of it."""


class Wish(NamedTuple):
    """What a decoding row may draft: at most `limit`, and no less if it is not `adaptive`. Drafts of rows that are
    `sampled` cost more, and those of rows that stand `apart`: their steps are not one launch where others' are."""

    limit: int
    adaptive: bool
    sampled: bool = False
    apart: bool = False


class Kind(NamedTuple):
    """What costs differ by."""

    sampled: bool
    apart: bool


class Depths(Protocol):
    @property
    def draft_stop(self) -> DraftStop | None:
        """Asked while drafts are made whether they go on; None if the depths stand."""
        ...

    def choose(self, wishes: Mapping[str, Wish], num_prompt_tokens: int) -> Mapping[str, int]:
        """The depth of every row, by row id, for a step that also reads so many tokens of prompts."""
        ...

    def again(self, wishes: Mapping[str, Wish]) -> Mapping[str, int] | None:
        """The depths of a step that follows before the last one was seen; None where that one was to teach something,
        or there is something to think about."""
        ...

    def observe(self, plan: Plan, verdict: Verdict, times: StepTimes) -> None:
        """Sees what a step gave and what it cost."""
        ...


class FixedDepths:
    """Every row drafts as many as it may."""

    draft_stop = None

    def choose(self, wishes: Mapping[str, Wish], num_prompt_tokens: int) -> Mapping[str, int]:  # noqa: ARG002
        return {row_id: wish.limit for row_id, wish in wishes.items()}

    def again(self, wishes: Mapping[str, Wish]) -> Mapping[str, int]:
        return self.choose(wishes, 0)

    def observe(self, plan: Plan, verdict: Verdict, times: StepTimes) -> None:
        """Nothing to learn."""


class AdaptiveDepths:
    """Chooses the depths that promise most tokens per second, by the costs and the acceptance seen so far, and now
    and then others, to learn."""

    def __init__(self, max_depth: int, profile: Profile | None = None, *, whole: bool = False) -> None:
        """`whole`: steps are one launch, in which nobody can be asked how sure a draft is, but for rows that stand
        apart."""
        self._whole, self._gated_rows = whole, 0 if whole else GATED_ROWS
        self._known_costs = profile.costs if profile is not None else ()
        self._kind = Kind(sampled=False, apart=False)
        self._costs: dict[Kind, Costs] = {}
        self.costs = self._costs_of(self._kind)
        """The costs of steps like the one at hand."""
        self.acceptance = Acceptance(max_depth)
        self._stop, self._asked_to_stop = UtilityStop(self.acceptance, max_depth), False
        self._judged: set[str] = set()
        """Rows whose last drafts the stop rule was asked about."""
        self._tours, self._touring = Tours(), False
        for cost in self._known_costs:
            self._tours.end(self._kind, cost.rows)
        self._choosing = False
        """Whether there is anything to choose in this step."""
        self._resting = 0
        """Steps in a row that were like the one before and not thought about."""
        self._unmeasured = 0
        """The latest steps with drafts that were not measured."""
        self._probing = Probing()
        self._paused: frozenset[str] = frozenset()
        """Decoding rows that did not draft in the last step: when they do, the head must catch up first."""
        self._whose: frozenset[str] = frozenset()
        self._choice: tuple[Mapping[str, Wish], Step, int] | None = None
        """The last one, for whom, and how often it may be used again."""

    @property
    def draft_stop(self) -> UtilityStop | None:
        return self._stop if self._asked_to_stop else None

    def choose(self, wishes: Mapping[str, Wish], num_prompt_tokens: int) -> Mapping[str, int]:
        self._probing.begin()
        self._touring = False
        resting, self._resting = self._resting, 0
        if (kind := self._kind_of(wishes)) != self._kind:
            self._kind, self._choice, self.costs = kind, None, self._costs_of(kind)
            self._probing.costs_changed()
        if (chosen := self._standing(wishes)) is not None:
            self._resting = resting + 1
            return dict(zip(wishes, chosen.depths, strict=True))
        self._asked_to_stop = (
            len(wishes) <= self._gated_rows and self.costs.verify.at(len(wishes), 0) >= WORTH_ASKING
        )
        self._stop.open({}, len(wishes), 0.0, self.costs)
        if wishes.keys() != self._whose:
            self._keep(frozenset(wishes))
        self._choosing = any(wish.adaptive and wish.limit for wish in wishes.values())
        if not self._choosing:
            self._resting = resting + 1
            return {row_id: wish.limit for row_id, wish in wishes.items()}
        depths = self._tour(wishes, num_prompt_tokens)
        if depths is None:
            chosen = self._best(wishes)
            depths = self._other(wishes, chosen) or self._loosened(wishes, chosen)
        return dict(zip(wishes, depths, strict=True))

    def again(self, wishes: Mapping[str, Wish]) -> Mapping[str, int] | None:
        if self._touring or self._probing.is_aside or wishes.keys() != self._whose:
            return None
        if not self._choosing:
            self._resting += 1
            return {row_id: wish.limit for row_id, wish in wishes.items()}
        if self._choice is None or self._probing.is_due(self._choice[1]):
            return None
        self._resting += 1
        if (chosen := self._standing(wishes)) is None:
            self._resting, chosen = 0, self._best(wishes)
            self._probing.pass_over(chosen)
        return dict(zip(wishes, chosen.depths, strict=True))

    def observe(self, plan: Plan, verdict: Verdict, times: StepTimes) -> None:
        if not plan.num_drafts and not self._stop.made and not self._touring:
            if self._resting % RESTING == 0:
                self._observe_plain(plan, times)
            return
        self._learn_acceptance(plan, verdict)
        decoding = [row for row in plan.rows if not row.known_tokens]
        passes = {row.request.id: count for row in decoding if (count := self._passes(row))}
        resumed = not self._paused.isdisjoint(passes)
        self._paused = frozenset(row.request.id for row in decoding if row.request.id not in passes)
        if not decoding or len(decoding) < len(plan.rows):
            return  # nobody is left of the step, or the prompts' share of the time cannot be told
        if self._choosing and self._resting and self._unmeasured < STANDING - 1:
            self._unmeasured += 1
            return
        steps, self._unmeasured = self._unmeasured + 1, 0
        rows, drafts = len(decoding), sum(row.num_drafts for row in decoding)
        depth = max(passes.values(), default=0)
        regular = not resumed and all(count == depth for count in passes.values())
        self.costs.observe(rows, drafts, len(passes), depth, times.verify, times.draft, regular=regular)
        if depth and not regular and not resumed:
            self._stop.observe(self.costs.at_par(times.draft))
        usual = self.costs.seconds(rows, drafts, len(passes), depth)
        late, plain = 0.0, self.costs.verify.at(rows, 0)
        if resumed:
            more = self.costs.at_par(times.draft) - self.costs.draft.at(len(passes), depth)
            late = self._probing.late(min(max(0.0, more), plain))
        time = steps * usual if self._choosing else 0.0
        self._probing.book(time, usual + late, rows + sum(verdict.accepted), plain)
        if self._touring:
            self._tours.took(self._kind, rows)

    def _kind_of(self, wishes: Mapping[str, Wish]) -> Kind:
        apart = self._whole and any(wish.apart for wish in wishes.values())
        return Kind(any(wish.sampled for wish in wishes.values()), apart)

    def _costs_of(self, kind: Kind) -> Costs:
        if kind not in self._costs:
            costs = self._costs[kind] = Costs()
            for cost in self._known_costs:
                costs.seed(cost.rows, cost.depth, cost.verify, cost.draft)
        return self._costs[kind]

    def _observe_plain(self, plan: Plan, times: StepTimes) -> None:
        """A step without drafts teaches costs alone, and stands for the resting ones before it."""
        count = RESTING if self._resting else 1
        self.acceptance.tick(count)
        self._stop.calibration.tick(count)
        self._probing.surprised = False
        if any(row.known_tokens for row in plan.rows):
            self._paused = frozenset(row.request.id for row in plan.rows if not row.known_tokens)
            return
        rows = len(plan.rows)
        self._paused = self._whose if rows == len(self._whose) else frozenset(r.request.id for r in plan.rows)
        self.costs.observe(rows, 0, 0, 0, times.verify, times.draft, regular=False)
        plain = self.costs.verify.at(rows, 0)
        self._probing.book(count * plain if self._choosing else 0.0, plain, rows, plain)

    def _passes(self, row: RowPlan) -> int:
        """How deep the row drafted, with what was dropped."""
        made = self._stop.made.get(row.request.id)
        return row.num_drafts if made is None else max(row.num_drafts, len(made.confidences))

    def _learn_acceptance(self, plan: Plan, verdict: Verdict) -> None:
        self.acceptance.tick()
        self._stop.calibration.tick()
        probed: dict[str, bool] = {}
        learned = False
        for row, accepted in zip(plan.rows, verdict.accepted, strict=True):
            row_id, made, dropped = row.request.id, self._stop.made.get(row.request.id), None
            if made is not None:
                kept = min(made.num_kept, row.num_drafts)
                self._stop.calibration.observe(row_id, made.confidences[:kept], accepted)
                dropped = made.dropped if row.num_drafts == kept else None
                self._judged.add(row_id)
            elif row.num_drafts:
                self._judged.discard(row_id)
            if row.num_drafts or dropped is not None:
                self.acceptance.observe(row_id, row.num_drafts, accepted, dropped)
                learned = True
            if row_id in self._probing.rows and row.num_drafts:
                probed[row_id] = accepted > 0
        self._probing.judge(probed)
        if self._probing.surprised:
            self.acceptance.doubt(probed)
        if learned and self._choice is not None:
            # Rows learn little in a step, and looking at all of them takes its time.
            whose, chosen, left = self._choice
            self._choice = (whose, chosen, min(left, max(3, len(plan.rows) // 8)))

    def _keep(self, row_ids: frozenset[str]) -> None:
        """Forgets all other rows."""
        self._whose = row_ids
        self._probing.others_came()
        self._judged &= row_ids
        self.acceptance.keep(row_ids)
        self._stop.calibration.keep(row_ids)

    def _loosened(self, wishes: Mapping[str, Wish], chosen: Step) -> tuple[int, ...]:
        """The chosen depths, and some more for rows whose drafts the stop rule judges: it ends them where they look
        bad, and where they look good they may go on."""
        if not self._asked_to_stop:
            return chosen.depths
        limits, depths = {}, []
        for (row_id, wish), depth in zip(wishes.items(), chosen.depths, strict=True):
            if depth and wish.adaptive and row_id in self._judged:
                depth = limits[row_id] = min(depth + MORE, wish.limit)
            depths.append(depth)
        self._stop.open(limits, len(wishes), chosen.rate, self.costs)
        return tuple(depths)

    def _candidates(self, wishes: Mapping[str, Wish]) -> list[Candidate]:
        curve = self.acceptance.curve
        return [
            Candidate(row_id, curve(row_id), wish.limit, wish.adaptive) for row_id, wish in wishes.items()
        ]

    def _standing(self, wishes: Mapping[str, Wish]) -> Step | None:
        """The last choice, if it stands and nothing is to be thought of anew. Most steps are such: little may be spent
        on them."""
        if self._choice is None or not self._choosing:
            return None
        whose, chosen, left = self._choice
        # Where nobody drafts it does not matter how much they may; where the stop rule is asked it must be opened.
        drafting = any(chosen.depths)
        same = whose == wishes and not self._asked_to_stop if drafting else whose.keys() == wishes.keys()
        if not left or not same or self._probing.is_due(chosen):
            return None
        self._choice = (whose, chosen, left - 1)
        self._probing.pass_over(chosen)
        self._stop.made.clear()
        return chosen

    def _best(self, wishes: Mapping[str, Wish]) -> Step:
        if self._choice is not None:
            whose, chosen, left = self._choice
            if left and whose == wishes:
                self._choice = (whose, chosen, left - 1)
                return chosen
        drafting = self._choice is not None and any(self._choice[1].depths)
        chosen = best(self._candidates(wishes), self.costs, GOING_ON if drafting else MARGIN)
        self._choice = (wishes, chosen, KEEP if any(chosen.depths) else KEEP_PLAIN)
        return chosen

    def _tour(self, wishes: Mapping[str, Wish], num_prompt_tokens: int) -> list[int] | None:
        """The depths of a step of the tour; None if it is no time for one. Beside prompts nothing can be measured."""
        candidates = self._candidates(wishes)
        depth = None if num_prompt_tokens else self._tours.next(self._kind, candidates, self.costs)
        if depth is None:
            return None
        self._touring = True
        return [min(depth, wish.limit) if wish.adaptive else wish.limit for wish in wishes.values()]

    def _other(self, wishes: Mapping[str, Wish], chosen: Step) -> tuple[int, ...] | None:
        """Depths for a step that is to teach something, if it is time for one."""
        if not self._probing.is_due(chosen):
            self._probing.pass_over(chosen)
            return None
        depths = self._probing.other(self._candidates(wishes), chosen, self.costs)
        if self._probing.hopeless >= TOUR_AGAIN:
            self._probing.hopeless = 0
            self._tours.begin_again()
        return depths
