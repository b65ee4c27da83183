#!/usr/bin/env bash
# Checks the code without running it: format, lint, types, import layers, density, width, shell scripts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ruff format --check .
ruff check .
mypy
lint-imports
python scripts/code_density.py --check
python scripts/prose.py --check
if command -v shellcheck >/dev/null; then
  git ls-files -z '*.sh' '*.sbatch' .ci/run | xargs -0 shellcheck --external-sources
else
  echo "shellcheck is not installed: shell scripts were not checked (apt-get install shellcheck)" >&2
fi
