"""What a replay trains and on what: models by what their layers cost, machines by what they can do."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from offload.simulation.streams import Rates

GB = 1e9


@dataclass(frozen=True)
class Machine:
    """Rates that a training step can count on, in units per second.

    Attributes:
        name: what tables call it.
        flops: 16-bit matrix products, as training reaches them.
        up: bytes from page-locked host memory to the device.
        down: bytes from the device to page-locked host memory.
        device: bytes of device memory, read and written.
        host: bytes of host memory, read and written.
        pin: bytes of host memory, page-locked.
        launch: seconds (not a rate) of a thread for each kernel that it launches.
        modules: bytes of host memory that copies and the CPU together read and write; None for as many as ``host``.
    """

    name: str
    flops: float
    up: float
    down: float
    device: float
    host: float
    pin: float = math.inf
    launch: float = 0.0
    modules: float | None = None

    @property
    def shared(self) -> float:
        """Bytes of host memory that copies and the CPU together read and write."""
        return self.modules or self.host

    def rates(self) -> Rates:
        """What the simulator needs of it."""
        return Rates(up=self.up, down=self.down, device=self.device, host=self.host, pin=self.pin, launch=self.launch)


CONSUMER = 0.85
"""Of the data sheet's FLOPS, what training reaches on a GeForce card. LLaMA-Factory trains Qwen2.5-7B on one RTX 4090
with recomputation at 2,523 tok/s. Its matrix products have 6.53 B weights in layers and 0.54 B in the head; a token
takes 2 FLOPs a weight forward, 4 backward and, in layers, 2 again: 8 x 6.53 + 6 x 0.54 = 55.5 GFLOPs. At 2,523 tok/s
that is 140 TFLOPS, 0.85 of 165. Attention's products (left out here as in a replay), norms and the optimizer's exposed
time are inside that figure, so the products alone run faster.

It holds for micro-batches of any length from about a thousand tokens on. A product reads its weights once and computes
with them 2 FLOPs per token, which takes longer than reading from 165e12 / 1008e9 = 164 tokens on, and everything else
grows with the tokens as the products do."""

DATA_CENTRE = 0.5
"""The same of a Hopper card. torchtitan trains Llama 3.1 8B without compiling at 5,762 tok/s on an H100 held to 500 W
(https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md). 6 x 8.03 B weights and,
at 8,192 tokens, 12 x 32 x 4096 x 8192 = 12.9 GFLOPs of attention make 61.1 GFLOPs a token: 352 TFLOPS, 0.36 of 989,
without what its selective recomputation repeats. At 700 W and with twice the bandwidth, half is assumed for an H200."""

LAUNCH = 5e-6
"""Seconds of the CPU for a launch: 4 to 5 microseconds bare, in the measurement that
:data:`offload.simulation.streams.LAUNCH_QUEUE` is from; torch's own work comes on top."""

PIN = 3 * GB
"""Page-locking is bound by clearing fresh pages on one core, 2 to 5 GB/s."""

# Data sheets: dense 16-bit FLOPS with fp32 accumulation, device memory, PCIe 4.0 or 5.0 x16, DIMMs' transfer rate. Of
# these a training step gets the FLOPS above, 85 % of device memory, 80 % of the link, 75 % of host memory.
MACHINES = {
    "rtx4090": Machine(
        "RTX 4090, DDR5-5600", 165e12 * CONSUMER, 25 * GB, 25 * GB, 1008 * GB * 0.85, 89.6 * GB * 0.75, PIN, LAUNCH
    ),
    "4070tis": Machine(
        "4070 Ti SUPER, DDR4-3200", 88e12 * CONSUMER, 25 * GB, 25 * GB, 672 * GB * 0.85, 51.2 * GB * 0.75, PIN, LAUNCH
    ),
    "h200": Machine(
        "H200, 8 channels of DDR5-4800",
        989e12 * DATA_CENTRE,
        50 * GB,
        50 * GB,
        4800 * GB * 0.85,
        307 * GB * 0.75,
        PIN,
        LAUNCH,
    ),
}


@dataclass(frozen=True)
class Activations:
    """Device memory of a step beside parameters, gradients and the optimizer's, in bytes per token.

    Attributes:
        passing: what a layer hands to the next, and the gradient of it. With recomputation a layer keeps what it was
            given until its backward is done.
        kept: for each tensor of a layer, what autograd keeps from its product's forward until its backward is done;
            with recomputation, from the layer's second forward.
        gradients: for each tensor of a layer, gradients of activations that exist while its backward runs.
        logits: of the tokens of one chunk of the loss, at its widest.
        chunks: that the loss cuts the tokens into.
    """

    passing: float
    kept: tuple[float, ...]
    gradients: tuple[float, ...]
    logits: float
    chunks: int = 8


