"""Passes over flat fp32 buffers on the GPU: AdamW, the gradient norm, and gradient sums."""

from __future__ import annotations

import torch
from torch import Tensor

from frontier_llm.ops.driver import block_count
from frontier_llm.ops.prebuilt import Kernels
from frontier_llm.ops.reference import AdamWUpdate


class GpuBuffers:
    """Implements the ops of `ops.reference` for optimizers and gradient accumulation with one set of GPU kernels."""

    kernels: Kernels

    def adamw_(
        self,
        master: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        weights_out: Tensor,
        update: AdamWUpdate,
    ) -> None:
        """Unscale, clip, update, and write the rounded weights, in one pass.

        If grad_scale is a tensor on the device, the host does not wait for its value.
        """
        scale = update.grad_scale
        # Create the tensor by a fill on the device. A copy from the host would make the host wait for all earlier work
        # of the device.
        grad_scale = (
            scale.float()
            if isinstance(scale, Tensor)
            else torch.full((), scale, dtype=torch.float32, device=master.device)
        )
        alias = weights_out.data_ptr() == master.data_ptr()
        grid = (block_count(master.numel(), self.kernels.block("adamw", "any", "BLOCK")), 1, 1)
        self.kernels.launch(
            "adamw",
            weights_out.dtype,
            "any",
            grid,
            master=master,
            grad=grad.float(),
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            weights=weights_out,
            grad_scale=grad_scale,
            count=master.numel(),
            step_size=update.step_size,
            beta1=update.beta1,
            beta2=update.beta2,
            eps=update.eps,
            decay=update.decay,
            root=update.root,
            write_weights=int(not alias),
        )

    def sum_of_squares(self, x: Tensor) -> Tensor:
        """Return the sum of x² as a 0-dim fp64 tensor. The order of the sum is fixed, so that it is reproducible."""
        x = x.detach().contiguous()
        per_program = 65536
        partial = torch.empty(block_count(x.numel(), per_program), dtype=torch.float64, device=x.device)
        self.kernels.launch(
            "squares",
            x.dtype,
            "any",
            (partial.numel(), 1, 1),
            x=x,
            partial=partial,
            count=x.numel(),
            per_program=per_program,
        )
        return partial.sum()

    def accumulate_(self, main_grad: Tensor, grad: Tensor) -> None:
        """Add grad to main_grad."""
        grid = (block_count(main_grad.numel(), self.kernels.block("accumulate", "any", "BLOCK")), 1, 1)
        grad = grad.detach().contiguous()
        self.kernels.launch(
            "accumulate", grad.dtype, "any", grid, main_grad=main_grad, grad=grad, count=main_grad.numel()
        )

    def accumulate_rows_(self, main_grad: Tensor, rows_RC: Tensor) -> None:
        """Add the sum of the rows to main_grad, in one launch."""
        rows_RC = rows_RC.detach().contiguous()
        rows, columns = rows_RC.shape
        self.kernels.launch(
            "accumulate_rows",
            rows_RC.dtype,
            "any",
            (block_count(columns, self.kernels.block("accumulate_rows", "any", "BLOCK")), 1, 1),
            main_grad=main_grad,
            grad=rows_RC,
            rows=rows,
            columns=columns,
        )

    def embedding_backward_(
        self, main_grad_vH: Tensor, token_ids_N: Tensor, grad_N_H: Tensor, first_vocab: int
    ) -> None:
        """Add each token's gradient to its row in token order. A stable sort makes atomics unnecessary."""
        rows_N, order_N = torch.sort(token_ids_N.reshape(-1).long() - first_vocab, stable=True)
        vocab_rows, columns = main_grad_vH.shape
        grid = (rows_N.numel(), block_count(columns, self.kernels.block("embedding_backward", "any", "BLOCK")), 1)
        grad = grad_N_H.detach().reshape(-1, columns).contiguous()
        self.kernels.launch(
            "embedding_backward",
            grad.dtype,
            "any",
            grid,
            main_grad=main_grad_vH,
            rows=rows_N,
            order=order_N,
            grad=grad,
            tokens=rows_N.numel(),
            columns=columns,
            vocab_rows=vocab_rows,
        )
