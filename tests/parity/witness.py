"""Runs a parity case with the oracle. Only the initial weights and the batches are shared with the package."""

from __future__ import annotations

import torch

from tests.oracle import gpt
from tests.oracle.optimizers import Direction, adamw
from tests.parity.cases import STEPS, Case
from tests.parity.compare import Run, Tensors
from tests.parity.three_steps import batch, learnt


def witness(case: Case, initial: Tensors, direction: Direction | None = None) -> Run:
    """Return loss, gradients, norm and parameters after the steps, computed by `tests.oracle.gpt`.

    The optimizer is AdamW unless another direction is given.
    """
    config = case.config()
    further = {"output_z": config.train.loss_weights.get("output-z"), "seed": config.train.seed}
    model = {**config.model.model_dump(), **further}
    optimizer = config.optimizer
    params = {name: torch.from_numpy(tensor.copy()) for name, tensor in initial.items()}
    batches = [tuple(map(torch.from_numpy, batch(step, config))) for step in range(STEPS)]
    documents = [ids if case.documents else None for _, ids in batches]
    masks = [learnt(tokens) if case.read_only else None for tokens, _ in batches]
    _, gradients = gpt.gradients(model, params, batches[0][0], documents[0], masks[0], 0)
    losses, norms, final = gpt.train(
        model,
        params,
        [tokens for tokens, _ in batches],
        direction or adamw(optimizer.betas, optimizer.eps),
        documents=documents,
        learnt=masks,
        rate=lambda update: gpt.learning_rate(
            update, optimizer.lr, optimizer.min_lr, optimizer.warmup_steps, config.train.steps
        ),
        weight_decay=optimizer.weight_decay,
        clip_norm=optimizer.clip_norm,
    )
    held_out, their_documents = (torch.cat(pair) for pair in zip(*batches[:2], strict=True))
    their_mask = learnt(held_out) if case.read_only else None
    losses.append(
        float(gpt.loss(model, final, held_out, their_documents if case.documents else None, learnt_BS1=their_mask))
    )
    as_numpy = {name: tensor.numpy() for name, tensor in gradients.items()}
    return Run(losses, norms, initial, as_numpy, {name: tensor.numpy() for name, tensor in final.items()}, drift=())
