"""Faults of parallel training that the section "types" of a certificate must find, and the page that lists them.

Each fault removes, doubles or misplaces one call of the package. `planted` changes the source of one function.
`python -m tests.harness.axis_faults --write docs/generated/axis_types.md` writes the page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from frontier_llm.certificate.axis_types.check import check_axis_types
from frontier_llm.certificate.section import CertificateSection, SectionVerdict
from tests.harness.axis_parity import ParityTests
from tests.harness.planted import planted
from tests.harness.pool import RankPool
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
    "head-norm": Case("deepseek", tp=2),
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
    # the message may name a line of this function instead: a caller or callee of the changed function, or a reader of
    # its result
    related: str = ""
    bugs: tuple[str, ...] = ()  # bugs of other programs that the fault expresses, as named in axis_bugs.yaml

    def __str__(self) -> str:
        return f"{self.function}: {self.old} -> {self.new}"

    @property
    def place(self) -> tuple[str, str, str, str]:
        """The arguments of `planted`."""
        return self.module, self.function, self.old, self.new


_ROWS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
FAULTS = [Fault(**{**row, "bugs": tuple(row.get("bugs", ()))}) for row in _ROWS]


def check(fault: Fault) -> tuple[CertificateSection, bool]:
    """Return the section of the fault's layout with the fault, and whether a message names the right line."""
    case = LAYOUTS[fault.layout]
    with planted(*fault.place) as lines:
        section = check_axis_types(case.config(), case.world_size)
    file = fault.module.replace(".", "/") + ".py"
    places = [match for problem in section.problems for match in _LINE.findall(f"{problem.where} {problem.what}")]
    is_named = any(name == file and int(number) in lines for name, number, _ in places)
    is_related = bool(fault.related) and any(function.startswith(fault.related) for *_, function in places)
    return section, is_named or is_related


_ROOT = Path(__file__).parents[2]
_LINE = re.compile(r"(\S+\.py):(\d+) \(([^)]+)\)")


def page() -> str:
    """Return the page with all faults, all planted mistakes of tests/parity/sabotage.py, and the bugs of other
    programs.
    """
    bugs = _table(("bug", "what was wrong", "planted fault that expresses it"), _bug_rows())
    pool = RankPool()
    parity = ParityTests(pool)
    try:
        outcomes = [_outcome(fault, parity) for fault in FAULTS]
    finally:
        pool.stop()
    sabotages = {name: _sabotaged(name, layout) for name, layout in SABOTAGE_LAYOUTS.items()}
    columns = ("class", "changed function", "instead of", "stands", "section types", "parity tests")
    return _PAGE.format(
        found=sum(outcome.is_right for outcome in outcomes),
        count=len(FAULTS),
        classes=len({fault.kind for fault in FAULTS}),
        summary=_summary(outcomes, list(sabotages.values())),
        rows=_table(columns, [outcome.row() for outcome in outcomes]),
        sabotaged=_table(("sabotage of the parity tests", "section types"), list(sabotages.items())),
        bugs=bugs,
    )


@dataclass(frozen=True)
class Outcome:
    """Results of the certificate's section and of the parity tests for one fault."""

    fault: Fault
    is_right: bool  # the section refuses the run, and names the right line
    line: str  # the line that the section names; '' if the section finds nothing
    difference: str  # the first difference that the parity tests find; '' if there is none

    def row(self) -> tuple[str, ...]:
        """Return the row of the page."""
        fault = self.fault
        code = (f"`{text}`" for text in (fault.function, fault.old, fault.new))
        return fault.kind, *code, f"`{self.line}`" if self.line else "no", self.difference or "no"


def _outcome(fault: Fault, parity: ParityTests) -> Outcome:
    section, is_named = check(fault)
    is_refused = section.verdict is SectionVerdict.REFUSED
    line = section.problems[0].where if section.problems else ""
    return Outcome(fault, is_refused and is_named, line, parity.find(fault.layout, fault.place))


def _sabotaged(name: str, layout: Case) -> str:
    """Return the line that the section names with one planted mistake of tests/parity/sabotage.py, or 'no'."""
    with SABOTAGES[name]():
        section = check_axis_types(layout.config(), layout.world_size)
    return f"`{section.problems[0].where}`".replace(f"{_ROOT}/", "") if section.problems else "no"


def _summary(outcomes: Sequence[Outcome], sabotaged: Sequence[str]) -> str:
    """Return the table of the faults that both, one or none of the two checks find."""
    pairs = [(bool(outcome.line), bool(outcome.difference)) for outcome in outcomes]
    counts = [pairs.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))]
    missed = sabotaged.count("no")  # the parity tests assert that they find each mistake of tests/parity/sabotage.py
    columns = ("planted", "both", "only the section", "only the parity tests", "neither")
    faults = ("faults of the first table", *map(str, counts))
    sabotages = ("sabotages of the parity tests", str(len(sabotaged) - missed), "0", str(missed), "0")
    return _table(columns, [faults, sabotages])


def _bug_rows() -> list[tuple[str, ...]]:
    """Return the rows of the bugs. Each one is expressed by a fault or has a reason why not, and never both."""
    rows = []
    known = yaml.safe_load(Path(__file__).with_name("axis_bugs.yaml").read_text(encoding="utf-8"))
    for bug in known:
        faults = [f"`{fault.function}`: `{fault.new}`" for fault in FAULTS if bug["bug"] in fault.bugs]
        reason = bug.get("inexpressible", "")
        assert bool(faults) != bool(reason), f"{bug['bug']} needs either a fault or a reason"
        rows.append((bug["bug"], bug["what"], "; ".join(faults) or f"none. {reason}"))
    assert {bug for fault in FAULTS for bug in fault.bugs} <= {bug["bug"] for bug in known}
    return rows


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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

# Mistakes of tests/parity/sabotage.py that the section does not find. In the section's runs a sample has the same row
# in its microbatch on one rank and on several ranks, so this mistake changes nothing.
NOT_FOUND = ("masks-by-own-row",)

_PAGE = """# Faults that the section "types" finds

`frontier-llm check` runs one step of a small copy of a run on one rank and on simulated ranks
([the section "types"](../check_types.md)).
Each fault of the first table was planted into the package by changing one call of one function.
The section refuses {found} of {count} faults in {classes} classes.
Its message names a line of the changed function, or of its caller, callee or reader.
The parity tests run with several processes and an independent reference.
They find a fault if a case of these tests differs from one rank; the last column names the first difference.

{summary}

{rows}

The next table has the mistakes that the parity tests plant.
A parity test fails under each of them.

{sabotaged}

The section compares a run with the same program on one rank.
It therefore does not find:

* an error that is the same on one rank, for example a wrong formula or a loss that is divided by a wrong number;
* an error of rounding, of a fused op or of a kernel: the section runs reference ops in fp64;
* an error that needs more than two ranks on an axis (three on pp), a later step, or other sizes;
* two sums of one buffer that are in flight at the same time: the section `communication` checks the order.

The parity tests with their independent reference find the first and the third kind on the layouts that they run.
They do not compare a run with a narrow gradient wire (`precision.gradient_wire`) with one rank, because it rounds.

## Bugs of other programs

The last table has reported bugs of other programs, and the planted faults that express them.
Of the findings of Megatron-LM #7452 it has the four whose descriptions could be read.

{bugs}

`python -m tests.harness.axis_faults --write docs/generated/axis_types.md` writes this page in a few minutes.
"""

if __name__ == "__main__":
    text = page()
    Path(sys.argv[2]).write_text(text, encoding="utf-8") if sys.argv[1:2] == ["--write"] else print(text)
