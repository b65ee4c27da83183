#!/usr/bin/env bash
# Installs what the tests need into .venv and runs them on three workers: tests of Slurm, time-outs and signals mostly
# wait. `--all` first: everything, as CI does; without it what is marked `thorough` is left out. Further arguments go to
# pytest, then on one worker: scripts/test.sh tests/unit/schedule
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
