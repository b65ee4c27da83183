#!/usr/bin/env bash
# Sourced by the other scripts: a virtual environment in .venv with torch, the package and its prebuilt C++ parts.
# A torch that is already importable and built for ROCm or CUDA is kept; FRONTIER_LLM_EXTRAS adds extras, e.g. "test".
# shellcheck shell=bash
python="${PYTHON:-python3}"
extras="${FRONTIER_LLM_EXTRAS:-plot}"

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "frontier_llm needs Python 3.11 or newer, and $python is older: set PYTHON=/path/to/a/newer/python3" >&2
  exit 2
fi
if ! command -v "${CXX:-c++}" >/dev/null; then
  echo "no C++ compiler found, and frontier_llm builds its C++ parts during installation:" \
    "install g++ (apt-get install g++), or set CXX" >&2
  exit 2
fi

if [[ ! -x .venv/bin/python ]]; then
  if "$python" -c 'import torch, sys; sys.exit(not (torch.version.hip or torch.version.cuda))' 2>/dev/null; then
    echo "== keeping the torch of this site" >&2
    "$python" -m venv --system-site-packages .venv
  else
    "$python" -m venv .venv
  fi
fi
# shellcheck disable=SC1091
source .venv/bin/activate

# The last line of the error is printed, because a torch that lacks a library is hard to diagnose without it.
if ! why="$(python -c 'import torch' 2>&1)"; then
  echo "== installing ${FRONTIER_LLM_TORCH:=torch==2.13.0} (${why##*$'\n'})" >&2
  python -m pip install --quiet --disable-pip-version-check "$FRONTIER_LLM_TORCH"
fi

# Installed once per state of the compiled and packaged sources. Python files are used from the checkout.
stamp=".venv/installed-${extras//,/-}"
state="$(cat setup.py pyproject.toml csrc/*.cpp csrc/*/* 2>/dev/null | sha256sum)"
if [[ "$(cat "$stamp" 2>/dev/null)" != "$state" ]]; then
  echo "== installing frontier_llm and building its C++ parts (about a minute)" >&2
  python -m pip install --quiet --disable-pip-version-check setuptools wheel
  python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[$extras]"
  echo "$state" >"$stamp"
fi
