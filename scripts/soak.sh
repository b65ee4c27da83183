#!/usr/bin/env bash
# Random faults for a given time; ends with the comparison of losses and digests and the share of computed steps that counted.
#   scripts/soak.sh [MINUTES=30] [SEED=1]
# Faults: kill -9 of a random rank at random and at exact instants of a save, bit flips in the newest checkpoint, failing writes.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
exec "${PYTHON:-python}" scripts/kill_anywhere.py --minutes "${1:-30}" --seed "${2:-1}" --faults kill,kill,flip,enospc
