#!/usr/bin/env bash
# Installs DeepSpeed with its ops prebuilt for MI250X (gfx90a), for optim's DeepSpeed engine: nothing is left to its JIT.
# The four that are left out do not build on ROCm (deepspeedai/Megatron-DeepSpeed#201).
# shellcheck source=scripts/rocm_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/rocm_env.sh"

version="${DEEPSPEED_VERSION:-0.19.8}"
export DS_BUILD_OPS=1 DS_BUILD_SPARSE_ATTN=0 DS_BUILD_QUANTIZER=0 DS_BUILD_RANDOM_LTD=0 DS_BUILD_TRANSFORMER_INFERENCE=0
"$python" -m pip install --no-build-isolation --no-binary deepspeed "deepspeed==$version"
"$python" -m deepspeed.env_report
