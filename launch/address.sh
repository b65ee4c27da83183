#!/bin/bash
# Print the IPv4 address at which other nodes reach this one: of the named interface, else the host's first. Run once
# per job, so that no rank has to ask DNS.
#     address.sh [INTERFACE]
set -euo pipefail
PATH="$PATH:/usr/sbin:/sbin" # SUSE keeps ip there

if [[ $# -gt 0 && -n "$1" ]]; then
    address="$(ip -4 -oneline address show dev "$1" | awk '{split($4, part, "/"); print part[1]; exit}' || true)"
else
    address="$(hostname -i | awk '{print $1}')"
fi
if [[ -z "$address" ]]; then
    echo "address.sh: no IPv4 address on ${1:-$(hostname)}" >&2
    exit 1
fi
echo "$address"
