#!/usr/bin/env bash
# Installs the package for a site in one command: the package, its C++ libraries, and the GPU kernels of the site's
# architecture.
#   scripts/install_site.sh SITE      frontier, lumi, or the path of a site file; run it on a login node, in the
#                                     environment of the jobs
# The environment must already have torch and Triton (ROCm's wheels contain both). Neither is replaced. A site with a
# container builds with the image's Python, into this checkout, and needs a Python with numpy, pydantic and pyyaml on
# the host. At the end the installation is checked with the interpreter of the ranks. The exit code is 1 if something
# is missing.
set -euo pipefail
site="${1:?usage: scripts/install_site.sh SITE}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
host_python="${PYTHON:-python}"
python="$host_python"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

described() { # print a value of the site file, or of its machine file
    "$host_python" -c 'import sys
from frontier_llm.cluster.sites import load_site
from frontier_llm.machine.load import load_machine
site = load_site(sys.argv[1])
values = {"container": site.container, "architecture": load_machine(site.machine).device.architecture}
print(values[sys.argv[2]] or "")' "$site" "$1"
}

if ! "$host_python" -c 'import numpy, pydantic, yaml' 2>/dev/null; then
    "$host_python" -m pip install --quiet numpy pydantic pyyaml
fi
FRONTIER_LLM_CONTAINER="${FRONTIER_LLM_CONTAINER:-$(described container)}"
if [[ -n "$FRONTIER_LLM_CONTAINER" ]]; then
    export FRONTIER_LLM_CONTAINER
    python="$PWD/launch/container_python.sh"
    "$python" setup.py build_ext --inplace
else
    "$python" -m pip install --quiet setuptools wheel
    "$python" -m pip install --no-build-isolation --editable .
fi
architecture="$(described architecture)"
if [[ -n "$architecture" ]]; then
    tools="$PWD/build/kernel_tools" # packages that read code objects; only the build needs them
    "$python" -m pip install --quiet --upgrade --target "$tools" msgpack pyelftools
    PYTHONPATH="$tools:$PYTHONPATH" "$python" setup.py build_ops --arch "$architecture"
fi
"$host_python" -m frontier_llm.cli.main doctor --installation --site "$site"
