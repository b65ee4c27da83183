"""Further losses beside the one over the next tokens: a function, registered under a name, weighted in the run file.

    def small_activations(x_SBH, batch, tp):
        return x_SBH.float().square().mean(-1).sum() / batch.global_targets
    losses.register("small-activations", losses.LossTerm(small_activations))     # train.loss_weights:
    {small-activations: 0.01}

The step logs each term without its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from frontier_llm.comm import Axis, all_reduce_
from frontier_llm.config import OUTPUT_Z, ModelConfig, RunConfig
from frontier_llm.errors import ConfigError, suggest
from frontier_llm.model.batch import Microbatch
from frontier_llm.model.experts import Routed
from frontier_llm.parallel.tensor import mean_over_global_batch

# of models with experts, weighted in the model file
BALANCE = "router-balance"
ROUTER_Z = "router-z"
LOAD = "router-load"  # no loss: what model.experts.Routed calls so, for each layer; each rank's own


def weights(config: RunConfig) -> dict[str, float]:
    """Of each further loss of a run, by name."""
    moe = config.model.moe
    return {
        **config.train.loss_weights,
        **({} if moe is None else {BALANCE: moe.balance_weight, ROUTER_Z: moe.z_weight}),
    }


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of what stages return beside losses, to be summed."""
    if model.moe is None:
        return {}
    return {LOAD: (len(model.routed_layers), model.moe.experts + 2)}


@dataclass(frozen=True)
class LossTerm:
    """A function of what a virtual stage's blocks return, (S or s, B, H) before the final norm, the microbatch, and the
    tp axis.

    It returns a scalar: this microbatch's share of the step's term, so that shares only have to be summed over
    microbatches, replicas and stages. With sequence parallelism it is given this rank's s positions and returns their
    share (partial over tp: the stage sums the values); without, all S positions, and every tp rank returns the same.
    """

    function: Callable[[Tensor, Microbatch, Axis], Tensor]
    every_stage: bool = False  # of the pipeline; False: the last one, behind the model's last block
    # the function is given each token's log-sum-exp of the logits, (S, B), the same on all tp ranks, instead of x
    of_logits: bool = False

    def value(self, x: Tensor, batch: Microbatch, tp: Axis, sequence_parallel: bool) -> Tensor:
        """The term's share of one stage and microbatch, the same on all tp ranks; each rank's gradient is that of
        its own positions.
        """
        share = self.function(x, batch, tp)
        return whole_value(share, tp) if sequence_parallel else share


def whole_value(share: Tensor, tp: Axis) -> Tensor:
    """The sum of all tensor ranks' shares; each rank's gradient is that of its own."""
    return share + (all_reduce_(share.detach().double(), tp) - share.detach())


def router_losses(
    routed: Mapping[int, Routed], model: ModelConfig, sequences: int, tokens: int, tp: Axis
) -> dict[str, Tensor]:
    """Losses of a stage's routers and their load, by name. `routed`: by layer. `sequences`, `tokens`: of the step.

    The losses are sums over layers of the mean over sequences or tokens. The load has a row for each layer with experts
    of the whole model; rows of other stages' layers are zero.
    """
    assert model.moe is not None
    balance = torch.stack([one.balance for one in routed.values()]).sum() / sequences
    z = torch.stack([one.z for one in routed.values()]).sum() / tokens
    both = whole_value(torch.stack((balance, z)), tp)
    first = model.routed_layers.start
    load_LE = both.new_zeros(len(model.routed_layers), model.moe.experts + 2, dtype=torch.float64)
    load_LE[[layer - first for layer in routed]] = torch.stack([one.load for one in routed.values()])
    return {BALANCE: both[0], ROUTER_Z: both[1], LOAD: load_LE}


def _output_z(logsumexp_SB: Tensor, batch: Microbatch, tp: Axis) -> Tensor:
    square_SB = logsumexp_SB.square()
    return mean_over_global_batch(
        square_SB if batch.loss_mask_SB is None else square_SB * batch.loss_mask_SB,
        batch.global_targets,
    )


_TERMS = {OUTPUT_Z: LossTerm(_output_z, of_logits=True)}


def register(name: str, term: LossTerm) -> None:
    """Make `train.loss_weights: {name: …}` mean this term."""
    _TERMS[name] = term


def select(names: Iterable[str]) -> dict[str, LossTerm]:
    """The registered terms of these names. Raises ConfigError with the nearest name."""
    for name in names:
        if name not in _TERMS:
            fix = (
                f"{suggest(name, _TERMS)}; or name the plugin that registers it: plugins=[my_losses.py] "
                f"(docs/extending.md)"
            )
            raise ConfigError(f"{name!r} is not a loss that was registered", fix, "train.loss_weights")
    return {name: _TERMS[name] for name in names}
