"""Simulates the gradient sum of one rank with one communication in flight, and the gain of the remedies in
docs/benchmarks/planner.md.

The sums of buckets share one stream with the collectives over tp, in the order in which the runtime issues them
(`comm.group.OneInFlight`): a communication begins after the previous one and after the compute that was queued before
it. Compute waits only for results that it needs. The simulation covers the last backward of each layer of a rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.harness import MEASURED, parse_arguments, write_measured
from frontier_llm.blueprint.items import ATTENTION, PASSES, Collective, Item, Phase, Product
from frontier_llm.blueprint.layout import Layout
from frontier_llm.blueprint.parameters import Parameter, ParameterKind, Split, block_parameters
from frontier_llm.blueprint.work import block_work
from frontier_llm.config import ModelConfig, load_model
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.costs.parameters import stage_numel
from frontier_llm.planner.costs.seconds import alone_s, work_s
from frontier_llm.planner.costs.time import gradient_reduction_s, tied_sum_s
from frontier_llm.planner.search import simulate_layout

PAGE = MEASURED / "planner.md"
MODEL = "gpt-175b"
CASES = {
    "TP8 PP8 DP16, 1f1b": Layout(tp=8, pp=8, dp=16, micro_batch=2, microbatches=64, sequence_parallel=True),
    "TP8 PP4 DP32, 1f1b": Layout(tp=8, pp=4, dp=32, micro_batch=2, microbatches=32, sequence_parallel=True),
}


@dataclass(frozen=True)
class Linear:
    """Backward of one linear layer, in seconds, and the compute that precedes it."""

    # time of the compute between the layer's output gradient and the next layer: attention, norm, activation
    before_s: float
    input_s: float  # time of the product of the input gradient
    weight_s: float  # time of the product of the weight gradient, including its addition to the buffer
    column: bool  # column-parallel: it gathers its input again and scatters its input gradient
    collective_s: float  # time of one of the layer's collectives over tp
    numel: float  # elements of the weight on this rank


@dataclass
class Stream:
    """Two clocks of a rank: its compute, and its one communication in flight."""

    seconds_per_element: float
    bucket_numel: float
    pieces: bool  # True: a sum is cut into pieces that fit into the compute before the next collective
    compute_s: float = 0.0
    communication_s: float = 0.0
    filled: float = 0.0  # elements of the incomplete bucket
    waiting_s: float = field(default=0.0)  # sums that have not been issued, with `pieces`

    def compute(self, seconds: float) -> None:
        """Queue compute. With `pieces`, sums fill the time in which the stream of communication is free during this
        compute.
        """
        if self.pieces:
            free_s = self.compute_s + seconds - max(self.communication_s, self.compute_s)
            piece_s = min(self.waiting_s, max(free_s, 0.0))
            if piece_s > 0:
                self.waiting_s -= piece_s
                self.communicate(piece_s)
        self.compute_s += seconds

    def communicate(self, seconds: float) -> float:
        """Issue a communication and return its end."""
        self.communication_s = max(self.communication_s, self.compute_s) + seconds
        return self.communication_s

    def wait(self, end_s: float) -> None:
        """Let compute wait for a communication."""
        self.compute_s = max(self.compute_s, end_s)

    def complete(self, numel: float) -> None:
        """Add a complete weight gradient to the bucket, and issue the bucket's sum if it is full."""
        self.filled += numel
        if self.filled >= self.bucket_numel:
            self.sum_bucket()

    def sum_bucket(self) -> None:
        """Issue the sum of the bucket, or with `pieces` put it into the queue."""
        seconds = self.filled * self.seconds_per_element
        self.filled = 0.0
        if self.pieces:
            self.waiting_s += seconds
        else:
            self.communicate(seconds)

    def finish(self) -> float:
        """Issue all remaining sums and return the end of the last communication or compute."""
        self.sum_bucket()
        self.communicate(self.waiting_s)
        return max(self.compute_s, self.communication_s)


def run(layers: Sequence[Linear], stream: Stream) -> float:
    """Return the seconds of these backwards (last layer first) and of all sums that begin during them."""
    for one in layers:
        stream.compute(one.before_s)
        if one.column:
            gathered_s = stream.communicate(one.collective_s)
            stream.compute(one.input_s)
            scattered_s = stream.communicate(one.collective_s)
            stream.wait(gathered_s)
            stream.compute(one.weight_s)
            stream.wait(scattered_s)
        else:
            stream.wait(stream.communicate(one.collective_s))
            stream.compute(one.input_s)
            stream.compute(one.weight_s)
        stream.complete(one.numel)
    return stream.finish()


