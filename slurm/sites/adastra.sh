# Modules and environment of adastra, sourced by launch/job.sh.
# Rendered from slurm/sites/adastra.yaml by `python -m frontier_llm.cluster.sbatch`; change that and render again.
# shellcheck shell=bash disable=SC2034
export FRONTIER_LLM_BIND=none
export FRONTIER_LLM_NODE_LOCAL=/tmp
