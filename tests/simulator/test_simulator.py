"""Random schedules against the real engine on tiny models: rows join, leave and are cancelled, pages run out, the cache
is evicted, depths change, and faults strike at every point of a step. Every row gives what it gives alone."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sim_world import KINDS, MAX_TOKENS, PROMPTS, Armed, Asked, World, broken_kernel, out_of_memory

from support import tiny, tiny_llama
from support.injection import STAGES

_root = tempfile.TemporaryDirectory(prefix="headlong-simulator-")
FAMILIES = ("dense", "moe", "llama")


def folder_of(family: str) -> Path:
    folder = Path(_root.name) / family
    if not folder.exists():
        if family == "llama":
            tiny_llama.make(folder)
        elif family == "drafter":
            tiny.make(folder, seed=5, head=False)
        else:
            tiny.make(folder, family)
    return folder


asked = st.builds(
    Asked,
    prompt=st.integers(0, len(PROMPTS) - 1),
    kind=st.integers(0, len(KINDS) - 1),
    max_tokens=st.integers(1, MAX_TOKENS),
)
options = st.fixed_dictionaries(
    {
        "max_rows": st.integers(1, 5),
        # The least is one context; more than a few hundred would never run out.
        "cache_tokens": st.sampled_from([112, 128, 160, 224, 400]),
        "chunk_tokens": st.sampled_from([1, 2, 3, 4, 5, 9, 16, 17, 40, 200]),
        "max_draft_tokens": st.sampled_from([1, 3, 8]),
        "prefix_cache": st.sampled_from([True, True, True, False]),
        "prefix_device_bytes": st.sampled_from([None, 0, 40_000, 200_000]),
        "prefix_host_bytes": st.sampled_from([None, 0, 100_000]),
        "proposer": st.sampled_from(
            ["auto", "mtp", "ngram", "ngram+mtp", "mtp>ngram", "draft", "ngram+draft"]
        ),
    }
)


class Schedules(RuleBasedStateMachine):
    """Each rule is something that can happen between two steps, or a few steps."""

    world: World

    @initialize(family=st.sampled_from(FAMILIES), depths=st.none() | st.integers(0, 9), options=options)
    def open(self, family, depths, options):
        if "draft" in options["proposer"]:
            options["drafter"] = str(folder_of("drafter"))
        self.world = World(folder_of(family), depths, **options)

    @rule(
        asked=asked,
        depth=st.integers(0, 8),
        adaptive=st.booleans(),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        tenant=st.sampled_from(["", "", "one", "two"]),
    )
    def join(self, asked, depth, adaptive, priority, tenant):
        depth = min(depth, self.world.engine.max_drafts)
        self.world.join(
            asked, draft_tokens=depth, adaptive=adaptive and depth > 0, priority=priority, tenant=tenant
        )

    @rule(asked=asked)
    def join_one_that_breaks_every_pass(self, asked):
        self.world.join(asked, cursed=True)

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            if self.world.engine.has_work:
                self.world.step()

    @precondition(lambda self: self.world.living)
    @rule(data=st.data())
    def cancel(self, data):
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.living))))

    @rule(
        stage=st.sampled_from(STAGES),
        late=st.booleans(),
        error=st.sampled_from([broken_kernel, out_of_memory]),
        times=st.sampled_from([1, 1, 1, 2, 3, 9]),
        spares=st.integers(0, 3),
    )
    def break_a_stage(self, stage, late, error, times, spares):
        self.world.armed.extend(Armed(stage, late, error, spares) for _ in range(times))

    @rule(stage=st.sampled_from(STAGES), late=st.booleans(), spares=st.integers(0, 3))
    def interrupt_a_step(self, stage, late, spares):
        self.world.armed.append(Armed(stage, late, KeyboardInterrupt, spares))

    @rule(value=st.sampled_from([float("nan"), float("inf")]), times=st.integers(1, 2))
    def poison(self, value, times):
        self.world.poisons.extend([value] * times)

    @rule()
    def evict_everything(self):
        self.world.engine.state.drop_cache()
        self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            try:
                self.world.finish()
            finally:
                self.world.close()


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Schedules,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


def test_random_schedules():
    run(examples=25, steps=14)


@pytest.mark.slow
def test_thousands_of_random_schedules():
    run(examples=3000, steps=30)
