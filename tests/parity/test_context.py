"""Context parallelism: a run equals one rank and the oracle for every distribution of tokens over ranks.

The tests compare losses, target counts, gradients and parameters.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from frontier_llm.topology.grid import held_positions
from tests.harness.families import FAMILIES
from tests.harness.marks import but_first, exhaustive, thorough
from tests.parity.cases import Case
from tests.parity.compare import differences
from tests.parity.test_layouts import RunCase, run_case
from tests.parity.witness import witness

__all__ = ["run_case"]

LONGER = ("model.sequence_length=16",)
GATHER, RING = (Case("llama", cp=2, settings=(f"parallel.context_attention={way}",)) for way in ("gather", "ring"))


@pytest.mark.parametrize("documents", [exhaustive(False), True], ids=["one-document", "document-resets"])
@pytest.mark.parametrize(
    "family", [family if family in ("llama", "mpt") else exhaustive(family) for family in FAMILIES]
)  # the families that use rotations and ALiBi
@pytest.mark.parametrize("cp", but_first([2, 4], in_ci=1))
def test_every_mask_and_position_equals_the_oracle(run_case: RunCase, cp: int, family: str, documents: bool) -> None:
    case = Case(family, cp=cp, documents=documents, settings=LONGER)
    serial = run_case(case.serial())
    assert differences(serial, witness(case.serial(), serial.initial)) == []
    assert differences(run_case(case), serial) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [
        Case("llama", tp=2, cp=2, dp=2, sequence_parallel=True, recompute="selective", documents=True, tensor_chunks=2),
        Case("gpt", cp=2, pp=2, sequence_parallel=False, schedule="zb-h1", recompute="full", documents=True),
        exhaustive(
            Case(
                "mpt", cp=2, dp=2, zero=0, micro_batch=2, documents=True, overlap_gradients=False, bucket_elements=3_000
            )
        ),
        thorough(
            Case(
                "neox",
                tp=2,
                cp=2,
                pp=2,
                sequence_parallel=True,
                schedule="interleaved",
                order="tp-pp-dp",
                overlap_weights=True,
            )
        ),
        exhaustive(Case("llama", cp=4, pp=2, schedule="gpipe", transport="torch", documents=True)),
    ],
    ids=str,
)
def test_with_every_other_axis(run_case: RunCase, case: Case) -> None:
    case = replace(case, settings=LONGER)
    assert differences(run_case(case), run_case(case.serial())) == []


@pytest.mark.thorough
@pytest.mark.parametrize("documents", [exhaustive(False), True], ids=["one-document", "document-resets"])
@pytest.mark.parametrize("family", but_first(["llama", "mpt"], in_ci=1))
@pytest.mark.parametrize("way", but_first(["ring", "heads", "gather"], 2))
def test_every_way_of_attention(run_case: RunCase, way: str, family: str, documents: bool) -> None:
    case = Case(
        family,
        cp=4,
        documents=documents,
        recompute="selective",
        settings=(*LONGER, f"parallel.context_attention={way}"),
    )
    assert differences(run_case(case), run_case(case.serial())) == []


@pytest.mark.thorough
@pytest.mark.parametrize("way", but_first(["gather", "ring"], in_ci=1))
def test_torchs_flash_kernels_over_stretches(run_case: RunCase, way: str) -> None:
    case = Case("llama", cp=4, settings=(*LONGER, f"parallel.context_attention={way}", "ops.attention=sdpa"))
    assert differences(run_case(case), run_case(Case("llama", settings=LONGER))) == []


@pytest.mark.thorough
@pytest.mark.parametrize("kind", but_first(["yarn", "ntk", "linear"], in_ci=1))
def test_every_scaling_of_rotations(run_case: RunCase, kind: str) -> None:
    """The family `llama` tests Llama 3's scaling.

    A head of 16 dims has 8 rotations: some are fast and some are slow within 8 tokens.
    """
    scaling = [
        f"model.rope_scaling.{key}={value}"
        for key, value in (("kind", kind), ("factor", 4), ("original_sequence_length", 8), ("beta_fast", 1.5))
    ]
    settings = (*LONGER, "model.rope_fraction=1.0", "model.head_dim=16", *scaling, "model.rope_scaling.beta_slow=0.25")
    case = Case("neox", cp=2, settings=settings)
    serial = run_case(case.serial())
    assert differences(serial, witness(case.serial(), serial.initial)) == []
    assert differences(run_case(case), serial) == []


@pytest.mark.thorough
@pytest.mark.parametrize("way", but_first(["ring", "heads", "gather"], in_ci=1))
def test_every_way_in_a_sliding_window(run_case: RunCase, way: str) -> None:
    settings = (*LONGER, "model.sliding_window=5")
    case = Case(
        "llama",
        cp=2,
        tp=2,
        sequence_parallel=True,
        documents=True,
        settings=(*settings, f"parallel.context_attention={way}"),
    )
    serial = run_case(case.serial())
    assert differences(serial, witness(case.serial(), serial.initial)) == []
    assert differences(run_case(case), serial) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mistake", "case", "reddens"),
    [
        exhaustive("dropped-dp-sum", Case("llama", cp=2), "gradient of layers.0"),
        exhaustive("local-division", Case("llama", cp=2, documents=True), "losses"),
        thorough("mask-by-own-index", Case("llama", cp=2), "losses"),
        thorough(
            "mask-by-own-index",
            Case("mpt", cp=2, documents=True, settings=("parallel.context_attention=gather",)),
            "losses",
        ),
        exhaustive("positions-by-own-index", Case("neox", cp=2), "losses"),
        ("keys-without-gradient", GATHER, "gradient of layers.0.attention.qkv.weight"),
        ("missing-merge", RING, "losses"),
        exhaustive("backward-with-own-logsumexp", RING, "gradient of layers.0.attention.qkv.weight"),
    ],
    ids=lambda value: str(value),
)
def test_sabotage_turns_the_comparison_red(run_case: RunCase, mistake: str, case: Case, reddens: str) -> None:
    case = replace(case, settings=(*LONGER, *case.settings))
    found = differences(run_case(case, mistake), run_case(case.serial()))
    assert any(reddens in line for line in found), found


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_each_rank_has_the_same_number_of_scores(cp: int) -> None:
    """The query at position p computes p + 1 scores. Rank r has chunks r and 2 cp - 1 - r, which together have the same
    number of scores on each rank.
    """
    held = [held_positions(96, cp, rank) for rank in range(cp)]
    assert sorted(position for parts in held for part in parts for position in part) == list(range(96))
    assert len({sum(position + 1 for part in parts for position in part) for parts in held}) == 1
