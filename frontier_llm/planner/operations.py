"""Duration of a complete training run with a plan (a campaign), its checkpoint interval, and the time lost to
failures.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from frontier_llm.blueprint.optimizers import state_bytes
from frontier_llm.blueprint.parameters import total_parameters
from frontier_llm.machine.schema import Machine, QueueBin
from frontier_llm.planner.search import Plan

# number of training tokens per parameter if the user gives no number of tokens (Hoffmann et al. 2022)
TOKENS_PER_PARAMETER = 20


@dataclass(frozen=True)
class Campaign:
    """Duration of a training run of `tokens` tokens on a machine, with the time lost to failures and saves."""

    tokens: float
    days: float  # without the time lost to failures and saves
    node_hours: float  # without the time lost to failures and saves
    mtbf_hours: float  # mean time between failures of the complete job
    save_s: float  # time to write one checkpoint
    interval_s: float  # time between checkpoints (Young/Daly)
    interval_steps: int
    effective: float  # fraction of the wall-clock time in which training advances
    calendar_days: float  # days / effective, without the time in the queue
    queue: QueueBin | None

    @property
    def jobs(self) -> int:
        """Number of consecutive jobs that the run needs under the walltime limit of the queue; 1 without a limit."""
        if self.queue is None:
            return 1
        return max(1, round(self.calendar_days * 24 / self.queue.max_hours + 0.5))


def campaign(machine: Machine, plan: Plan, tokens: float | None) -> Campaign | None:
    """Return the campaign of a training run, or None if the machine file has no failure rates and queue limits.

    By default the run trains TOKENS_PER_PARAMETER tokens per parameter. The interval sqrt(2·t_save·MTBF) minimises the
    expected loss t_save/interval + interval/(2·MTBF) (Young 1974, Daly 2006). A failure costs half an interval and a
    restart. The end of a job by walltime costs a save and a restart.
    """
    site = machine.operations
    if site is None:
        return None
    step_s = plan.step_s
    nodes = plan.layout.devices / machine.devices_per_node
    tokens = tokens or TOKENS_PER_PARAMETER * total_parameters(plan.model)
    busy_s = tokens / plan.step_tokens * step_s
    mtbf_s = site.device_mtbf_hours.value * 3600 / plan.layout.devices
    write = min(site.checkpoint_gbps_total.value, nodes * site.checkpoint_gbps_per_node.value) * 1e9
    save_s = state_bytes(plan.model, plan.layout.optimizer, plan.layout.dtype) / write
    interval_s = max(sqrt(2 * save_s * mtbf_s), step_s)
    restart_s = site.restart_minutes.value * 60
    queue = next((entry for entry in site.queue if entry.nodes_from <= nodes <= entry.nodes_to), None)
    lost = save_s / interval_s + (interval_s / 2 + restart_s) / mtbf_s
    if queue:
        lost += (restart_s + save_s) / (queue.max_hours * 3600)
    effective = max(1 - lost, 0.0) if lost < 1 else 1 / (1 + lost)
    days = busy_s / 86400
    return Campaign(
        tokens=tokens,
        days=days,
        node_hours=days * 24 * nodes,
        mtbf_hours=mtbf_s / 3600,
        save_s=save_s,
        interval_s=interval_s,
        interval_steps=max(1, round(interval_s / step_s)),
        effective=effective,
        calendar_days=days / effective,
        queue=queue,
    )
