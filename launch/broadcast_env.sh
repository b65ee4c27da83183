#!/bin/bash
# Copy an environment archive or a container image to the local disk of each node of the job. An archive is unpacked
# there. Prints the path of the archive's Python, or of the image. A second line lists the nodes on which the copy
# failed. The script fails if these nodes are more than the job's spare nodes.
# Measured on Frontier (OLCF): 8 nodes import torch in 2 s from NVMe, 51 s from Orion, 3 min 56 s from NFS.
#     broadcast_env.sh ENV.tar.gz|IMAGE.sif [WORD ...]
# WORD: the words of the job. They determine the number of spare nodes: job.spares=N, otherwise "spares" in job.json of
# --run-dir=DIR, otherwise FRONTIER_LLM_SPARE_NODES.
set -euo pipefail

archive="$1"
shift
spares="${FRONTIER_LLM_SPARE_NODES:-0}"
for word in "$@"; do
    case "$word" in
        --run-dir=*)
            recorded="$(sed -nE 's/^ *"spares": ([0-9]+),?$/\1/p' "${word#*=}/job.json" 2>/dev/null || true)"
            spares="${recorded:-$spares}"
            ;;
        job.spares=*) spares="${word#*=}" ;;
    esac
done
if [[ ! "$spares" =~ ^[0-9]+$ ]]; then
    echo "broadcast_env.sh: $spares is not a number of spare nodes; write job.spares=N" >&2
    exit 2
fi
# a folder for this job alone: its name cannot be predicted, and mode 700 keeps other users out
random="$(od -An -N8 -tx1 /dev/urandom | tr -d ' \n')"
target="${FRONTIER_LLM_NODE_LOCAL:-/tmp}/frontier_llm_env_${SLURM_JOB_ID:?run this inside a Slurm job}_$random"
if [[ ! -r "$archive" ]]; then
    echo "broadcast_env.sh: cannot read $archive; make it with conda-pack -o ENV.tar.gz" >&2
    exit 2
fi
copy="$target/env.tar.gz"
if [[ "$archive" == *.sif ]]; then copy="$target/image.sif"; fi
all="$(scontrol show hostnames "${SLURM_JOB_NODELIST:?}" | sort)"
# srun refuses a step that includes a lost node; a draining node can still run the step
lost_states=down,fail,unknown,no_respond
gone="$(sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --states="$lost_states" --format=%N | sort -u)"
here="$(comm -23 <(echo "$all") <(echo "$gone"))"
# Print the nodes on which the command succeeded. srun prints the error of each other node. The end of this script
# compares the number of failed nodes with the spares.
on_every_node() {
    local nodes count
    nodes="$(paste -sd, <<<"$here")"
    count="$(wc -l <<<"$here")"
    # the single quotes keep $SLURMD_NODENAME until the command runs on its node
    # shellcheck disable=SC2016
    srun --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --nodelist="$nodes" --gpus-per-node=0 \
        --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" --cpu-bind=none --kill-on-bad-exit=0 \
        bash -c '"$@" >&2 && echo "$SLURMD_NODENAME"' run "$@" | sort -u || true
}
here="$(on_every_node mkdir -m 700 "$target")" # without -p, so that it fails if the folder already exists
status=0
# If sbcast fails on one node, it continues with the others. Unpacking then fails on the node with the incomplete
# archive.
sbcast --preserve --force "$archive" "$copy" >&2 || status=$?
# gzip uses one core; pigz uses one core each for reading, checking and writing
# the single quotes keep $1 for the inner shell
# shellcheck disable=SC2016
here="$(on_every_node bash -c 'set -e
    if [[ "$2" == *.sif ]]; then # an image is not unpacked; only its size is checked
        [[ "$(stat -c %s "$1/image.sif")" == "$(stat -c %s "$2")" ]]
        exit
    fi
    unpack=(tar --no-overwrite-dir -C "$1" -xf "$1/env.tar.gz") # the entry "." must not set the mode
    if command -v pigz >/dev/null; then "${unpack[@]}" --use-compress-program="pigz -d"; else "${unpack[@]}" --gzip; fi
    rm -f "$1/env.tar.gz"
    if [[ -x "$1/bin/conda-unpack" ]]; then "$1/bin/conda-unpack"; fi' unpack "$target" "$archive")"
missing="$(comm -23 <(echo "$all") <(echo "$here") | paste -sd,)"
count="$(comm -23 <(echo "$all") <(echo "$here") | grep -c . || true)"
if [[ "$count" -gt "$spares" ]]; then
    echo "broadcast_env.sh: $missing did not get the environment (sbcast ended with $status), and the job has only" \
        "$spares spares; check that $(dirname "$target") has room for $(stat -c %s "$archive") bytes on every node" >&2
    exit 1
fi
if [[ "$archive" == *.sif ]]; then echo "$copy"; else echo "$target/bin/python"; fi
echo "$missing"
