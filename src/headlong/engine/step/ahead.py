"""The step that was launched before the last one was read, if there is one: a device need not wait for the host."""

from headlong.engine.scheduler import Scheduler
from headlong.engine.step.stepper import Launch
from headlong.engine.step.steppers import Steppers


class Ahead:
    """At most one step; only steps that are one CUDA graph can go ahead."""

    def __init__(self, scheduler: Scheduler, steppers: Steppers) -> None:
        self._scheduler, self._steppers = scheduler, steppers
        self.launch: Launch | None = None

    def take(self) -> Launch | None:
        """The step that is to be landed next; None where the next one is yet to be planned. One whose rows are all
        gone is not read at all."""
        launch, self.launch = self.launch, None
        if launch is None or not launch.is_awaited:
            return None
        self._scheduler.begin()
        return launch

    def offer(self, launch: Launch) -> None:
        """Launches the step after this one, where it can be told and can do without what this one gives."""
        graph = self._steppers.graph
        if graph is None or not launch.is_under_way:
            return
        plan = self._scheduler.plan_ahead(launch.plan)
        if plan is not None and graph.may_follow(launch, plan):
            self.launch = graph.launch(plan, goes_on=True)
