"""What a cluster runs of Headlong: its models and their replicas."""

from dataclasses import dataclass

from ray import serve

from headlong.cluster.app import DEPLOYMENT, PREFIX
from headlong.cluster.ray_fleet import RayFleet
from headlong.cluster.wire import Report


@dataclass(frozen=True)
class App:
    """One model on a cluster, as Serve and its replicas tell of it."""

    name: str
    status: str
    message: str
    reports: tuple[Report, ...]


def apps() -> list[App]:
    """The models that the connected cluster runs."""
    found = []
    for name, told in serve.status().applications.items():
        if name.startswith(PREFIX):
            runs = told.status == "RUNNING"
            handle = serve.get_deployment_handle(DEPLOYMENT, name) if runs else None
            reports = () if handle is None else tuple(RayFleet(handle).reports())
            found.append(App(name, str(told.status.value), told.message, reports))
    return found


def delete(names: list[str]) -> None:
    """Ends models; replicas finish what they have, within their time."""
    for name in names:
        serve.delete(name)
