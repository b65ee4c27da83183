#!/usr/bin/env bash
# Installs the tests' requirements into .venv and runs the tests on three workers, because tests of Slurm, time-outs and
# signals mostly wait. Without an option, tests marked `thorough` are left out. `--all` as first argument runs what CI
# runs. `--exhaustive` runs all tests. Further arguments are passed to pytest, which then uses one worker:
# scripts/test.sh tests/unit/schedule
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
FRONTIER_LLM_EXTRAS="${FRONTIER_LLM_EXTRAS:-plot,data,hf,eval,deepspeed,trackers,test}"
source scripts/install.sh
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE # hundreds of processes of the tests would compile the package again
chosen=(-m "not thorough")
case "${1:-}" in
  --all) chosen=(-m "not exhaustive") && shift ;;
  --exhaustive) chosen=() && shift ;;
esac
(($#)) || chosen+=(-n 3)
exec python -m pytest "${chosen[@]}" "$@"
