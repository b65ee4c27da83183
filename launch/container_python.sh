#!/bin/bash
# The Python of a container, with the host's GPUs, network and filesystems: container_python.sh [ARGUMENT ...]
# FRONTIER_LLM_CONTAINER    the image (launch/frontier_llm.def builds one)
# FRONTIER_LLM_BINDS        further paths to bind, separated by commas (data, scratch)
# The image brings torch and RCCL; libfabric's cxi provider and RCCL's network plugin are the site's and come in through binds,
# because a plugin built against another libfabric does not load, and RCCL then silently uses TCP.
set -euo pipefail

image="${FRONTIER_LLM_CONTAINER:?names the image}"
if [[ ! -r "$image" ]]; then
    echo "container_python.sh: cannot read $image; build it with apptainer build $image launch/frontier_llm.def" >&2
    exit 2
fi
runtime="$(command -v apptainer || command -v singularity || true)"
if [[ -z "$runtime" ]]; then
    echo "container_python.sh: neither apptainer nor singularity on $(hostname)" >&2
    exit 2
fi
binds=("$PWD" "${FRONTIER_LLM_ROOT:-$PWD}" "${FRONTIER_LLM_NODE_LOCAL:-/tmp}")
for path in /opt/cray /usr/lib64/libcxi.so.1 /var/spool/slurmd /lustre /scratch /project /flash /appl; do
    if [[ -e "$path" ]]; then binds+=("$path"); fi
done
if [[ -n "${FRONTIER_LLM_BINDS:-}" ]]; then
    IFS=, read -r -a more <<<"$FRONTIER_LLM_BINDS"
    binds+=("${more[@]}")
fi
exec "$runtime" exec --rocm --bind "$(IFS=, && echo "${binds[*]}")" "$image" python3 "$@"
