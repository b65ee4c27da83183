#!/usr/bin/env bash
# Installs the tests' requirements into .venv and runs the tests on three workers, because tests of Slurm, time-outs and
# signals mostly wait. With `--all` as first argument all tests run, as in CI. Without it tests marked `thorough` are
# left out. Further arguments are passed to pytest, which then uses one worker: scripts/test.sh tests/unit/schedule
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
FRONTIER_LLM_EXTRAS="${FRONTIER_LLM_EXTRAS:-plot,data,hf,eval,deepspeed,trackers,test}"
source scripts/install.sh
export OMP_NUM_THREADS=1
chosen=(-m "not thorough")
if [[ "${1:-}" == --all ]]; then
  chosen=()
  shift
fi
(($#)) || chosen+=(-n 3)
exec python -m pytest "${chosen[@]}" "$@"
