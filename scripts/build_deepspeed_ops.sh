#!/usr/bin/env bash
# Installs DeepSpeed with the ops prebuilt for MI250X (gfx90a) that it would otherwise compile at run time. Not run on
# an MI250X yet. Ops are added one by one. One that does not build is named at the end, the others stay, and DeepSpeed
# is installed in any case.
# DEEPSPEED_OPS replaces the list. DEEPSPEED_SOURCE replaces the package's source: a requirement, a folder or an
# archive.
# shellcheck source=scripts/rocm_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/rocm_env.sh"

# The list and its reasons: frontier_llm/ops/deepspeed_ops.py.
read -r -a ops <<<"${DEEPSPEED_OPS:-fused_adam cpu_adam pin_memory}"
package="${DEEPSPEED_SOURCE:-deepspeed==${DEEPSPEED_VERSION:-0.19.8}}"
# A login node has no GPU. Without this DeepSpeed would build its CPU ops there, which it does not load on a GPU.
export DS_ACCELERATOR="${DS_ACCELERATOR:-cuda}"
logs="$sources/deepspeed-logs"
mkdir -p "$logs"
wheels="$(mktemp -d)"
trap 'rm -rf "$wheels"' EXIT

# build NAME OP ...: a wheel with these ops, in $wheels/NAME; its log in $logs/NAME.log. Without pip's cache, which
# ignores the settings.
build() {
  local name="$1" op contents settings=(DS_BUILD_OPS=0)
  shift
  for op in "$@"; do settings+=("DS_BUILD_${op^^}=1"); done
  env "${settings[@]}" "$python" -m pip wheel --no-deps --no-build-isolation --no-cache-dir --no-binary deepspeed \
    --wheel-dir "$wheels/$name" "$package" >"$logs/$name.log" 2>&1 || return 1
  # Not piped into grep -q, which closes the pipe at its first match: Python would then fail with a broken pipe.
  contents="$("$python" -m zipfile -l "$wheels/$name"/deepspeed-*.whl)" || return 1
  for op in "$@"; do # DeepSpeed skips an op that it considers incompatible, and continues
    grep -q "/${op}_op[^/]*\.so " <<<"$contents" || return 1
  done
}

if ! build none; then
  tail -n 20 "$logs/none.log" >&2
  echo "error: DeepSpeed itself does not build here: see $logs/none.log" >&2
  exit 1
fi
best=none
built=()
failed=()
for op in "${ops[@]}"; do
  echo "building DeepSpeed's $op" >&2
  if build "$op" "${built[@]}" "$op"; then
    built+=("$op")
    best="$op"
  else
    failed+=("$op")
  fi
done
"$python" -m pip install --no-deps --force-reinstall "$wheels/$best"/deepspeed-*.whl
"$python" -m pip install "$wheels/$best"/deepspeed-*.whl # what it requires
echo "DeepSpeed is installed with these ops prebuilt: ${built[*]:-none}" >&2
for op in "${failed[@]}"; do
  echo "error: DeepSpeed's $op does not build here: see $logs/$op.log" >&2
done
[[ ${#failed[@]} -eq 0 ]]