def llama_activations(dim: int, hidden: int, heads: int, vocabulary: int) -> Activations:
    """Of torchtune's Llama layers in bf16 with the fused head and loss of ``offload.training.loss``.

    A layer's tensors are, in this order: the attention's norm, q, k, v, output; the MLP's norm, gate, up, down. What
    autograd keeps is what ``saved_tensors_hooks`` shows of a ``TransformerSelfAttentionLayer``, but for the norms: on a
    GPU they are one kernel, which keeps its input alone, in fp32.
    """
    bf16, fp32 = 2, 4
    d, f = bf16 * dim, bf16 * hidden
    norm = fp32 * dim
    # q and k after their rotation, v, the result and its log-sum-exp; k and v are repeated for every head of q.
    attention = 4 * d + fp32 * heads
    return Activations(
        passing=d,
        # A norm's result is the input of q, k and v, or of gate and up; attention's result is that of `output`.
        # up: what gate and up give, and SiLU of the first. down: its input, their product.
        kept=(norm, d, 0, attention, 0, norm, d, 3 * f, f),
        # Going backwards, down: of its input. up: of the product, SiLU and up. gate: of gate, and two of the norm's
        # result, which are added. v: of q, k and v. k, q: of one, and two of the norm's result. Norms compute in fp32.
        gradients=(2 * norm, 3 * d, 3 * d, 3 * d, d, 2 * norm, f + 2 * d, 3 * f, f),
        # Log-probabilities, their gradient, and that of the logits, in fp32.
        logits=3 * fp32 * vocabulary,
    )


@dataclass(frozen=True)
class Passes:
    """Seconds of forward and backward of one micro-batch on one machine; recomputation is not among them.

    Attributes:
        layer: of a layer, forward and backward.
        edge: of the embedding, the head and the loss.
    """

    layer: tuple[float, float]
    edge: tuple[float, float]


@dataclass(frozen=True)
class Workload:
    """A model of equal layers, and the tokens of a micro-batch.

    Attributes:
        layers: number of layers.
        tensors: elements of each tensor of a layer that is trained.
        tokens: of one forward and backward.
        edge: elements of the embedding, and of the head.
        head: elements of the head where they are not as many: 0 where it is the embedding.
        dtype: of parameters, gradients and, for torch's optimizers, states.
        recompute: layers' forwards run again in backward (activation checkpointing).
        shrink: how many times smaller the simulated tensors are.
        activations: what a step keeps beside; None for nothing.
        launches: kernels of a layer's forward, and of its backward without the second forward.
        passes: what forward and backward take; None: as long as the products with the weights of ``tensors``.
        micro_batches: forwards and backwards of a step.
    """

    layers: int
    tensors: tuple[int, ...]
    tokens: int
    edge: int = 0
    dtype: torch.dtype = torch.bfloat16
    recompute: bool = True
    shrink: int = 65536
    activations: Activations | None = None
    launches: tuple[int, int] = (1, 1)
    head: int | None = None
    passes: Passes | None = None
    micro_batches: int = 1

    @property
    def head_elements(self) -> int:
        return self.edge if self.head is None else self.head

    @property
    def parameters(self) -> int:
        return self.layers * sum(self.tensors) + self.edge + self.head_elements

    def stage_seconds(self, machine: Machine) -> list[tuple[float, float]]:
        """Forward and backward of each tensor's part of a layer, without recomputation."""
        if self.passes is None:
            products = [self.forward_flops(count) / machine.flops for count in self.tensors]
            return [(forward, 2 * forward) for forward in products]
        total = sum(self.tensors)
        return [tuple(count / total * seconds for seconds in self.passes.layer) for count in self.tensors]  # type: ignore[misc]

    def head_seconds(self, machine: Machine) -> tuple[float, float]:
        """Of the embedding, the head and the loss together."""
        if self.passes is not None:
            return self.passes.edge
        forward = self.forward_flops(self.head_elements) / machine.flops
        return forward, 2 * forward

    def coarse(self, tensors: int = 3) -> Workload:
        """With a layer's neighbouring tensors joined to about so many, which a replay tells hardly apart; and shrunk
        less, so that few of the bytes are what tensors are rounded up by."""
        share = sum(self.tensors) / tensors
        joined = [0]
        for count in self.tensors:
            if joined[-1] and joined[-1] + count > 1.05 * share:
                joined.append(0)
            joined[-1] += count
        return dataclasses.replace(self, tensors=tuple(joined), activations=None, shrink=min(self.shrink, 2**14))

    def forward_flops(self, elements: int) -> float:
        """Of the matrix products with so many weights; attention's own are left out."""
        return 2.0 * elements * self.tokens


LLAMA2_7B = Workload(
    layers=32,
    tensors=(4096, *(4096 * 4096,) * 4, 4096, *(4096 * 11008,) * 3),
    tokens=4096,
    edge=32000 * 4096,
    activations=llama_activations(4096, 11008, 32, 32000),
    launches=(46, 86),
)
"""https://huggingface.co/meta-llama/Llama-2-7b-hf/blob/main/config.json

Launches are torch's operations that read or write memory, counted by a dispatch mode over torchtune's layer."""
