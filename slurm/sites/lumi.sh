# Modules and environment of lumi, sourced by launch/job.sh.
# Rendered from slurm/sites/lumi.yaml by `python -m frontier_llm.cluster.sbatch`; change that and render again.
# shellcheck shell=bash disable=SC2034
module use /appl/local/laifs/modules
module load lumi-aif-singularity-bindings || {
    echo 'the module lumi-aif-singularity-bindings cannot be loaded' >&2
    return 2
}
FRONTIER_LLM_FROM_MODULES="$(export -p)" # launch/job.sh takes these values for the modules', not the user's
export FRONTIER_LLM_BIND=gcd
export FRONTIER_LLM_NODE_LOCAL=/tmp
export FRONTIER_LLM_CONTAINER="${FRONTIER_LLM_CONTAINER:-/appl/local/laifs/containers/lumi-multitorch-u24r70f21m50t210-20260415_130625/lumi-multitorch-full-u24r70f21m50t210-20260415_130625.sif}"
