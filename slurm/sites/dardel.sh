# Modules and environment of dardel, sourced by launch/job.sh.
# Rendered from slurm/sites/dardel.yaml by `python -m frontier_llm.cluster.sbatch`; change that and render again.
# shellcheck shell=bash disable=SC2034
module load PDC/24.11 || {
    echo 'the module PDC/24.11 cannot be loaded' >&2
    return 2
}
module load rocm/6.3.3 || {
    echo 'the module rocm/6.3.3 cannot be loaded' >&2
    return 2
}
module load craype-accel-amd-gfx90a || {
    echo 'the module craype-accel-amd-gfx90a cannot be loaded' >&2
    return 2
}
FRONTIER_LLM_FROM_MODULES="$(export -p)" # launch/job.sh takes these values for the modules', not the user's
export FRONTIER_LLM_BIND=none
export FRONTIER_LLM_NODE_LOCAL=/tmp
