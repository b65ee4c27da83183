# Modules and environment of frontier, sourced by launch/job.sh.
# Rendered from slurm/sites/frontier.yaml by `python -m frontier_llm.cluster.sbatch`; change that and render again.
# shellcheck shell=bash
module load PrgEnv-gnu/8.7.0
module load cpe/26.03
module load miniforge3/23.11.0-0
module load rocm/7.1.1
module load craype-accel-amd-gfx90a
module load rccl-net-plugin
export FRONTIER_LLM_BIND=gcd
export FRONTIER_LLM_NODE_LOCAL="/mnt/bb/${USER:-}"
export LD_LIBRARY_PATH="${CRAY_LD_LIBRARY_PATH:-}:${LD_LIBRARY_PATH:-}"
export CUDA_DEVICE_MAX_CONNECTIONS=1
export FI_CXI_DEFAULT_CQ_SIZE=131072
export FI_CXI_DEFAULT_TX_SIZE=2048
export FI_CXI_DISABLE_HOST_REGISTER=1
export FI_CXI_RDZV_EAGER_SIZE=0
export FI_CXI_RDZV_GET_MIN=0
export FI_CXI_RDZV_PROTO=alt_read
export FI_CXI_RDZV_THRESHOLD=0
export FI_CXI_RX_MATCH_MODE=hybrid
export FI_MR_CACHE_MONITOR=kdreg2
export GLOO_SOCKET_IFNAME=hsn0
export HSA_FORCE_FINE_GRAIN_PCIE=1
export NCCL_CROSS_NIC=1
export NCCL_NET_GDR_LEVEL=PHB
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
if [[ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ]]; then
    export NCCL_NET='AWS Libfabric'
fi
