"""Every group is used once at the start, one after the other, each within a time limit.

A communicator is made at its first use, and there things hang: on LUMI the first collective of a second group in 13 of
17 starts, always where several groups met for the first time at once. Found here, the group has a name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait

import torch

from frontier_llm.comm.group import Group, listed
from frontier_llm.errors import RankFailure
from frontier_llm.failpoints import hit
from frontier_llm.run.threads import in_daemon

# of one group, or nine tenths of its own time-out: the back-end would end the process then, without naming the group
LIMIT_S = 180.0
_REMEDY = (
    "start again: such hangs come and go. Again the same group: leave out a node that is in it (slurm --exclude), "
    "see that the network's plugin "
    "is loaded (frontier-llm doctor), and on Slingshot that FI_MR_CACHE_MONITOR is what docs/lumi.md says; LIMIT: "
    "train.timeout_s"
)


def first_use(
    limit_s: float,
    name: str,
    ranks: Sequence[int],
    device: torch.device,
    work: Callable[[], object],
) -> None:
    """Do the first communication of a group. Raises RankFailure naming it where that takes longer than `limit_s`.

    It is done in a thread, because making a communicator blocks the host where nothing can interrupt it.
    """
    gpu = torch.cuda.current_device() if device.type == "cuda" else None  # a new thread begins with the first

    def run() -> None:
        if gpu is not None:
            torch.cuda.set_device(gpu)
        hit(f"comm.warm_up.{name}")
        work()
        if gpu is not None:
            torch.cuda.synchronize(gpu)

    future = in_daemon(run, f"warm-up of {name}")
    if not wait([future], limit_s).done:
        what = f"the first communication of axis {name} among {listed(ranks)} did not end within {limit_s:.0f} s"
        raise RankFailure(what, fix=_REMEDY.replace("LIMIT", f"a limit of more than {limit_s:.0f} s"))
    future.result()


def warm_up(name: str, ranks: Sequence[int], group: Group, device: torch.device, timeout_s: float) -> None:
    """One element summed over the group."""
    one = torch.zeros(1, device=device)
    first_use(min(LIMIT_S, 0.9 * timeout_s), name, ranks, device, lambda: group.start_all_reduce_(one, "sum").wait())
