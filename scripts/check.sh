#!/usr/bin/env bash
# Checks the code without running it: format, lint, types, import layers, density, width, imports of the tests, shell
# scripts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ruff format --check .
ruff check .
mypy
lint-imports
python scripts/code_density.py --check
python scripts/prose.py --check
# Pytest collects without running a test. A test file that cannot be imported is an error, and its traceback is printed.
collected="$(python -m pytest --collect-only -q tests benchmarks/tests 2>&1)" || {
  echo "$collected" | sed -n '/= ERRORS =/,$p' >&2
  exit 1
}
if command -v shellcheck >/dev/null; then
  git ls-files -z '*.sh' '*.sbatch' .ci/run | xargs -0 shellcheck --external-sources
else
  echo "shellcheck is not installed: shell scripts were not checked (apt-get install shellcheck)" >&2
fi
