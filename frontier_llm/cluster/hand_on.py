"""What comes after a job whose run is not done: the same job requeued, or exactly one successor; and which hosts they avoid."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from frontier_llm import log
from frontier_llm.cluster import hostlist, run_dir, slurm
from frontier_llm.cluster.job_spec import Job
from frontier_llm.cluster.lead import measured_lead_s
from frontier_llm.cluster.rank_env import environ, environment
from frontier_llm.errors import FrontierError
from frontier_llm.files import write_atomically


def hand_on(job: Job) -> int:
    """Hand the rest of the run on, unless nobody wants that; the exit code of the batch script."""
    run_dir.add_bad_hosts(job.directory, job.too_slow)
    if job.continue_with == "never":
        log.info("not continued: FRONTIER_LLM_CONTINUE=never")
    elif job.continue_with == "requeue" and not job.untrusted:  # a requeued job may get the same nodes again, a new one excludes them
        _requeue(job.allocation.job_id)
    elif queued := successor(job.directory):
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


def _queue_successor(job: Job) -> str:
    """The id of a job made by the run's own script; it starts when this one has ended, on none of the bad hosts."""
    script, bad = job.directory / "job.sbatch", run_dir.bad_hosts(job.directory)
    if not script.is_file():
        fix = "start the run with frontier-llm submit, or use FRONTIER_LLM_CONTINUE=requeue"
        if bad:
            fix = f"submit again, with sbatch --exclude={hostlist.compress(bad)} or with frontier-llm submit, which excludes them itself"
        raise FrontierError(f"there is no {script}", fix, "successor")
    lead_s = measured_lead_s(job.directory) or round(job.lead_s)
    options = [f"--dependency=afterany:{job.allocation.job_id}", f"--chdir={os.getcwd()}", "--parsable", f"--signal=USR1@{lead_s}"]
    options += [f"--exclude={hostlist.compress(bad)}"] if bad else []
    options += [f"--account={account}"] if (account := environ("SLURM_JOB_ACCOUNT")) else []
    variables = {**environment(), "FRONTIER_LLM_SIGNAL_LEAD_S": str(lead_s)}
    job_id = slurm.call(["sbatch", *options, str(script)], env=variables).strip().split(";")[0]
    write_atomically(job.directory / "successor", job_id + "\n")
    return job_id


def successor(directory: Path) -> str | None:
    """The id of the queued or running successor, if there is one besides the asking job."""
    path = directory / "successor"
    if not path.is_file():
        return None
    job_id = path.read_text(encoding="utf-8").strip()
    return job_id if job_id != environ("SLURM_JOB_ID") and slurm.is_active(job_id) else None
