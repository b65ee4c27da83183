#!/usr/bin/env bash
# Builds the C++ parts in a checkout: frontier_llm/_native/*.so. Needs torch and a C++ compiler; about a minute on one
# core.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
"${PYTHON:-python}" setup.py build_ext --inplace "$@"
