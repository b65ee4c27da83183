# Modules and environment of setonix, sourced by launch/job.sh.
# Rendered from slurm/sites/setonix.yaml by `python -m frontier_llm.cluster.sbatch`; change that and render again.
# shellcheck shell=bash disable=SC2034
module load PrgEnv-cray || {
    echo 'the module PrgEnv-cray cannot be loaded' >&2
    return 2
}
module load rocm || {
    echo 'the module rocm cannot be loaded' >&2
    return 2
}
module load craype-accel-amd-gfx90a || {
    echo 'the module craype-accel-amd-gfx90a cannot be loaded' >&2
    return 2
}
FRONTIER_LLM_FROM_MODULES="$(export -p)" # launch/job.sh takes these values for the modules', not the user's
export FRONTIER_LLM_BIND=none
export FRONTIER_LLM_NODE_LOCAL=/tmp
