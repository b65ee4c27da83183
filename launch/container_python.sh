#!/bin/bash
# Run the Python of a container, with the host's GPUs, network and file systems: container_python.sh [ARGUMENT ...]
# FRONTIER_LLM_CONTAINER    the image (launch/frontier_llm.def builds one)
# APPTAINER_CONTAINLIBS     libraries of the host for the image (default: the libraries in OLCF's container examples, if
#                           the host has them)
# FRONTIER_LLM_BINDS        additional paths to bind, separated by commas (data, scratch)
# The image contains torch and ROCm. The option --rocm is not used, because it would put the host's ROCm before the
# image's. The devices of the GPUs are visible without it. The network libraries come from the host through bind mounts:
# the mounts that the site's module has set (LUMI), otherwise the paths below.
set -euo pipefail
export PYTHONNOUSERSITE=1 # without this, packages in ~/.local would precede the image's packages

image="${FRONTIER_LLM_CONTAINER:?set it to the path of the container image}"
if [[ ! -r "$image" ]]; then
    echo "container_python.sh: cannot read $image; build it with apptainer build $image launch/frontier_llm.def" >&2
    exit 2
fi
runtime="$(command -v apptainer || command -v singularity || true)"
if [[ -z "$runtime" ]]; then
    echo "container_python.sh: found neither apptainer nor singularity on $(hostname)" >&2
    exit 2
fi
binds=("$PWD" "${FRONTIER_LLM_ROOT:-$PWD}" "${FRONTIER_LLM_NODE_LOCAL:-/tmp}")
paths=(/lustre /pfs /scratch /project /projappl /flash /appl) # on LUMI, /scratch and others are links into /pfs
if [[ -z "${SINGULARITY_BIND:-}${SINGULARITY_BINDPATH:-}${APPTAINER_BIND:-}${APPTAINER_BINDPATH:-}" ]]; then
    paths+=(/opt/cray /var/spool/slurmd /sw) # on Frontier, /sw contains RCCL's network plugin
fi
# Libraries that the host's libfabric and cxi provider need and an image lacks are bound to /.singularity.d/libs, where
# the container's loader searches.
if [[ -z "${APPTAINER_CONTAINLIBS:-}${SINGULARITY_CONTAINLIBS:-}" ]]; then
    libraries=()
    for library in /usr/lib64/{libcxi.so.1,libjson-c.so.3,libnl-3.so.200,libjansson.so.4} /lib64/libtinfo.so.6; do
        if [[ -e "$library" ]]; then libraries+=("$library"); fi
    done
    if [[ ${#libraries[@]} -gt 0 ]]; then
        APPTAINER_CONTAINLIBS="$(IFS=, && echo "${libraries[*]}")"
        export APPTAINER_CONTAINLIBS SINGULARITY_CONTAINLIBS="$APPTAINER_CONTAINLIBS"
    fi
fi
for path in "${paths[@]}"; do
    if [[ -e "$path" ]]; then binds+=("$path"); fi
done
if [[ -n "${FRONTIER_LLM_BINDS:-}" ]]; then
    IFS=, read -r -a more <<<"$FRONTIER_LLM_BINDS"
    binds+=("${more[@]}")
fi
exec "$runtime" exec --bind "$(IFS=, && echo "${binds[*]}")" "$image" python3 "$@"
