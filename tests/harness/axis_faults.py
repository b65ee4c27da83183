"""Faults of parallel training that the section "types" of a certificate must find, and the page that lists them.

Each fault removes, doubles or misplaces one call of the package. `planted` changes the source of one function.
`python -m tests.harness.axis_faults --write docs/generated/axis_types.md` writes the page.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from frontier_llm.certificate.axis_types import check_axis_types
from frontier_llm.certificate.section import CertificateSection, SectionVerdict
from tests.harness.planted import planted
from tests.parity.cases import Case
from tests.parity.sabotage import SABOTAGES

LAYOUTS = {
    "tp": Case("gpt", tp=2),
    "sp": Case("gpt", tp=2, pp=2, sequence_parallel=True),
    "llama": Case("llama", tp=2, sequence_parallel=True),
    "zb": Case("llama", tp=2, pp=2, sequence_parallel=True, schedule="zb-h1"),
    "dp": Case("llama", dp=2),
    "late": Case("llama", dp=2, overlap_gradients=False),
    "dp0": Case("llama", dp=2, zero=0),
    "wire": Case("llama", dp=2, settings=("precision.gradient_wire=bf16",)),
    "gather": Case("llama", cp=2, settings=("parallel.context_attention=gather",)),
    "ring": Case("llama", cp=2, settings=("parallel.context_attention=ring",)),
    "heads": Case("llama", cp=2, settings=("parallel.context_attention=heads",)),
    "docs": Case("llama", dp=2, cp=2, documents=True, settings=("parallel.context_attention=gather",)),
    "olmo": Case("olmo2", tp=2),
    "moe": Case("mixtral", tp=2, settings=("parallel.expert=2",)),
    "moe-cp": Case("mixtral", cp=2, settings=("parallel.expert=2",)),
    "etp": Case("olmoe", tp=2, dp=2, settings=("parallel.expert=2", "parallel.expert_tensor=2")),
    "moe-global": Case("mixtral", tp=2, dp=2, settings=("parallel.expert=2", "model.moe.balance=global")),
    "z": Case("gpt", tp=2, sequence_parallel=True, settings=("train.loss_weights={output-z: 0.1}",)),
    "muon": Case("llama", tp=2, dp=2, settings=("optimizer.name=muon",)),
    "adafactor": Case("llama", tp=2, dp=2, settings=("optimizer.name=adafactor",)),
    "tied": Case("gpt", pp=2),
}


@dataclass(frozen=True)
class Fault:
    """One change of a function's source: `old` is replaced by `new`."""

    kind: str
    layout: str  # key of LAYOUTS
    module: str
    function: str
    old: str
    new: str
    related: str = ""  # the message may name a line of this caller, callee or reader instead of the changed function

    def __str__(self) -> str:
        return f"{self.function}: {self.old} -> {self.new}"


FAULTS = [Fault(**row) for row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))]


def check(fault: Fault) -> tuple[CertificateSection, bool]:
    """Return the section of the fault's layout with the fault, and whether a message names the right line."""
    case = LAYOUTS[fault.layout]
    with planted(fault.module, fault.function, fault.old, fault.new) as lines:
        section = check_axis_types(case.config(), case.world_size)
    file = fault.module.replace(".", "/") + ".py"
    places = [match for problem in section.problems for match in _LINE.findall(f"{problem.where} {problem.what}")]
    is_named = any(name == file and int(number) in lines for name, number, _ in places)
    is_related = bool(fault.related) and any(function.startswith(fault.related) for *_, function in places)
    return section, is_named or is_related


_ROOT = Path(__file__).parents[2]
_LINE = re.compile(r"(\S+\.py):(\d+) \(([^)]+)\)")


