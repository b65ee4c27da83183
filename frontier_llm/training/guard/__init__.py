"""What keeps a run alive and honest: nothing here trains.

Watchdog      sees a rank that died, froze or hangs, and has the first to fail named (`cause`)
Wishes        signals and the files STOP and SAVE, told to all ranks by the step's sum
SpikePolicy   judges each step's loss and gradient norm; Skips decides what follows, Decisions writes it down
ReplicaCheck  compares the copies of weights that must be bit-equal
RouterWatch   says which router sends all tokens to one expert
Recompute     computes one step twice on every replica and compares
provenance    which code, libraries and device this is
"""

from frontier_llm.training.guard.provenance import provenance
from frontier_llm.training.guard.recompute import Recompute, WrongArithmetic
from frontier_llm.training.guard.replicas import ReplicaCheck, ReplicaDrift
from frontier_llm.training.guard.skips import Decisions, Skips
from frontier_llm.training.guard.spikes import SpikePolicy
from frontier_llm.training.guard.watchdog import Watchdog
from frontier_llm.training.guard.wishes import Wish, Wishes
from frontier_llm.training.routing import RouterWatch

__all__ = [
    "Decisions",
    "Recompute",
    "ReplicaCheck",
    "ReplicaDrift",
    "RouterWatch",
    "Skips",
    "SpikePolicy",
    "Watchdog",
    "Wish",
    "Wishes",
    "WrongArithmetic",
    "provenance",
]
