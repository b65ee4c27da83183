"""Detects failures of a training run: dead or stuck ranks, loss spikes, silent data corruption, collapsed routers.

Watchdog          detects a rank that died, stopped or hangs; `cause` finds the rank that failed first
RequestCollector  collects stop and save requests: signals and the files STOP and SAVE
SpikePolicy       compares each step's loss and gradient norm with earlier steps
Skips             decides how the run continues after a skipped step
Decisions         records the decisions of Skips in `decisions.jsonl`
ReplicaCheck      compares copies of weights and state that must be bit-equal
RouterWatch       reports a router that sends nearly all tokens to one expert
Recompute         computes one step twice on every replica and compares the results
RetryWatch        ends a start whose memory is too tight, if the job has a plan that needs less memory (`retries`)
provenance        returns the versions of code and libraries, and the device, for checkpoints
"""

from frontier_llm.training.guard.recompute import Recompute, WrongArithmetic
from frontier_llm.training.guard.replicas import ReplicaCheck, ReplicaDrift
from frontier_llm.training.guard.skips import Decisions, Skips, SpikePolicy
from frontier_llm.training.guard.stop_requests import RequestCollector, Requests
from frontier_llm.training.guard.watchdog import Watchdog
from frontier_llm.training.routing import RouterWatch

__all__ = [
    "Decisions",
    "Recompute",
    "ReplicaCheck",
    "ReplicaDrift",
    "RequestCollector",
    "Requests",
    "RouterWatch",
    "Skips",
    "SpikePolicy",
    "Watchdog",
    "WrongArithmetic",
]
