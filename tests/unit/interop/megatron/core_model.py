"""A program that builds a GPT with megatron-core on the CPU, saves it as Megatron-LM does, and saves its outputs beside
it.

megatron-core expects CUDA. tests/harness/megatron_on_cpu.py makes it run without. That module patches torch, so this
program runs in its own process: `python -m tests.unit.interop.megatron.core_model KIND FOLDER`.
"""

import argparse
import sys
from pathlib import Path

import torch

from tests.harness.megatron_on_cpu import run_on_cpu

SHAPE = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 6, "ffn_hidden_size": 80}
KINDS = {
    "gpt": ({}, {"position_embedding_type": "learned_absolute"}),
    "llama": (
        {"num_query_groups": 2, "normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False},
        {
            "position_embedding_type": "rope",
            "rotary_base": 500,
            "rotary_percent": 0.5,
            "share_embeddings_and_output_weights": False,
        },
    ),
}
ARGUMENTS = {
    "gpt": {"bias_gelu_fusion": False},
    "llama": {
        "group_query_attention": True,
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "rotary_base": 500,
        "rotary_percent": 0.5,
        "untie_embeddings_and_output_weights": True,
    },
}


def main(kind: str, folder: Path) -> None:
    run_on_cpu()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    transformer, outer = KINDS[kind]
    if kind == "llama":
        transformer = {**transformer, "activation_func": torch.nn.functional.silu}
    config = TransformerConfig(
        **SHAPE,
        **transformer,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
    )
    local = get_gpt_layer_local_spec(normalization=transformer.get("normalization", "LayerNorm"))
    model = GPTModel(
        config, local, vocab_size=64, max_sequence_length=24, **{"share_embeddings_and_output_weights": True, **outer}
    ).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))
        tokens = torch.randint(0, 64, (3, 20), generator=generator)
        logits = model(tokens, torch.arange(20).expand(3, -1), torch.ones(1, 1, 20, 20).tril() < 0.5)
    arguments = argparse.Namespace(
        **SHAPE,
        seq_length=24,
        max_position_embeddings=24,
        padded_vocab_size=64,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        **ARGUMENTS[kind],
    )
    target = folder / "iter_0000001" / "mp_rank_00"
    target.mkdir(parents=True)
    state = model.state_dict_for_save_checkpoint()
    torch.save(
        {"args": arguments, "checkpoint_version": 3.0, "iteration": 1, "model": state}, target / "model_optim_rng.pt"
    )
    torch.save({"tokens": tokens, "logits": logits.float()}, folder / "witness.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
