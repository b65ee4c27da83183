#!/usr/bin/env bash
# Builds ROCm's apex for MI250X (gfx90a) with the two extensions that ops.norm=apex and ops.adamw=apex use.
# Never `pip install apex`: the PyPI project of that name is a web toolkit. Since 1.10 apex compiles every extension
# that was not built here when it is imported; with --no-jit that is an error.
# shellcheck source=scripts/rocm_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/rocm_env.sh"

branch="${APEX_BRANCH:-release/1.10.0}"  # apex 1.N is for torch 2.N
minor="$("$python" -c 'import torch; print(torch.__version__.split(".")[1])')"
if [[ "$branch" != "release/1.$minor."* ]]; then
  echo "error: $branch is for torch 2.$(cut -d. -f2 <<<"$branch"), but torch 2.$minor is installed" >&2
  echo "  fix: APEX_BRANCH=release/1.$minor.0 $0" >&2
  exit 1
fi
folder="$(fetch https://github.com/ROCm/apex.git "$branch")"
cd "$folder"
APEX_BUILD_AMP_C=1 APEX_BUILD_FUSED_LAYER_NORM=1 "$python" -m pip install --no-build-isolation --no-deps .
"$python" -c 'import torch, amp_C, fused_layer_norm_cuda; print("apex is built")'
