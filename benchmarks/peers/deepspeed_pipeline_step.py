"""Trains the GPT of configs/models/bench-l8-h384.yaml with DeepSpeed 0.19.8's pipeline engine and ZeRO-1, as one rank
on gloo and the CPU.

benchmarks/peers/gpt.py starts it under torchrun. DeepSpeed has no tensor parallelism of its own inside PipelineModule,
so only pipeline and data parallelism are compared. The model is plain PyTorch (fused attention of torch), as
DeepSpeed's users write it.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Embedding(nn.Module):
    def __init__(self, vocab, sequence, hidden):
        super().__init__()
        self.token = nn.Embedding(vocab, hidden)
        self.position = nn.Embedding(sequence, hidden)

    def forward(self, tokens):
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Block(nn.Module):
    def __init__(self, hidden, heads, ffn):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)

    def forward(self, x):
        batch, sequence, hidden = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(
                batch,
                sequence,
                3,
                self.heads,
                -1,
            )
            .permute(
                2,
                0,
                3,
                1,
                4,
            )
        )
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, sequence, hidden)
        )
        x = x + self.output(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in (
        "tp",
        "pp",
        "steps",
        "warmup",
        "layers",
        "hidden",
        "heads",
        "ffn",
        "sequence",
        "vocab",
        "micro_batch",
        "global_batch",
    ):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), required=True)
    args = parser.parse_args()
    assert args.tp == 1, "DeepSpeed's PipelineModule has no tensor parallelism"
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)

    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    deepspeed.init_distributed(dist_backend="gloo")
    dp = dist.get_world_size() // args.pp
    layers = [
        TiedLayerSpec(
            "embedding", Embedding, args.vocab, args.sequence, args.hidden, tied_weight_attr=["token.weight"]
        ),
        *(LayerSpec(Block, args.hidden, args.heads, args.ffn) for _ in range(args.layers)),
        LayerSpec(nn.LayerNorm, args.hidden),
        TiedLayerSpec(
            "embedding",
            Embedding,
            args.vocab,
            args.sequence,
            args.hidden,
            forward_fn=lambda module, x: F.linear(x, module.token.weight),
            tied_weight_attr=["token.weight"],
        ),
    ]
    model = PipelineModule(
        layers, num_stages=args.pp, loss_fn=lambda logits, y: F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
    )
    config = {
        "train_batch_size": args.global_batch,
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.global_batch // (args.micro_batch * dp),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": args.dtype == "bf16"},
        "steps_per_print": 10**9,
    }
    if args.dtype == "bf16":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    engine, *_ = deepspeed.initialize(model=model, config=config)

    def batches():
        while True:
            tokens = torch.randint(0, args.vocab, (args.micro_batch, args.sequence + 1))
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    data = batches()
    seconds = []
    for step in range(args.warmup + args.steps):
        dist.barrier()
        begin = time.perf_counter()
        engine.train_batch(data_iter=data)
        dist.barrier()
        if step >= args.warmup:
            seconds.append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps({"step_s": seconds}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
