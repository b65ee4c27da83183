#!/usr/bin/env bash
# Installs what the tests need into .venv and runs them. `--all` first: everything, as CI does; without it what is marked `thorough` is left out.
# Further arguments go to pytest: scripts/test.sh tests/unit/schedule
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
exec python -m pytest "${chosen[@]}" "$@"
