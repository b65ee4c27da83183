#!/usr/bin/env bash
# Builds ROCm's flash-attn for MI250X (gfx90a) into the current Python: the composable-kernel build, about an hour on a
# login node. With FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE in the environment, flash-attn would use Triton, which
# compiles at run time and is refused by --no-jit.
# shellcheck source=scripts/rocm_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/rocm_env.sh"

tag="${FLASH_ATTN_TAG:-v2.8.4.1-cktile}"  # the tag that OLCF's PyTorch page gives for ROCm 7.1 and torch 2.10
folder="$(fetch https://github.com/ROCm/flash-attention.git "$tag")"
cd "$folder"
export FLASH_ATTENTION_TRITON_AMD_ENABLE=FALSE
BUILD_TARGET=rocm FLASH_ATTENTION_FORCE_BUILD=TRUE "$python" -m pip install --no-build-isolation --no-deps .
"$python" -c 'import flash_attn; print("flash-attn", flash_attn.__version__)'
