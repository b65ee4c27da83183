"""The modules hold exactly the parameters that the blueprint declares: names, shapes, order and position, on every
layout.
"""

from __future__ import annotations

import pytest
import torch

from frontier_llm.blueprint.parameters import rank_parameters
from frontier_llm.comm import Axis, Ledger
from frontier_llm.config import OpsConfig, load_model
from frontier_llm.model import build_stages
from frontier_llm.ops import select_ops
from frontier_llm.parallel.tensor import LayerContext, ShardedParameter, WeightGradients
from frontier_llm.topology.plan import split_layers

OPS = select_ops(OpsConfig(), "cpu", torch.float32)


@pytest.mark.parametrize("held", [(0, 1, 2, 3), (0,), (1, 2), (3,), (0, 2), (1, 3), (0, 3)])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "llama-tiny qkv_bias", "mpt-tiny", "gpt-22b", "llama-3-8b"])
def test_modules_hold_what_the_blueprint_declares(
    name: str, tp: int, sequence_parallel: bool, held: tuple[int, ...]
) -> None:
    model = load_model(name.split()[0], dict.fromkeys(name.split()[1:], True))
    specs = [split_layers(model, 4)[index] for index in held]
    declared = list(rank_parameters(model, specs, sequence_parallel))
    for rank in range(tp):
        axis = Axis("tp", rank, tp, tuple(range(tp)), None, Ledger())
        context = LayerContext(axis, sequence_parallel, OPS, WeightGradients(), torch.float32)
        stages = build_stages(model, specs, context, torch.device("meta"))
        parameters = list(dict.fromkeys(parameter for stage in stages for parameter in stage.parameters()))
        assert all(isinstance(parameter, ShardedParameter) for parameter in parameters)
        assert [parameter.spec.parameter for parameter in parameters] == declared
        for parameter in parameters:
            spec = parameter.spec
            assert tuple(parameter.shape) == spec.shape and spec.numel == spec.parameter.rank_numel({"tp": tp})
            first = (rank == 0 or spec.splits_over("tp")) and (0 in held or "tied" not in spec.parameter.partial_axes())
            assert spec.counted == first, spec.name
