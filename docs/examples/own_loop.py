"""A training loop of one's own: tensors from this file, the step and the checkpoints of frontier_llm.

torchrun --nproc-per-node 4 docs/examples/own_loop.py '{"parallel.tensor": 2, "parallel.pipeline": 2}'
torchrun --nproc-per-node 4 docs/examples/own_loop.py '{"parallel.data": 4}'       continues on another layout
"""

import json
import sys

import torch

from frontier_llm import Trainer, load_run

RUN = {
    "model": {"base": "llama-tiny", "vocab_size": 97, "sequence_length": 32},
    "machine": "local",
    "precision": {"dtype": "fp32"},
    "data": {"train": "synthetic"},
    "batch": {"global_batch": 8, "micro_batch": 2},
    "optimizer": {"lr": 0.01, "warmup_steps": 1},
    "train": {"steps": 40, "run_dir": "runs/own", "device": "cpu"},
}


def batch(step: int) -> torch.Tensor:
    """Return tokens that count upwards from a random start: (global batch, sequence length + 1)."""
    start = torch.randint(97, (8, 1), generator=torch.Generator().manual_seed(step))
    return (start + torch.arange(33)) % 97


with Trainer(load_run(RUN, json.loads(sys.argv[1]))) as trainer:
    trainer.restore()
    for _ in range(10):
        result = trainer.step(batch(trainer.current_step))
    path = trainer.save()
    if trainer.rank == 0:
        print(f"step {trainer.current_step}: loss {result.loss:.6f}, saved {path}")
