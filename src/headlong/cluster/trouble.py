"""What Ray Serve's words say of an application: why its replicas do not load, and whether one may come by itself."""

import re

from ray import serve

_ERROR = re.compile(r"(?:headlong\.errors\.|ray\.)?(\w*(?:Error|Exception|Exit)\w*): (.+)")
DIED = "ActorDiedError()"
"""How Serve's message ends where a replica's process was killed before it served."""


def reason(message: str) -> str:
    """The last error that a traceback in Serve's message tells of."""
    found = [match for line in message.splitlines() if (match := _ERROR.search(line.strip()))]
    if not found:
        return " ".join(message.split())[:400]
    kind, words = found[-1].groups()
    return words if kind in ("ConfigError", "CheckpointError", "HeadError") else f"{kind}: {words}"


def trouble(app: str) -> str | None:
    """Why an application without replicas will stay so until somebody does something about it. None where it begins, or
    where its processes merely died: Serve starts others."""
    told = serve.status().applications.get(app)
    if told is None:
        return "it is not deployed any more"
    for one in told.deployments.values():
        if one.status_trigger == "REPLICA_STARTUP_FAILED" and not one.message.rstrip().endswith(DIED):
            return f"a replica could not load its model: {reason(one.message)}"
    return None
