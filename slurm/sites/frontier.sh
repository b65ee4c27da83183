# Modules and environment of frontier, sourced by launch/job.sh.
# Rendered from slurm/sites/frontier.yaml by `python -m frontier_llm.cluster.sbatch`; change that and render again.
# shellcheck shell=bash disable=SC2034
module load PrgEnv-gnu/8.7.0 || {
    echo 'the module PrgEnv-gnu/8.7.0 cannot be loaded' >&2
    return 2
}
module load cpe/26.03 || {
    echo 'the module cpe/26.03 cannot be loaded' >&2
    return 2
}
module load miniforge3/23.11.0-0 || {
    echo 'the module miniforge3/23.11.0-0 cannot be loaded' >&2
    return 2
}
module load rocm/7.1.1 || {
    echo 'the module rocm/7.1.1 cannot be loaded' >&2
    return 2
}
module load craype-accel-amd-gfx90a || {
    echo 'the module craype-accel-amd-gfx90a cannot be loaded' >&2
    return 2
}
module load rccl-net-plugin || {
    echo 'the module rccl-net-plugin cannot be loaded' >&2
    return 2
}
FRONTIER_LLM_FROM_MODULES="$(export -p)" # launch/job.sh takes these values for the modules', not the user's
unset NCCL_SOCKET_IFNAME FI_CXI_DEFAULT_CQ_SIZE
export FRONTIER_LLM_BIND=gcd
export FRONTIER_LLM_NODE_LOCAL="/mnt/bb/${USER:-}"
export http_proxy="${http_proxy:-http://proxy.ccs.ornl.gov:3128}"
export https_proxy="${https_proxy:-http://proxy.ccs.ornl.gov:3128}"
export no_proxy="${no_proxy:-localhost,127.0.0.1}"
export LD_LIBRARY_PATH="${CRAY_LD_LIBRARY_PATH:-}:${LD_LIBRARY_PATH:-}"
