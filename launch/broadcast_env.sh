#!/bin/bash
# Copy an environment archive to the local disk of every node of the job and unpack it there; prints its Python.
# Measured on Frontier (OLCF): 8 nodes import torch in 2 s from NVMe, 51 s from Orion, 3 min 56 s from NFS.
#     broadcast_env.sh ENV.tar.gz
set -euo pipefail

archive="$1"
# a folder of this job alone: nobody else on a node can know its name beforehand, nor look or write into it
target="${FRONTIER_LLM_NODE_LOCAL:-/tmp}/frontier_llm_env_${SLURM_JOB_ID:?runs inside a job}_$(od -An -N8 -tx1 /dev/urandom | tr -d ' \n')"
if [[ ! -r "$archive" ]]; then
    echo "broadcast_env.sh: cannot read $archive; make it with conda-pack -o ENV.tar.gz" >&2
    exit 2
fi
on_every_node() {
    srun --nodes="${SLURM_JOB_NUM_NODES:?}" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --gpus-per-node=0 --kill-on-bad-exit=1 "$@" >&2
}
on_every_node mkdir -m 700 "$target" # without -p: fails when it is there already
# sbcast may fail on one node and go on: its exit code is the only sign
status=0
sbcast --preserve --force "$archive" "$target/env.tar.gz" >&2 || status=$?
if [[ "$status" -ne 0 ]]; then
    echo "broadcast_env.sh: sbcast ended with $status; is there room for $(stat -c %s "$archive") bytes in $(dirname "$target") on every node?" >&2
    exit "$status"
fi
# $1 belongs to the inner shell
# shellcheck disable=SC2016
on_every_node bash -c 'set -e
    tar --no-overwrite-dir -xzf "$1/env.tar.gz" -C "$1" # or its entry "." would set the mode
    rm -f "$1/env.tar.gz"
    if [[ -x "$1/bin/conda-unpack" ]]; then "$1/bin/conda-unpack"; fi' unpack "$target"
echo "$target/bin/python"
