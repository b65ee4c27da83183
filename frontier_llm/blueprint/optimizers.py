"""What each optimizer keeps of each parameter: ZeRO's slices, memory, checkpoints and the comparison of replicas read this alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from frontier_llm.blueprint.layout import statistics_bytes
from frontier_llm.blueprint.matrices import is_matrix
from frontier_llm.blueprint.parameters import Parameter, model_parameters
from frontier_llm.config import ModelConfig
from frontier_llm.errors import ConfigError, suggest

MASTER = "master"  # the wide copy of the weights, which every optimizer keeps first


@dataclass(frozen=True)
class OptimizerRule:
    """The states of one optimizer, in fp32 (fp64 under fp64), each of the shape of its parameter, by name."""

    name: str  # optimizer.name in a run file
    states: Callable[[Parameter], tuple[str, ...]]  # beside the master copy, in the order in which a shard file holds them
    whole: Callable[[Parameter], bool] = lambda parameter: False  # its update needs the whole tensor: ZeRO must not cut it
    gathers: bool = False  # but may cut it where whole tensors would leave gaps: the update gathers them (optim.whole)

    def kinds(self, parameter: Parameter) -> tuple[str, ...]:
        """Everything that is kept of a parameter: the master copy and the states."""
        return (MASTER, *self.states(parameter))

    def bytes_per_element(self, parameter: Parameter, item_bytes: int = 4) -> int:
        """Of an element of this parameter, the master copy included; `item_bytes` is 8 under fp64."""
        return len(self.kinds(parameter)) * item_bytes


ADAMW = OptimizerRule("adamw", lambda parameter: ("exp_avg", "exp_avg_sq"))

LION = OptimizerRule("lion", lambda parameter: ("momentum",))
MUON = OptimizerRule(
    "muon", lambda parameter: ("momentum",) if is_matrix(parameter) else ADAMW.states(parameter), whole=is_matrix, gathers=True
)

_RULES = {rule.name: rule for rule in (ADAMW, LION, MUON)}


def declare(rule: OptimizerRule) -> None:
    """Make `optimizer.name: <rule.name>` valid. The names of optimizers that are there already cannot be taken."""
    assert _RULES.setdefault(rule.name, rule) is rule, f"there is an optimizer {rule.name!r} already"


def optimizer_rule(name: str) -> OptimizerRule:
    """The rule of an `optimizer.name`. Raises ConfigError with the nearest names."""
    if name not in _RULES:
        raise ConfigError(f"{name!r} is no optimizer", suggest(name, _RULES), "optimizer.name")
    return _RULES[name]


def state_bytes(model: ModelConfig, name: str, dtype: str = "bf16") -> int:
    """What the optimizer keeps of a whole model that computes in `dtype`, which is also what a checkpoint of it holds."""
    rule, item_bytes = optimizer_rule(name), statistics_bytes(dtype)
    return sum(rule.bytes_per_element(parameter, item_bytes) * parameter.numel for parameter in model_parameters(model).values())
