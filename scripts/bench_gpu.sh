#!/usr/bin/env bash
# On a machine with a GPU: builds its code objects, checks every op against float64 through the launcher, and times them against eager.
# usage: scripts/bench_gpu.sh [MODEL]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python}"
model="${1:-mpt-1b}"

architecture="$("$python" -c 'from frontier_llm.ops.prebuilt import architecture_of_device; print(architecture_of_device())')"
"$python" setup.py build_ext --inplace
"$python" setup.py build_ops --arch "$architecture"
"$python" -m pytest tests/unit/ops/test_gpu.py --no-header
for dtype in bf16 fp32; do
  "$python" -m frontier_llm.cli.main bench ops --device cuda --dtype "$dtype" --model "$model"
done