def page() -> str:
    """Return the page with all faults and all sabotages of the parity tests."""
    rows = ["| class | changed function | instead of | stands | reported |", "| --- | --- | --- | --- | --- |"]
    found = 0
    for fault in FAULTS:
        section, is_right = check(fault)
        found += section.verdict is SectionVerdict.REFUSED and is_right
        where = section.problems[0].where if section.problems else "no"
        cells = (fault.kind, f"`{fault.function}`", f"`{fault.old}`", f"`{fault.new}`", f"`{where}`")
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    sabotaged = ["| sabotage of the parity tests | section types | reported |", "| --- | --- | --- |"]
    for name, layout in SABOTAGE_LAYOUTS.items():
        with SABOTAGES[name]():
            section = check_axis_types(layout.config(), layout.world_size)
        where = section.problems[0].where.replace(f"{_ROOT}/", "") if section.problems else ""
        sabotaged.append(f"| {name} | {'found' if section.problems else 'not found'} | {where and f'`{where}`'} |")
    classes = len({fault.kind for fault in FAULTS})
    return _PAGE.format(
        found=found, count=len(FAULTS), classes=classes, rows="\n".join(rows), sabotaged="\n".join(sabotaged)
    )


SABOTAGE_LAYOUTS = {
    "dropped-dp-sum": Case("llama", dp=2),
    "dropped-expert-sum": Case("mixtral", tp=2, dp=2, settings=("parallel.expert=2",)),
    "mean-over-expert-replicas": Case("mixtral", tp=2, dp=2, settings=("parallel.expert=2",)),
    "unsorted-scatter": Case("mixtral", tp=2, settings=("parallel.expert=2",)),
    "own-load": Case("mixtral", dp=2, settings=("model.moe.balance=global",)),
    "double-counted-norm": Case("gpt", tp=2, sequence_parallel=True),
    "forgotten-tied-sum": Case("gpt", pp=2),
    "missing-norm-sum": Case("gpt", tp=2, sequence_parallel=True),
    "swapped-microbatch": Case("llama", pp=2),
    "stale-activation": Case("llama", pp=2),
    "local-division": Case("llama", cp=2, dp=2, documents=True, settings=("parallel.context_attention=gather",)),
    "mask-by-own-index": Case("llama", cp=2, settings=("parallel.context_attention=gather",)),
    "positions-by-own-index": Case("llama", cp=2, settings=("parallel.context_attention=gather",)),
    "keys-without-gradient": Case("llama", cp=2, settings=("parallel.context_attention=gather",)),
    "missing-merge": Case("llama", cp=2, settings=("parallel.context_attention=ring",)),
    "backward-with-own-logsumexp": Case("llama", cp=2, settings=("parallel.context_attention=ring",)),
    "masks-by-own-index": Case("gpt", tp=2, sequence_parallel=True, settings=("model.dropout=0.1",)),
    "masks-by-own-row": Case("gpt", dp=2, settings=("model.dropout=0.1",)),
}

# The row of a sample in its microbatch is equal on one rank and on several ranks.
NOT_FOUND = ("masks-by-own-row",)

_PAGE = """# Faults that the section "types" finds

`frontier-llm check` runs one step of a small copy of a run on one rank and on simulated ranks
([the section "types"](../check_types.md)).
Each row of the first table is a fault that was planted into the package by changing one call of one function.
{found} of {count} faults in {classes} classes are refused.
The message names a line of the changed function, or of its caller, callee or reader.

{rows}

The second table has the mistakes that the parity tests plant.
A parity test fails under each of them, with several processes and an independent reference.

{sabotaged}

The section compares a run with the same program on one rank.
It therefore does not find:

* an error that is the same on one rank, for example a wrong formula or a loss that is divided by a wrong number;
* an error of rounding, of a fused op or of a kernel: the section runs reference ops in fp64;
* an error that needs more than two ranks on an axis, a later step, or other sizes;
* two sums of one buffer that are in flight at the same time: the section `communication` checks the order.

The parity tests with their independent reference find the first and the third kind on the layouts that they run.

`python -m tests.harness.axis_faults --write docs/generated/axis_types.md` writes this page.
"""

if __name__ == "__main__":
    text = page()
    Path(sys.argv[2]).write_text(text, encoding="utf-8") if sys.argv[1:2] == ["--write"] else print(text)
