"""One model of one engine replica: block pool, batch scheduler, latency model; on any clock."""

from scout_server.replica.batch import Batch, BatchSettings
from scout_server.replica.hashing import block_hashes, extend_hashes
from scout_server.replica.hooks import (
    Admission,
    AdmitAll,
    FcfsQueue,
    KeyedQueue,
    LastVictim,
    SchedulerView,
    VictimChoice,
    WaitingQueue,
)
from scout_server.replica.latency import LatencyModel, LinearLatency, SpanLatency, StepBatch
from scout_server.replica.pool import BlockPool, EvictionHook
from scout_server.replica.replica import Replica, RequestTooLargeError
from scout_server.replica.request import Request, State
from scout_server.replica.results import Counters, StepResult
from scout_server.replica.scheduler import BatchScheduler

__all__ = [
    "Admission",
    "AdmitAll",
    "Batch",
    "BatchScheduler",
    "BatchSettings",
    "BlockPool",
    "Counters",
    "EvictionHook",
    "FcfsQueue",
    "KeyedQueue",
    "LastVictim",
    "LatencyModel",
    "LinearLatency",
    "Replica",
    "Request",
    "RequestTooLargeError",
    "SchedulerView",
    "SpanLatency",
    "State",
    "StepBatch",
    "StepResult",
    "VictimChoice",
    "WaitingQueue",
    "block_hashes",
    "extend_hashes",
]
