"""What handlers share: one per application, at `request.app.state.server`."""

import time
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from headlong.server.admission_limit import AdmissionLimit
from headlong.server.auth import Auth
from headlong.server.compilers import Compilers
from headlong.server.error_counts import ErrorCounts
from headlong.server.key_limits import KeyLimits
from headlong.server.left_out import LeftOut
from headlong.server.observer import Observer
from headlong.server.pool import ModelPool
from headlong.server.response_store import ResponseStore
from headlong.server.settings import Settings


@dataclass(frozen=True)
class Server:
    settings: Settings
    pool: ModelPool
    auth: Auth
    limit: AdmissionLimit
    observer: Observer
    errors: ErrorCounts
    registry: CollectorRegistry
    responses: ResponseStore
    keys: KeyLimits
    left_out: LeftOut = field(default_factory=LeftOut)
    compilers: Compilers = field(default_factory=Compilers)
    started: float = field(default_factory=time.monotonic)
