"""Lets megatron-core, which expects CUDA, run on the CPU. Arithmetic is not changed.

It patches torch for the whole process. The tests and the benchmarks against megatron-core use it.
"""

from __future__ import annotations

from contextlib import nullcontext
from copy import copy

import torch


def run_on_cpu() -> None:
    """Point megatron-core's CUDA calls at the CPU."""
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.synchronize = lambda *args: None
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *args, **kwargs: None

    class _Nothing:
        """Generator, stream or event on which every call does nothing."""

        def __getattr__(self, name):
            return lambda *args, **kwargs: self

    torch.cuda.default_generators = [_Nothing()]
    stream = _Nothing()
    torch.cuda.Stream = torch.cuda.current_stream = lambda *args, **kwargs: stream
    torch.cuda.stream = lambda stream: nullcontext()
    tensor_type = torch.Tensor.type

    def type_of(self, dtype=None, *args, **kwargs):
        if dtype is not None:
            return tensor_type(self, dtype, *args, **kwargs)
        return tensor_type(self).replace("torch.", "torch.cuda.")

    torch.Tensor.type = type_of
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self

    def without_cuda(function):
        def call(*args, **kwargs):
            if "cuda" in str(kwargs.get("device", "")):
                kwargs["device"] = cpu
            return function(*args, **kwargs)

        return call

    for name in ("empty", "zeros", "ones", "tensor", "arange", "full", "rand", "randn"):
        setattr(torch, name, without_cuda(getattr(torch, name)))


def experts_on_cpu() -> None:
    """Let megatron-core's MoE layer run on the CPU.

    A function of Transformer Engine is set to None, because megatron-core uses its name without importing it. Row
    counts stay tensors if they need no copy. Experts with tensor parallelism require sequence parallelism, with which
    megatron-core refuses torch's norm. That norm gives the same result on a part of the sequence, so it is allowed
    here.
    """
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.te_general_gemm = None
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    make_norm = torch_norm.WrappedTorchNorm.__new__

    def norm_of_part(cls, config, *args, **kwargs):
        alone = copy(config)
        alone.sequence_parallel = False
        norm = make_norm(cls, alone, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # so that its gradient is summed over tensor ranks
        return norm

    torch_norm.WrappedTorchNorm.__new__ = norm_of_part
