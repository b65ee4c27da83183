#!/usr/bin/env bash
# Plays every combination of degrees, sequence parallelism, schedule, recompute mode and family in float64, compares
# each with one rank and that with the oracle, and writes the table in docs/benchmarks/numerics.md. The everyday test
# run covers the same pairwise. `--random 200 --seed 7` plays runs of no pattern instead: odd shapes, uneven stages,
# every switch by chance.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z "${PYTHON:-}" ]]; then
  FRONTIER_LLM_EXTRAS="${FRONTIER_LLM_EXTRAS:-plot,data,hf,test}"
  source scripts/install.sh
fi
export OMP_NUM_THREADS=1
exec "${PYTHON:-python}" -m tests.parity.full "$@"
