"""What comes after a job whose run is not done: the same job requeued, or exactly one successor; and which hosts
they avoid.
"""

from __future__ import annotations

import sys
import time

from frontier_llm import log
from frontier_llm.cluster import slurm
from frontier_llm.cluster.job_spec import BatchJob
from frontier_llm.cluster.lead import measured_lead_s
from frontier_llm.cluster.submit import SCRIPT, queue, sbatch_command
from frontier_llm.errors import FrontierError
from frontier_llm.run import hostlist, run_dir
from frontier_llm.run.rank_env import environ


def hand_on(job: BatchJob) -> int:
    """Hand the rest of the run on, unless nobody wants that; the exit code of the batch script."""
    run_dir.add_bad_hosts(job.directory, job.too_slow)
    if job.continue_with == "never":
        log.info("not continued: FRONTIER_LLM_CONTINUE=never")
    # a requeued job may get the same nodes again, a new one excludes them
    elif job.continue_with == "requeue" and not job.untrusted:
        _requeue(job.allocation.job_id)
    elif (queued := run_dir.queued_job(job.directory)) not in ("", job.allocation.job_id) and slurm.is_active(queued):
        log.info(f"successor {queued} is already queued")
    else:
        log.info(f"successor {_queue_successor(job)} is queued")
    return 0


def _requeue(job_id: str) -> None:
    log.info(f"requeueing job {job_id}")
    sys.stderr.flush()
    slurm.requeue(job_id)
    time.sleep(120)  # Slurm ends this shell
    raise FrontierError(f"job {job_id} was requeued but is still here", "scancel it", "scontrol requeue")


def _queue_successor(job: BatchJob) -> str:
    """The id of a job made by the run's own script; it starts when this one has ended, on none of the bad hosts."""
    script = job.directory / SCRIPT
    bad = run_dir.bad_hosts(job.directory)
    if not script.is_file():
        fix = "start the run with frontier-llm submit, or use FRONTIER_LLM_CONTINUE=requeue"
        if bad:
            fix = (
                f"submit again, with sbatch --exclude={hostlist.compress(bad)} or with frontier-llm submit, which "
                f"excludes them itself"
            )
        raise FrontierError(f"there is no {script}", fix, "successor")
    lead_s = measured_lead_s(job.directory) or round(job.lead_s)
    options = {
        # where this job runs and whom it is charged to: `submit` has said so beside the script, not in it
        **{name: environ(f"SLURM_JOB_{name.upper()}") for name in ("account", "partition", "qos")},
        "dependency": f"afterany:{job.allocation.job_id}",
        "signal": f"USR1@{lead_s}",
        "exclude": hostlist.compress(bad),
    }
    return queue(job.directory, sbatch_command(job.directory, options), {"FRONTIER_LLM_SIGNAL_LEAD_S": str(lead_s)})
