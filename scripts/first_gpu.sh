#!/usr/bin/env bash
# First measurements on a machine with an NVIDIA or AMD GPU, torch and Triton: builds, checks every op, measures,
# trains, and writes one page.
#   scripts/first_gpu.sh [--out DIR] [--wheels DIR] [--minutes 9]
#   scripts/first_gpu.sh --rehearse [--out DIR]     every stage on a CPU, in a bare environment
#   scripts/first_gpu.sh --collect-wheels DIR [--python 3.12] [--platform manylinux_2_28_x86_64 ...]
#                                                   beforehand, on a machine with a network
# Under Slurm: srun -N1 -n1 --gpus-per-node=8 scripts/first_gpu.sh
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
exec "${PYTHON:-python3}" "$here/first_gpu" "$@"
