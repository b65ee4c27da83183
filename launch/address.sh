#!/bin/bash
# Print the IPv4 address at which other nodes reach this node: the address of the named interface, otherwise the host's
# first address. Runs once per job, so that ranks need no DNS requests.
#     address.sh [INTERFACE]
set -euo pipefail
PATH="$PATH:/usr/sbin:/sbin" # on SUSE, `ip` is in /sbin

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
