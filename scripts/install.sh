#!/usr/bin/env bash
# Sourced by the other scripts: a virtual environment in .venv with torch, the package and its prebuilt C++ parts.
# A torch that PYTHON (default: python3) can import is used and never replaced, also that of an active uv or conda
# environment. Otherwise torch is installed: FRONTIER_LLM_TORCH is its requirement (default torch==2.13.0), and
# FRONTIER_LLM_TORCH_CPU=1 takes the small build for CPUs. FRONTIER_LLM_EXTRAS adds extras, e.g. "test".
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
  find_torch='import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))'
  if packages="$("$python" -c "$find_torch" 2>/dev/null)"; then
    echo "== using the torch in $packages" >&2
    "$python" -m venv --system-site-packages .venv
    # A virtual environment that is created from another one sees only the packages of the base interpreter, so a .pth
    # file names the folder with torch.
    folder="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    echo "$packages" >"$folder/torch_of_this_machine.pth"
  else
    "$python" -m venv .venv
  fi
fi
# shellcheck disable=SC1091
source .venv/bin/activate
python -m pip --version >/dev/null 2>&1 || python -m ensurepip --default-pip >/dev/null # `uv venv` installs no pip

# The last line of the import's error is printed, because it may name a library that torch lacks.
print_version='import torch; print(torch.__version__)'
if ! torch="$(python -c "$print_version" 2>&1)"; then
  echo "== installing ${FRONTIER_LLM_TORCH:=torch==2.13.0} (${torch##*$'\n'})" >&2
  torch_source=()
  if [[ -n "${FRONTIER_LLM_TORCH_CPU:-}" ]]; then
    torch_source=(--index-url https://download.pytorch.org/whl/cpu)
  elif [[ "$(uname -sm)" == "Linux x86_64" ]]; then
    echo "   The build for CUDA is the default on Linux: 3 to 5 GB of libraries (4.7 GB with torch 2.13.0)." >&2
    echo "   Without an NVIDIA GPU, stop with Ctrl-C and set FRONTIER_LLM_TORCH_CPU=1: about 200 MB." >&2
  fi
  python -m pip install --quiet --disable-pip-version-check "${torch_source[@]}" "$FRONTIER_LLM_TORCH"
  torch="$(python -c "$print_version" 2>/dev/null || true)"
fi

# Installed once per torch version and state of the compiled and packaged sources. Python files are used from the
# checkout.
stamp=".venv/installed-${extras//,/-}"
state="${torch##*$'\n'} $(cat setup.py pyproject.toml csrc/*.cpp csrc/*/* 2>/dev/null | sha256sum)"
if [[ "$(cat "$stamp" 2>/dev/null)" != "$state" ]]; then
  echo "== installing frontier_llm and building its C++ parts (about a minute)" >&2
  python -m pip install --quiet --disable-pip-version-check setuptools wheel
  python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[$extras]"
  echo "$state" >"$stamp"
fi
