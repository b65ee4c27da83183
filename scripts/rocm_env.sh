#!/usr/bin/env bash
# Sourced by build_*_rocm.sh and build_deepspeed_ops.sh. Sets up Frontier's modules (elsewhere: the modules that are
# already loaded), a ROCm torch and gfx90a. If FRONTIER_LLM_MODULES is set, these modules are loaded instead; an empty
# value loads none. This script was not tested on the machines themselves.
# shellcheck shell=bash
set -euo pipefail

modules="${FRONTIER_LLM_MODULES-PrgEnv-gnu/8.7.0 cpe/26.03 rocm/7.1.1 craype-accel-amd-gfx90a}"
if [[ -n "$modules" ]] && command -v module >/dev/null; then
  # shellcheck disable=SC2086  # a list of names
  module load $modules
  export LD_LIBRARY_PATH="${CRAY_LD_LIBRARY_PATH:-}:${LD_LIBRARY_PATH:-}"
fi
python="${PYTHON:-python}"
if ! "$python" -c 'import sys, torch; sys.exit(not torch.version.hip)'; then
  echo "error: $python has no torch that was built for ROCm" >&2
  echo "  fix: activate the environment that has it, or set PYTHON" >&2
  exit 1
fi
export PYTORCH_ROCM_ARCH="${PYTORCH_ROCM_ARCH:-gfx90a}" GPU_ARCHS="${GPU_ARCHS:-gfx90a}"
export MAX_JOBS="${MAX_JOBS:-16}"  # a composable-kernel translation unit takes up to 4 GB
export CC="${CC:-gcc}" CXX="${CXX:-g++}"

# fetch URL TAG: prints the folder of a checkout of one tag or branch, $sources/<name>-<tag>. Call it in an assignment:
# elsewhere bash ignores the exit status of $( ).
sources="${FRONTIER_LLM_SOURCES:-$PWD/build/third_party}"
fetch() {
  local folder
  folder="$sources/$(basename "$1" .git)-${2//\//-}"
  mkdir -p "$sources"
  if [[ ! -d "$folder" ]]; then
    rm -rf "$folder.tmp"
    git clone --depth 1 --recurse-submodules --shallow-submodules --branch "$2" "$1" "$folder.tmp" >&2 || return 1
    mv "$folder.tmp" "$folder"
  fi
  echo "$folder"
}
