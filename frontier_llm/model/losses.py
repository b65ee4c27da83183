"""Registry of further losses, which are added to the next-token loss with weights from the run file.

    def small_activations(x_SBH, batch, tp):
        return x_SBH.float().square().mean(-1).sum() / batch.global_targets
    losses.register("small-activations", losses.LossTerm(small_activations))

The run file then sets `train.loss_weights: {small-activations: 0.01}`. The step logs each term before multiplication by
its weight.
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

# Names of the losses of models with experts. The model file sets their weights.
BALANCE = "router-balance"
ROUTER_Z = "router-z"
# Name of a statistic that is summed with the losses: E + 2 numbers for each layer with experts, over the tokens that
# this rank has routed. The numbers are the rows of each of the E experts, the entropy of the scores summed over tokens,
# and the number of dropped rows.
LOAD = "router-load"


def weights(config: RunConfig) -> dict[str, float]:
    """Return the weight of each further loss of a run, by name."""
    moe = config.model.moe
    return {
        **config.train.loss_weights,
        **({} if moe is None else {BALANCE: moe.balance_weight, ROUTER_Z: moe.z_weight}),
    }


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return, by name, the shapes of further tensors that stages return with their losses and that the engine sums."""
    if model.moe is None:
        return {}
    return {LOAD: (len(model.routed_layers), model.moe.experts + 2)}


@dataclass(frozen=True)
class LossTerm:
    """A further loss: a function of a virtual stage's output, the microbatch, and the tp axis.

    The stage's output is the output of its blocks, (S or s, B, H), before the final norm. The function returns a
    scalar: this microbatch's contribution to the step's loss. Contributions are summed over microbatches, replicas and
    stages, and not averaged.

    With sequence parallelism the function receives this rank's s positions and returns their contribution. The stage
    then sums the values over tp. Without sequence parallelism the function receives all S positions, and every tp rank
    returns the same value.
    """

    function: Callable[[Tensor, Microbatch, Axis], Tensor]
    # True: computed on every virtual stage; False: only on the last one, from the output of the model's last block
    every_stage: bool = False
    # True: the function receives the log-sum-exp of each token's logits, (S, B), instead of the stage's output; the
    # log-sum-exp is equal on all tp ranks
    of_logits: bool = False

    def value(self, x: Tensor, batch: Microbatch, tp: Axis, sequence_parallel: bool) -> Tensor:
        """Return the contribution of one stage and microbatch to the loss term, the same on all tp ranks.

        Each rank's gradient is the gradient of its own positions.
        """
        share = self.function(x, batch, tp)
        return whole_value(share, tp) if sequence_parallel else share


def whole_value(share: Tensor, tp: Axis) -> Tensor:
    """Return the sum of the contributions of all tp ranks. Each rank's gradient is the gradient of its own
    contribution.
    """
    return share + (all_reduce_(share.detach().double(), tp) - share.detach())


def router_losses(
    routed: Mapping[int, Routed], model: ModelConfig, sequences: int, tokens: int, tp: Axis
) -> dict[str, Tensor]:
    """Return the losses of a stage's routers and their load, by name.

    `routed` maps layer to `Routed`. `sequences` and `tokens` are the step's numbers of sequences and tokens. Each loss
    is a mean over the step's sequences or tokens, summed over layers. The load (fp64) has one row for each layer with
    experts of the complete model. Rows of layers on other stages are zero.
    """
    assert model.moe is not None
    balance = torch.stack([one.balance for one in routed.values()]).sum() / sequences
    z = torch.stack([one.z for one in routed.values()]).sum() / tokens
    both = whole_value(torch.stack((balance, z)), tp)
    # Use a slice, because a stage holds consecutive layers. A list as an index would be copied to the device, and the
    # host would wait.
    first = min(routed) - model.routed_layers.start
    load_LE = both.new_zeros(len(model.routed_layers), model.moe.experts + 2, dtype=torch.float64)
    here_LE = load_LE[first : first + len(routed)]
    here_LE[:, :-2] = torch.stack([one.rows_E for one in routed.values()])
    here_LE[:, -2] = -torch.stack([one.negative_entropy for one in routed.values()])
    dropped = [one.dropped for one in routed.values() if one.dropped is not None]
    if dropped:
        here_LE[:, -1] = torch.stack(dropped)
    return {BALANCE: both[0], ROUTER_Z: both[1], LOAD: load_LE}


def _output_z(logsumexp_SB: Tensor, batch: Microbatch, tp: Axis) -> Tensor:
    square_SB = logsumexp_SB.square()
    return mean_over_global_batch(
        square_SB if batch.loss_mask_SB is None else square_SB * batch.loss_mask_SB,
        batch.global_targets,
    )


_TERMS = {OUTPUT_Z: LossTerm(_output_z, of_logits=True)}


def register(name: str, term: LossTerm) -> None:
    """Register a further loss under the name that `train.loss_weights: {name: …}` uses."""
    _TERMS[name] = term


def select(names: Iterable[str]) -> dict[str, LossTerm]:
    """Return the registered losses with these names. For an unknown name, ConfigError suggests a similar one."""
    for name in names:
        if name not in _TERMS:
            fix = (
                f"{suggest(name, _TERMS)}; or give the plugin that registers it: plugins=[my_losses.py] "
                f"(docs/extending.md)"
            )
            raise ConfigError(f"{name!r} is not a registered loss", fix, "train.loss_weights")
    return {name: _TERMS[name] for name in names}
