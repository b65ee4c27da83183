#!/usr/bin/env bash
# Runs every combination of degrees, sequence parallelism, schedule, recompute mode and family in float64. Compares
# each with one rank, and one rank with the oracle, and writes the table in docs/benchmarks/numerics.md. The everyday
# test run covers each pair of settings. `--random 200 --seed 7` runs random configurations instead: odd shapes, uneven
# stages, random switches.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z "${PYTHON:-}" ]]; then
  FRONTIER_LLM_EXTRAS="${FRONTIER_LLM_EXTRAS:-plot,data,hf,test}"
  source scripts/install.sh
fi
export OMP_NUM_THREADS=1
exec "${PYTHON:-python}" -m tests.parity.full "$@"
