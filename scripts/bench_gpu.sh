#!/usr/bin/env bash
# On a machine with a GPU, in nine minutes: checks every prebuilt op against float64, times it against eager torch, SDPA and torch.compile,
# and trains a 1B model for 100 steps. Builds only what is not there. Results: build/bench_gpu/*.json and a summary on stdout.
# usage: scripts/bench_gpu.sh [--device cpu] [--out FOLDER] [--stages ceilings,checks,ops,compiled,train]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

if ! "$python" setup.py --quiet build_ext --inplace; then
  echo "the C++ parts were not built; going on with those in frontier_llm/_native, if any" >&2
fi
if [[ "$*" != *"--device cpu"* ]]; then
  if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "error: $python has no torch that sees a GPU" >&2
    echo "  fix: activate the environment that has it, set PYTHON, or try the script out: $0 --device cpu" >&2
    exit 1
  fi
  architecture="$("$python" -c 'from frontier_llm.ops.driver import architecture_of_device; print(architecture_of_device())')"
  if ! "$python" -c "from frontier_llm.ops.manifest import read_manifest; read_manifest('$architecture')" 2>/dev/null; then
    "$python" setup.py build_ops --arch "$architecture"
  fi
fi
exec "$python" scripts/bench_gpu.py "$@"
