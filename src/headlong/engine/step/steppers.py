"""The ways to run steps that an engine has, and which one a plan takes."""

from dataclasses import dataclass

from headlong.engine.runner import Runner
from headlong.engine.step.device import DeviceStages
from headlong.engine.step.grammar import GrammarStepper
from headlong.engine.step.graph import GraphStepper
from headlong.engine.step.host import HostStepper
from headlong.engine.step.stepper import Stepper
from headlong.sampling.sampler import Sampler
from headlong.speculate.proposer import Proposer
from headlong.types import Plan


@dataclass
class Steppers:
    """The host takes any plan; a device, where there is one that can, takes what it can without asking the host."""

    host: HostStepper
    graph: GraphStepper | None = None
    grammar: GrammarStepper | None = None

    def choose(self, plan: Plan) -> Stepper:
        """Who runs this step; the tokens are the same whoever does."""
        for stepper in (self.graph, self.grammar):
            if stepper is not None and stepper.takes(plan):
                return stepper
        return self.host


def make_steppers(runner: Runner, proposer: Proposer, sampler: Sampler, max_len: int) -> Steppers:
    """Steps can be CUDA graphs with Triton's kernels, where the drafter drafts on the device or there is none."""
    host, drafter = HostStepper(runner, proposer, sampler), proposer.device_drafter
    if runner.model.asks_host or (drafter is None and proposer.max_drafts):
        return Steppers(host)
    stages = DeviceStages(runner.model, runner.state, sampler, drafter, max_len)
    return Steppers(host, GraphStepper(stages), GrammarStepper(stages))
