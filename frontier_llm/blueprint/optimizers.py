"""What each optimizer keeps of each parameter: ZeRO's slices, memory, checkpoints and the comparison of replicas
read this alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from frontier_llm.blueprint.layout import statistics_bytes
from frontier_llm.blueprint.matrices import is_matrix, matrices_of
from frontier_llm.blueprint.parameters import How, Parameter, ParameterKind, Split, model_parameters
from frontier_llm.config import ModelConfig
from frontier_llm.errors import ConfigError, suggest

MASTER = "master"  # the wide copy of the weights, which every optimizer keeps first
STATISTIC = "statistic"  # what is kept of a tensor that an optimizer declares


@dataclass(frozen=True)
class OptimizerRule:
    """The states of one optimizer, in fp32 (fp64 under fp64): by name those of the shape of their parameter, and
    tensors of other shapes.
    """

    name: str  # optimizer.name in a run file
    # beside the master copy, in the order in which a shard file holds them
    states: Callable[[Parameter], tuple[str, ...]]
    # its update needs the whole tensor: ZeRO must not cut it
    whole: Callable[[Parameter], bool] = lambda parameter: False
    gathers: bool = (
        False  # but may cut it where whole tensors would leave gaps: the update gathers them (optim.matrices)
    )
    # small tensors of other shapes than the parameter's: PARTIAL on the axes over which the update has to sum them.
    # Every owner of a slice of
    # the parameter keeps its rank's part of them whole (optim.matrices)
    statistics: Callable[[Parameter], tuple[Parameter, ...]] = lambda parameter: ()

    def kinds(self, parameter: Parameter) -> tuple[str, ...]:
        """Everything that is kept of a parameter: the master copy and the states."""
        return (MASTER, *self.states(parameter))

    def bytes_per_element(self, parameter: Parameter, item_bytes: int = 4) -> int:
        """Of an element of this parameter, the master copy included; `item_bytes` is 8 under fp64."""
        return len(self.kinds(parameter)) * item_bytes


def matrix_means(parameter: Parameter) -> tuple[Parameter, ...]:
    """Of each matrix that a parameter is made of the mean of every row, [..., row], and of every column, [piece,
    expert, column].
    """
    if not is_matrix(parameter):
        return ()
    matrices = matrices_of(parameter)
    last = len(parameter.shape) - 1
    lead = int(parameter.kind is ParameterKind.EXPERTS)

    def of_rows(dim: int) -> Split | How:
        return Split(dim) if dim < last else How.PARTIAL

    def of_columns(dim: int) -> Split | How:
        if dim < lead:
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
    """Make `optimizer.name: <rule.name>` valid. The names of optimizers that are there already cannot be taken."""
    assert _RULES.setdefault(rule.name, rule) is rule, f"there is an optimizer {rule.name!r} already"


def optimizer_rule(name: str) -> OptimizerRule:
    """The rule of an `optimizer.name`. Raises ConfigError with the nearest names."""
    if name not in _RULES:
        raise ConfigError(f"{name!r} is no optimizer", suggest(name, _RULES), "optimizer.name")
    return _RULES[name]


def state_bytes(model: ModelConfig, name: str, dtype: str = "bf16") -> int:
    """What the optimizer keeps of a whole model that computes in `dtype`, which is also what a checkpoint of it
    holds.
    """
    rule = optimizer_rule(name)
    item_bytes = statistics_bytes(dtype)
    parameters = model_parameters(model).values()
    statistics = sum(tensor.numel for parameter in parameters for tensor in rule.statistics(parameter))
    return statistics * item_bytes + sum(
        rule.bytes_per_element(parameter, item_bytes) * parameter.numel for parameter in parameters
    )
