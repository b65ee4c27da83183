#!/usr/bin/env bash
# Random faults for a given time at low priority; every run must end bit-equal, and nothing may leak. What is drawn and
# sampled: scripts/soak.py.
#   scripts/soak.sh [MINUTES=30] [SEED=1]
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
exec nice -n 10 "${PYTHON:-python}" scripts/soak.py --minutes "${1:-30}" --seed "${2:-1}"
