# Modules and environment of lumi, sourced by launch/job.sh.
# Rendered from slurm/sites/lumi.yaml by `python -m frontier_llm.cluster.sbatch`; change that and render again.
# shellcheck shell=bash
module use /appl/local/laifs/modules
module load lumi-aif-singularity-bindings
export FRONTIER_LLM_BIND=gcd
export FRONTIER_LLM_NODE_LOCAL=/tmp
export CUDA_DEVICE_MAX_CONNECTIONS=1
export CXI_FORK_SAFE=1
export CXI_FORK_SAFE_HP=1
export FI_CXI_DEFAULT_CQ_SIZE=262144
export FI_CXI_DISABLE_CQ_HUGETLB=1
export FI_MR_CACHE_MONITOR=userfaultfd
export GLOO_SOCKET_IFNAME=hsn0
export NCCL_NET_GDR_LEVEL=PHB
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
export FRONTIER_LLM_CONTAINER="${FRONTIER_LLM_CONTAINER:-/appl/local/laifs/containers/lumi-multitorch-full-u24r70f21m50t210-20260415_130625.sif}"
