#!/bin/bash
# Runs in the batch shell of every job: site environment, Python, then the supervisor that starts the ranks with srun.
#     job.sh SITE MODULE [WORD ...]
#     job.sh SITE --as-rank MODULE [WORD ...]     in the interpreter of the ranks, outside of a job: reports what is
#                                                 installed there
#     job.sh SITE --rank-python MODULE [WORD ...] in the interpreter of the ranks, in a job: for a program without srun
# FRONTIER_LLM_PYTHON       the interpreter (default: the interpreter of the environment that was active at sbatch,
#                           otherwise python3 after the site's modules are loaded)
# FRONTIER_LLM_CONTAINER    an Apptainer image: the ranks use its Python. This shell uses the host's Python, which needs
#                           no torch. From 1,024 nodes on, an image *.sif is copied to every node's local disk
# FRONTIER_LLM_ENV_ARCHIVE  a conda-pack or venv-pack .tar.gz: copied to every node's local disk and used from there
set -euo pipefail

site="$1"
shift
as_rank=""
rank_python=""
case "${1:-}" in
    --as-rank)
        as_rank=yes
        shift
        ;;
    --rank-python)
        rank_python=yes
        shift
        ;;
esac
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [[ ! "$site" =~ ^[A-Za-z0-9_-]+$ || ! -r "$root/slurm/sites/$site.sh" ]]; then
    echo "job.sh: no slurm/sites/$site.sh; render it with python -m frontier_llm.cluster.sbatch" >&2
    exit 2
fi
# read before modules are loaded, because a module's Python would precede this one on PATH
active="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}"
# `|| true` here and below: grep ends with 1 if it finds nothing, which is not an error here
pattern='^declare -x ((FI|GLOO|HSA|MIOPEN|NCCL|PYTORCH|TORCH)_|CUDA_DEVICE_MAX|GPU_MAX_HW|OMP_NUM)'
exported="$(export -p | grep -E "$pattern" || true)"
names() { sed -nE 's/^declare -x ([A-Z0-9_a-z]+).*/\1/p' <<<"$1"; } # names of the variables in lines of export -p
while read -r name; do unset "$name"; done < <(names "$exported" | grep . || true)
set +u # Lmod reads variables that may be unset
# shellcheck source=/dev/null
. "$root/slurm/sites/$site.sh" || {
    echo "job.sh: cannot set up the environment of site $site on $(hostname); see \`module avail\`," \
        "and correct slurm/sites/$site.yaml" >&2
    exit 2
}
set -u
# A value that the user has exported replaces a module's value. If an exported value equals the module's value
# (FRONTIER_LLM_FROM_MODULES, from the site's file), it counts as set by the module, not by the user: the module was
# also loaded before sbatch.
of_user="$(grep -vxFf <(printf '%s\n' "${FRONTIER_LLM_FROM_MODULES:-none}") <<<"$exported" || true)"
eval "$of_user"
# Names for the origins that rank 0 logs (topology/rank_variables.py).
FRONTIER_LLM_USER_VARIABLES="$(names "$of_user" | paste -sd' ')"
of_modules="$(grep -E "$pattern" <<<"${FRONTIER_LLM_FROM_MODULES:-}" || true)"
FRONTIER_LLM_MODULE_VARIABLES="$(names "$of_modules" | paste -sd' ')"
export FRONTIER_LLM_USER_VARIABLES FRONTIER_LLM_MODULE_VARIABLES
unset FRONTIER_LLM_FROM_MODULES

python="${FRONTIER_LLM_PYTHON:-${active:+$active/bin/python3}}"
python="${python:-python3}"
# --as-rank does not unpack the archive, but checks the active environment, from which the archive was packed
if [[ -n "${FRONTIER_LLM_ENV_ARCHIVE:-}" && -z "$as_rank" ]]; then
    unpacked="$("$root/launch/broadcast_env.sh" "$FRONTIER_LLM_ENV_ARCHIVE" "${@:2}")"
    python="$(sed -n 1p <<<"$unpacked")"
    FRONTIER_LLM_BROKEN_NODES="$(sed -n 2p <<<"$unpacked")" # spares take their place (cluster/slurm.py)
    export FRONTIER_LLM_BROKEN_NODES
    export PYTHONNOUSERSITE=1 # without this, packages in ~/.local, on NFS, would precede the archive's packages
fi
if ! command -v "$python" >/dev/null; then
    echo "job.sh: no $python on $(hostname); export FRONTIER_LLM_PYTHON=/path/to/python" >&2
    exit 2
fi
needs='import importlib.util, sys
sys.exit(sys.version_info < (3, 11) or not all(map(importlib.util.find_spec, ("numpy", "pydantic", "yaml"))))'
if ! "$python" -c "$needs"; then
    echo "job.sh: $(command -v "$python") ($("$python" -V)) is older than 3.11 or lacks numpy, pydantic or pyyaml;" \
        "activate the environment of frontier_llm before sbatch, or export FRONTIER_LLM_PYTHON=/path/to/python" >&2
    exit 2
fi
if [[ -n "${FRONTIER_LLM_CONTAINER:-}" ]]; then
    nodes="${SLURM_JOB_NUM_NODES:-1}"
    # from this number of nodes on, each node gets a copy: reading one image would overload the file system
    from="${FRONTIER_LLM_BROADCAST_NODES:-1024}"
    if [[ "$FRONTIER_LLM_CONTAINER" == *.sif && -z "$as_rank" && "$nodes" -ge "$from" ]]; then
        copied="$("$root/launch/broadcast_env.sh" "$FRONTIER_LLM_CONTAINER" "${@:2}")"
        export FRONTIER_LLM_SHARED_CONTAINER="$FRONTIER_LLM_CONTAINER" # for the next job (cluster/slurm.py)
        FRONTIER_LLM_CONTAINER="$(sed -n 1p <<<"$copied")"
        FRONTIER_LLM_BROKEN_NODES="$(sed -n 2p <<<"$copied")" # spares take their place (cluster/slurm.py)
        export FRONTIER_LLM_CONTAINER FRONTIER_LLM_BROKEN_NODES
    fi
    export FRONTIER_LLM_RANK_PYTHON="$root/launch/container_python.sh"
fi
export FRONTIER_LLM_PYTHON="$python" FRONTIER_LLM_SITE="$site" FRONTIER_LLM_ROOT="$root"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [[ -n "$as_rank$rank_python" ]]; then
    exec "${FRONTIER_LLM_RANK_PYTHON:-$python}" -P -m "$@"
fi
# -P: import the code of this root, not of the working directory, which may have changed since the job was queued
exec "$python" -P -m "$@"
