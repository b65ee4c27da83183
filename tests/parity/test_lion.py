"""Lion on several layouts against a serial run in float64 written from the paper's formula."""

from __future__ import annotations

import pytest
import torch

from tests.harness.pool import RankPool
from tests.oracle import gpt
from tests.parity.cases import STEPS, Case
from tests.parity.compare import Run, Tensors, differences, gather
from tests.parity.play import batch, play

LION = ("optimizer.name=lion",)


def serial_lion(case: Case, initial: Tensors) -> Run:
    """The oracle's run."""
    config = case.config()
    model, optimizer = config.model.model_dump(), config.optimizer
    beta1, beta2 = optimizer.betas
    now = {name: torch.from_numpy(tensor.copy()) for name, tensor in initial.items()}
    momenta = {name: torch.zeros_like(tensor) for name, tensor in now.items()}
    batches = [torch.from_numpy(batch(step, config)[0]) for step in range(STEPS)]
    losses, norms, first = [], [], {}
    for step, tokens in enumerate(batches, start=1):
        value, gradients = gpt.gradients(model, now, tokens)
        first = first or gradients
        norm = gpt.global_norm(gradients)
        lr = gpt.learning_rate(step, optimizer.lr, optimizer.min_lr, optimizer.warmup_steps, config.train.steps)
        for name, gradient in gradients.items():
            gradient = gradient * min(1.0, optimizer.clip_norm / (norm + 1e-6))
            sign = torch.sign(beta1 * momenta[name] + (1 - beta1) * gradient)
            now[name] = now[name] * (1 - lr * optimizer.weight_decay * gpt.decays(name)) - lr * sign
            momenta[name] = beta2 * momenta[name] + (1 - beta2) * gradient
        losses.append(value)
        norms.append(norm)
    losses.append(float(gpt.loss(model, now, torch.cat(batches[:2]))))
    as_numpy = [{name: tensor.numpy() for name, tensor in tensors.items()} for tensors in (first, now)]
    return Run(losses, norms, initial, *as_numpy, drift=())


# without biases: a key's bias has no gradient but rounding, whose sign is anybody's guess
@pytest.mark.parametrize(
    "case", [Case("mpt", tp=2, dp=2, settings=LION), Case("mpt", pp=2, dp=2, schedule="v-half", settings=LION)], ids=str
)
def test_it_trains_as_the_serial_formula(ranks: RankPool, case: Case) -> None:
    run = gather(ranks.run(case.world_size, play, case))
    assert differences(run, serial_lion(case, run.initial)) == []
