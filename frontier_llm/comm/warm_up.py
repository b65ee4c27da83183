"""Warm-up of process groups: every group runs its first collective at the start of a job, one group after the other.

RCCL creates a communicator at its first collective, and this can hang. On LUMI the first collective of a second group
hung in 13 of 17 starts (docs/lumi.md). This happened only if several groups had their first collective at the same
time. Each first collective has a time limit, and the error names the process group that hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait

import torch

from frontier_llm.comm.group import Group, listed
from frontier_llm.errors import RankFailure
from frontier_llm.failpoints import hit
from frontier_llm.run.threads import in_daemon

# Time limit for one group. The limit is at most nine tenths of the group's time-out, because at the time-out the
# back-end ends the process without naming the group.
LIMIT_S = 180.0
_REMEDY = (
    "start again, because such hangs are intermittent. If the same group hangs again, exclude one of its nodes "
    "(sbatch --exclude), check that the network's plugin is loaded (frontier-llm doctor), and on Slingshot that "
    "FI_MR_CACHE_MONITOR has the value in docs/lumi.md. For LIMIT, raise train.timeout_s"
)


def first_use(
    limit_s: float,
    name: str,
    ranks: Sequence[int],
    device: torch.device,
    work: Callable[[], object],
) -> None:
    """Run `work`, the first communication of a group. Raises RankFailure with the group's name after `limit_s`.

    `work` runs in a thread, because the host cannot interrupt the call that makes a communicator.
    """
    gpu = torch.cuda.current_device() if device.type == "cuda" else None  # without this, a new thread would use GPU 0

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
    """Sum one element over the group. Raises RankFailure if this exceeds the group's time limit."""
    one = torch.zeros(1, device=device)
    first_use(min(LIMIT_S, 0.9 * timeout_s), name, ranks, device, lambda: group.start_all_reduce_(one, "sum").wait())
