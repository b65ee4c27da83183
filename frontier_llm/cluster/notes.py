"""What is allowed and may not be meant: each function gives a warning, or '' where there is nothing to say."""

from __future__ import annotations

import sys

from frontier_llm.cluster.submit import JobRequest
from frontier_llm.config import saves_nothing
from frontier_llm.run.rank_env import environ

MANY_NODES = 8  # whose start OLCF has measured


def scratch_note(request: JobRequest) -> str:
    """A warning when the run directory is not on the site's scratch filesystem; '' when it is, or when nobody can
    tell.
    """
    scratch = request.site.scratch_dir(request.account or "", environ("USER") or "")
    directory = request.job.directory
    if scratch is None or directory.is_relative_to(scratch):
        return ""
    return f"{directory} is not on {scratch}, which is made for checkpoints: train.run_dir={scratch / directory.name}"


def quota_note(request: JobRequest, checkpoint_bytes: float) -> str:
    """A warning when the checkpoints that lie there at the same time come near the project's quota: statvfs sees the
    whole file system.
    """
    train = request.config.train
    quota_tb = request.site.scratch_quota_tb
    if quota_tb is None or not request.saves or saves_nothing(train):
        return ""
    forever = train.steps // train.keep_every if train.keep_every else 0
    held_tb = (forever + train.keep_checkpoints + 1) * checkpoint_bytes / 1e12  # one more while it is written
    if held_tb <= 0.8 * quota_tb:  # the rest is for data, logs and other runs
        return ""
    return (
        f"up to {forever + train.keep_checkpoints + 1} checkpoints of {checkpoint_bytes / 1e12:.1f} TB are "
        f"{held_tb:.0f} TB at the same time; "
        f"a project may keep {quota_tb:.0f} TB on {request.site.name}'s scratch unless it has asked for more "
        f"(train.keep_checkpoints, train.keep_every)"
    )


def start_note(request: JobRequest) -> str:
    """A warning when the ranks of many nodes would all read torch's thousands of files from the shared file system."""
    elsewhere = request.site.container or environ("FRONTIER_LLM_CONTAINER") or environ("FRONTIER_LLM_ENV_ARCHIVE")
    if elsewhere or request.site.bind != "gcd" or request.job.all_nodes <= MANY_NODES:
        return ""
    return (
        f"{request.job.all_nodes} nodes will import torch from {environ('FRONTIER_LLM_PYTHON') or sys.executable}: on "
        f"Frontier eight took 51 s from "
        "Orion, 4 min from NFS and 2 s from their own disks. Export FRONTIER_LLM_ENV_ARCHIVE=ENV.tar.gz "
        "(docs/frontier.md, section 1) or "
        "FRONTIER_LLM_CONTAINER"
    )


def device_note(request: JobRequest) -> str:
    """A warning when the ranks of a site with GPUs would compute on its processors, or in wide types: left over from
    a test at home.
    """
    dtype = request.config.precision.dtype
    if request.site.bind != "gcd":
        return ""
    if request.config.train.device == "cpu":
        return (
            f"train.device=cpu leaves the GPUs of {request.site.name} idle, and the job is charged for them; take "
            f"the key out, or set train.device=auto"
        )
    if dtype in ("fp32", "fp64"):  # MI250X: 95.7 TFLOP/s of matrices either way, 383 in bf16 (AMD's data sheet)
        return (
            f"precision.dtype={dtype} has a quarter of the matrix rate of bf16 on {request.site.name} and larger "
            f"activations; set precision.dtype=bf16"
        )
    return ""
