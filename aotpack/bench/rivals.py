"""What aotpack is measured against, by the names that ``--without`` takes."""

from __future__ import annotations

from typing import Final

from aotpack.bench.results import OWN

__all__ = ["NAMES", "step_rivals"]

# Not plain max-autotune: it adds CUDA graphs, which copy every call's inputs into buffers of their own, and a
# trainer's q, k, v and mask are new tensors at every call. Without them kernels are compared with kernels.
NAMES: Final = {
    "aotpack": OWN,
    "flex": "torch.compile(flex_attention)",
    "flex-dynamic": "torch.compile(flex_attention, dynamic=True)",
    "flex-autotune": "torch.compile(flex_attention, mode='max-autotune-no-cudagraphs')",
    "flex-masked": "torch.compile of flex_attention and of create_block_mask",
    "sdpa": "scaled_dot_product_attention with the dense boolean mask",
    "compiled-dense": "torch.compile(dense attention)",
    "cudnn": "cuDNN causal of 8192 tokens, the ceiling",
    "mask-eager": "create_block_mask",
    "mask-compiled": "torch.compile(create_block_mask)",
    "precompile": "torch.compiler.precompile(dense attention)",
    "nothing": "an autograd function that computes nothing",
    "torch-loader": "torch's AOTIModelPackageLoader, same libraries, no autograd",
}


def step_rivals(device: str) -> tuple[str, ...]:
    """Who makes a training step's attention on a device; torch has no flex_attention backward on the CPU."""
    if device == "cpu":
        return ("aotpack", "sdpa", "compiled-dense")
    return ("aotpack", "flex", "flex-dynamic", "flex-autotune", "sdpa")
