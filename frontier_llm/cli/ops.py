"""frontier-llm ops list: which op runs with which back-end on which device, and why not where it does not."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the command."""
    parser = subparsers.add_parser("ops", help="which fused op runs with which back-end, and why")
    actions = parser.add_subparsers(dest="ops_command", required=True)
    listing = actions.add_parser("list", help="op x back-end x architecture: available, or why not")
    listing.add_argument("--dtype", choices=("bf16", "fp16", "fp32", "fp64"), default="bf16")
    listing.add_argument("--json", action="store_true", help="machine-readable result on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the table, or the rows as JSON."""
    import json

    from frontier_llm.ops.listing import backends, prebuilt_architectures

    rows, architectures = backends(args.dtype), prebuilt_architectures()
    if args.json:
        print(json.dumps({"backends": rows, "prebuilt": architectures}, indent=1))
        return 0
    for device in ("cpu", "cuda"):
        print(f"{device} ({args.dtype}); * is what auto takes")
        for row in (row for row in rows if row["device"] == device):
            mark = "*" if row["chosen"] else " "
            print(f"  {mark} {row['op']:<14} {row['backend']:<11} {row['status']}")
    print("prebuilt GPU kernels")
    for name, state in architectures.items():
        print(f"    {name:<8} {state}")
    return 0