def backward_of_block(model: ModelConfig, layout: Layout, numbers: Rates) -> list[Linear]:
    """Return the linear layers of a block in the order of backward."""
    items = block_work(model, layout, numbers)
    between_s = _seconds([one for one in items if one.cause in (PASSES, ATTENTION)], layout, numbers)
    attention_s = _seconds([one for one in items if one.cause == ATTENTION], layout, numbers)
    weights = [one for one in block_parameters(model, 0, layout.sequence_parallel) if _is_cut(one)]
    passes_s = (between_s - attention_s) / len(weights)
    listed = []
    for weight in reversed(weights):
        mine = [one for one in items if isinstance(one.work, Product) and one.work.parameter == weight.name]
        size = max(one.work.size_bytes for one in items if isinstance(one.work, Collective) and one.work.axis == "tp")
        column = weight.axes["tp"] == Split(0)
        listed.append(
            Linear(
                before_s=passes_s + (attention_s if ".qkv." in weight.name else 0.0),
                input_s=sum(work_s(one.work, layout, numbers, {}) for one in mine if one.phase is Phase.I),
                weight_s=sum(work_s(one.work, layout, numbers, {}) for one in mine if one.phase is Phase.W),
                column=column,
                collective_s=alone_s(Collective("tp", "all_gather", size), layout.tp, numbers),
                numel=weight.rank_numel({"tp": layout.tp}),
            )
        )
    return listed


def _is_cut(one: Parameter) -> bool:
    return one.kind is ParameterKind.MATRIX and isinstance(one.axes.get("tp"), Split)


def _seconds(items: Sequence[Item], layout: Layout, numbers: Rates) -> float:
    return sum(work_s(one.work, layout, numbers, {}) for one in items if one.phase is not Phase.F)


def exposed_s(layers: Sequence[Linear], seconds_per_element: float, bucket_numel: float, pieces: bool) -> float:
    """Return the seconds by which the sums lengthen these backwards."""
    without = Stream(seconds_per_element=0.0, bucket_numel=bucket_numel, pieces=False)
    summing = Stream(seconds_per_element=seconds_per_element, bucket_numel=bucket_numel, pieces=pieces)
    return run(layers, summing) - run(layers, without)


def table(cases: dict[str, Layout]) -> Iterator[str]:
    """Yield the table: for each layout the time of all sums, and their exposed part in the order of the runtime and
    with the remedies.
    """
    model = load_model(MODEL)
    numbers = rates(load_machine("frontier"))
    yield "| layout | gradients, wire | all sums, s | priced as exposed, s | order that runs | in pieces | step, s |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for name, layout in cases.items():
        block = backward_of_block(model, layout, numbers)
        layers = block * (model.layers // layout.pp)
        numel = float(stage_numel(model, layout.tp, model.layers / layout.pp, False, False))
        for wire in ("full", "bf16"):
            sent = replace(layout, gradient_wire=wire)
            summed_s, _ = gradient_reduction_s(sent, numbers, numel)
            shown = [
                exposed_s(layers, float(summed_s) / numel, numbers.bucket_parameters, pieces)
                for pieces in (False, True)
            ]
            plan = simulate_layout(model, sent, numbers)
            step_s = plan.step_s
            priced_s = plan.simulated.reduce_s - float(tied_sum_s(model, sent, numbers))
            cells = (
                name,
                "32 bit" if wire == "full" else "16 bit",
                f"{float(summed_s):.2f}",
                f"{priced_s:.2f}",
                *(f"{one:.2f} s, {100 * one / step_s:.1f} %" for one in shown),
                f"{step_s:.1f}",
            )
            yield "| " + " | ".join(cells) + " |"


def main() -> None:
    options = parse_arguments(argparse.ArgumentParser(description=__doc__), smoke=[])
    cases = dict(list(CASES.items())[:1]) if options.smoke else CASES
    write_measured(PAGE, __file__, "\n".join(table(cases)) + "\n", options.smoke)


if __name__ == "__main__":
    main()
