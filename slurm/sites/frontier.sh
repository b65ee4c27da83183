# Modules and environment of frontier, sourced by launch/job.sh.
# Rendered from slurm/sites/frontier.yaml by `python -m frontier_llm.cluster.sbatch`; change that and render again.
# shellcheck shell=bash disable=SC2034
module load PrgEnv-gnu/8.7.0
module load cpe/26.03
module load miniforge3/23.11.0-0
module load rocm/7.1.1
module load craype-accel-amd-gfx90a
module load rccl-net-plugin
FRONTIER_LLM_FROM_MODULES="$(export -p)" # launch/job.sh: what is so now was not exported by the user
unset NCCL_SOCKET_IFNAME FI_CXI_DEFAULT_CQ_SIZE
export FRONTIER_LLM_BIND=gcd
export FRONTIER_LLM_NODE_LOCAL="/mnt/bb/${USER:-}"
export LD_LIBRARY_PATH="${CRAY_LD_LIBRARY_PATH:-}:${LD_LIBRARY_PATH:-}"
