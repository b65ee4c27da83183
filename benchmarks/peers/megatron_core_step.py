"""Times training steps of megatron-core 0.16.1, as one rank on gloo and the CPU. The model is the GPT of
configs/models/bench-l8-h384.yaml, or a model with experts.

benchmarks/peers/gpt.py and moe.py start it under torchrun. Fused CUDA kernels are switched off, because they do not
exist on the CPU.
"""

import argparse
import json
import time

import torch
import torch.distributed as dist

from tests.harness.megatron_on_cpu import experts_on_cpu, run_on_cpu


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
    for name, none in (("experts", 0), ("top_k", 1), ("expert_hidden", 0), ("ep", 1)):
        parser.add_argument(f"--{name}", type=int, default=none)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run_on_cpu()

    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        args.tp, args.pp, expert_model_parallel_size=args.ep, expert_tensor_parallel_size=1
    )
    experts = {}
    if args.experts:
        experts_on_cpu()
        experts = {
            "num_moe_experts": args.experts,
            "moe_router_topk": args.top_k,
            "moe_ffn_hidden_size": args.expert_hidden,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 0.01,
            "expert_model_parallel_size": args.ep,
            "expert_tensor_parallel_size": 1,
            "add_bias_linear": False,
            "sequence_parallel": args.tp > 1,  # megatron-core requires it for experts with tensor parallelism
        }
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    bf16 = args.dtype == "bf16"
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        ffn_hidden_size=args.ffn,
        use_cpu_initialization=True,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        bf16=bf16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        attention_softmax_in_fp32=False,
        **experts,
    )
    config.finalize_model_grads_func = finalize_model_grads
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=args.experts or None, moe_grouped_gemm=False),
        vocab_size=args.vocab,
        max_sequence_length=args.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
    )
    if bf16:
        model = model.bfloat16()
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=False, grad_reduce_in_fp32=True
    )
    model = DistributedDataParallel(config, ddp, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            bf16=bf16,
            use_distributed_optimizer=True,
            clip_grad=1.0,
        ),
        [model],
    )
    dp = parallel_state.get_data_parallel_world_size()
    microbatches = args.global_batch // (args.micro_batch * dp)
    position = torch.arange(args.sequence).expand(args.micro_batch, -1)
    mask = torch.ones(1, 1, args.sequence, args.sequence).tril() < 0.5

    def forward(batches, model):
        tokens = torch.randint(0, args.vocab, (args.micro_batch, args.sequence + 1))
        output = model(tokens[:, :-1], position, mask, labels=tokens[:, 1:])
        return output, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})

    run_schedule = get_forward_backward_func()
    seconds = []
    cpu_seconds = []
    for step in range(args.warmup + args.steps):
        dist.barrier()
        begin = time.perf_counter()
        cpu_begin = time.process_time()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        run_schedule(
            forward_step_func=forward,
            data_iterator=iter([]),
            model=[model],
            num_microbatches=microbatches,
            seq_length=args.sequence,
            micro_batch_size=args.micro_batch,
            decoder_seq_length=args.sequence,
            forward_only=False,
        )
        optimizer.step()
        cpu = torch.tensor(time.process_time() - cpu_begin, dtype=torch.float64)
        dist.all_reduce(cpu)  # also synchronises the ranks
        if step >= args.warmup:
            seconds.append(time.perf_counter() - begin)
            cpu_seconds.append(float(cpu))
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps({"step_s": seconds, "cpu_s": cpu_seconds}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
