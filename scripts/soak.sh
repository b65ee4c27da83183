#!/usr/bin/env bash
# Injects random faults for a given time at low priority. Every run must end bit-equal, and no resource may leak. The
# faults and the measured resources are described in scripts/soak.py.
#   scripts/soak.sh [MINUTES=30] [SEED=1]
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
exec nice -n 10 "${PYTHON:-python}" scripts/soak.py --minutes "${1:-30}" --seed "${2:-1}"
