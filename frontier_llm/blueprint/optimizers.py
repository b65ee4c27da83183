"""Registry of optimizers: which states (for example momentum) each optimizer keeps for each parameter.

It is the single source of truth for ZeRO's slices, memory estimates, checkpoints and the comparison of replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from frontier_llm.blueprint.layout import statistics_bytes
from frontier_llm.blueprint.matrices import is_matrix, matrices_of
from frontier_llm.blueprint.parameters import How, Parameter, ParameterKind, Split, model_parameters
from frontier_llm.config import ModelConfig
from frontier_llm.errors import ConfigError, suggest

MASTER = "master"  # fp32 or fp64 copy of the weights, the first state of every optimizer
STATISTIC = "statistic"  # the state of a tensor in `OptimizerRule.statistics`


@dataclass(frozen=True)
class OptimizerRule:
    """The states that one optimizer keeps, in fp32 (in fp64 if the model computes in fp64).

    `states` names the states that have the shape of their parameter. `statistics` declares tensors of other shapes.
    """

    name: str  # optimizer.name in a run file.
    # Names of the states besides the master copy, in their order in a checkpoint's shard file
    states: Callable[[Parameter], tuple[str, ...]]
    # True if the update needs the complete tensor, so that ZeRO must not cut it
    whole: Callable[[Parameter], bool] = lambda parameter: False
    gathers: bool = (
        # True: if slices of complete tensors would need too much padding, ZeRO may cut the tensor. The update then
        # gathers it (optim.matrices).
        False
    )
    # Small additional tensors with other shapes than the parameter. They are PARTIAL on the axes over which the update
    # sums them. Tensor parallelism may split them, but ZeRO does not: every replica that owns a slice of the parameter
    # keeps them (optim.matrices).
    statistics: Callable[[Parameter], tuple[Parameter, ...]] = lambda parameter: ()

    def kinds(self, parameter: Parameter) -> tuple[str, ...]:
        """Return the names of all states of a parameter: the master copy and `states`."""
        return (MASTER, *self.states(parameter))

    def bytes_per_element(self, parameter: Parameter, item_bytes: int = 4) -> int:
        """Return the bytes of all states per element of this parameter. `item_bytes` is 8 under fp64."""
        return len(self.kinds(parameter)) * item_bytes


def matrix_means(parameter: Parameter) -> tuple[Parameter, ...]:
    """Declare the tensors of row and column means that Adafactor keeps for the matrices of a parameter.

    Row means have the parameter's shape without its last dim. Column means are [piece, expert, column]. The result is
    empty if the parameter is not a matrix.
    """
    if not is_matrix(parameter):
        return ()
    matrices = matrices_of(parameter)
    last = len(parameter.shape) - 1
    leading = int(parameter.kind is ParameterKind.EXPERTS)

    def of_rows(dim: int) -> Split | How:
        return Split(dim) if dim < last else How.PARTIAL

    def of_columns(dim: int) -> Split | How:
        if dim < leading:
            return Split(1)
        return Split(2) if dim == last else How.PARTIAL

    def declared(name: str, shape: tuple[int, ...], cut: Callable[[int], Split | How]) -> Parameter:
        axes = {
            axis: cut(how.dim) if isinstance(how, Split) else How.REPLICATED for axis, how in parameter.axes.items()
        }
        return replace(
            parameter,
            name=f"{parameter.name}.{name}",
            shape=shape,
            axes=axes,
            pieces=(),
            grouped=False,
        )

    columns = (len(matrices), matrices[0].count, parameter.shape[last])
    return declared("row_means", parameter.shape[:last], of_rows), declared("column_means", columns, of_columns)


ADAMW = OptimizerRule("adamw", lambda parameter: ("exp_avg", "exp_avg_sq"))

LION = OptimizerRule("lion", lambda parameter: ("momentum",))
MUON = OptimizerRule(
    "muon",
    lambda parameter: ("momentum",) if is_matrix(parameter) else ADAMW.states(parameter),
    whole=is_matrix,
    gathers=True,
)
ADAFACTOR = OptimizerRule(
    "adafactor",
    lambda parameter: ("exp_avg",) if is_matrix(parameter) else ADAMW.states(parameter),
    statistics=matrix_means,
)

_RULES = {rule.name: rule for rule in (ADAMW, ADAFACTOR, LION, MUON)}


def declare(rule: OptimizerRule) -> None:
    """Register a rule, so that `optimizer.name: <rule.name>` is valid. Raises AssertionError if the name is in use."""
    assert _RULES.setdefault(rule.name, rule) is rule, f"there is an optimizer {rule.name!r} already"


def optimizer_rule(name: str) -> OptimizerRule:
    """Return the rule of an `optimizer.name`. Raises ConfigError with the nearest names if there is none."""
    if name not in _RULES:
        raise ConfigError(f"{name!r} is not an optimizer", suggest(name, _RULES), "optimizer.name")
    return _RULES[name]


def state_bytes(model: ModelConfig, name: str, dtype: str = "bf16") -> int:
    """Return the bytes of the optimizer state of a complete model that computes in `dtype`.

    A checkpoint of the model has this size too, because the states include the master copy of the weights.
    """
    rule = optimizer_rule(name)
    item_bytes = statistics_bytes(dtype)
    parameters = model_parameters(model).values()
    statistics = sum(tensor.numel for parameter in parameters for tensor in rule.statistics(parameter))
    return statistics * item_bytes + sum(
        rule.bytes_per_element(parameter, item_bytes) * parameter.numel for parameter in parameters
    )
