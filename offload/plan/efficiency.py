"""What of a card's data sheet training reaches, and the published runs that say so.

A step's compute is the products' FLOPs at a share of the card's peak, attention's at a share of that, and the bytes
that all other operations move at a share of the memory's bandwidth. So the share that a whole step reaches follows from
tokens and width: operations beside products grow with tokens times width, products with tokens times width squared, and
a product with few tokens takes as long as reading its weights. The constants were chosen so that the runs in
:data:`PUBLISHED` come out; scripts/plan_published.py records how far each of them is off.
"""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION = 0.6
"""Of the rate of other products, attention's own: FlashAttention-2 reaches 50 to 73 % of an A100's peak forward, less
backward, where products reach about 80 % (https://arxiv.org/abs/2307.08691)."""

MEMORY = 0.85
"""Of the bandwidth of device memory, what kernels that read and write once get of it."""

FUSED = 0.4
"""Of the bytes that torch's operations move one by one, what is left when a compiler, or kernels written by hand, join
them: with it LLMQ's bf16 runs of four widths on an H100 come out at one share, within 3 %."""

LINK = 0.8
"""Of a PCIe link's rate, what large copies from page-locked memory get."""

HOST = 0.75
"""Of the transfer rate of a host's memory modules, what all threads together get."""

SHARES: dict[str, tuple[str, float]] = {
    # LLMQ on a 4090 and a 5090, LLaMA-Factory on a 4090: their clocks lie above the data sheet's boost.
    "GeForce": (r"^RTX (30|40|50)\d\d", 0.97),
    # LLMQ on an L40S, held back by its power limit; the same chip and kind of limit in the others.
    "Ada for workstations and servers": (r"^(L4|L40S|RTX 6000 Ada)$", 0.53),
    # Assumed: as an A100's, whose chip is of the same generation. torchtune's runs on an A6000 are no guide: they would
    # need nearly all of its data sheet's FLOPS.
    "Ampere for workstations": (r"^(RTX A\d000|A10)$", 0.8),
    # LLM Foundry's MPT 7B.
    "A100": (r"^A100", 0.8),
    # LLM Foundry's MPT 7B on torch. LLMQ's kernels, which are no torch's, reach 0.68; torchtitan under a limit of power
    # about 0.4.
    "Hopper": (r"^H[12]00", 0.6),
}
"""Of a card's dense 16-bit FLOPS, what large products reach in training: the kind of card, its names, the share."""

FP32 = {"GeForce": 2.0, "Ada for workstations and servers": 4.0, "Ampere for workstations": 4.0, "A100": 16.0,
        "Hopper": 14.8}  # fmt: skip
"""How many times faster a card's dense bf16 products are than fp32's on its ordinary units, which is how torch computes
them unless TF32 is allowed; from the same data sheets."""

_LLMQ = "https://github.com/IST-DASLab/llmq/blob/main/README.md#speed"
_LLMQ_PAPER = "https://arxiv.org/abs/2512.15306"
_TORCHTUNE = "https://github.com/pytorch/torchtune/tree/v0.6.1#memory-and-training-speed"
_FOUNDRY = "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md"
_TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"


@dataclass(frozen=True)
class Published:
    """A run that others have timed.

    Attributes:
        system: that ran it.
        card: as in :mod:`offload.plan.cards`.
        model: torchtune's builder of the same sizes.
        batch: sequences of a micro-batch.
        length: tokens of each.
        tokens_per_second: on one card.
        source: where it says so.
        recompute: layers' forwards run again in backward.
        fused: operations beside products are joined (compiled, or kernels written by hand).
        micro_batches: of a step.
        optimizer: as in :class:`offload.plan.prediction.Settings`: ``plain``, ``stream``, ``torchao``.
        state_bytes: of all states and a master copy, for each trained element.
        lora_rank: of adapters on all linear layers, where only they are trained.
        note: what its source leaves open and was assumed, or what it does that a prediction knows nothing of.
    """

    system: str
    card: str
    model: str
    batch: int
    length: int
    tokens_per_second: float
    source: str
    recompute: bool = False
    fused: bool = False
    micro_batches: int = 1
    optimizer: str = "plain"
    state_bytes: float = 4.0
    lora_rank: int = 0
    note: str = ""


_QWEN = "torchtune.models.qwen2_5.qwen2_5_"
_LLAMA = "torchtune.models.llama3_1.llama3_1_8b"
_ASSUMED = "micro-batch assumed 4 x 1024"


def _llmq(card: str, size: str, batch: int, speed: float, total: int, **more: object) -> Published:
    """A row of LLMQ's table: bf16, sequences of 1024 tokens, ``total`` tokens a step, states in bf16."""
    micro_batches = total // (batch * 1024)
    return Published("LLMQ", card, f"{_QWEN}{size}", batch, 1024, speed, _LLMQ, fused=True,
                     micro_batches=micro_batches, **more)  # type: ignore[arg-type]  # fmt: skip


PUBLISHED = (
    Published("LLaMA-Factory", "RTX 4090", f"{_QWEN}7b_base", 4, 1024, 2523, _LLMQ_PAPER, recompute=True,
              micro_batches=128, optimizer="stream", state_bytes=8.0, note=f"ZeRO-3 offload; {_ASSUMED}"),
    Published("LLMQ", "RTX 4090", f"{_QWEN}7b_base", 4, 1024, 2777, _LLMQ_PAPER, recompute=True, fused=True,
              micro_batches=128, optimizer="stream", state_bytes=6.0, note=_ASSUMED),
    Published("LLMQ", "RTX 5060 Ti 16GB", f"{_QWEN}7b_base", 4, 1024, 889, _LLMQ_PAPER, recompute=True, fused=True,
              micro_batches=128, optimizer="stream", state_bytes=6.0, note=_ASSUMED),
    _llmq("RTX 4090", "0_5b", 8, 40e3, 65536),
    _llmq("RTX 4090", "1_5b_base", 4, 14e3, 32768),
    _llmq("RTX 4090", "3b", 4, 6.2e3, 32768, optimizer="stream", note="8 micro-batches assumed"),
    _llmq("RTX 5090", "0_5b", 16, 55e3, 131072),
    _llmq("H100", "0_5b", 32, 144e3, 524288),
    _llmq("H100", "1_5b_base", 16, 58e3, 524288),
    _llmq("H100", "3b", 8, 30e3, 524288),
    _llmq("H100", "7b_base", 4, 14e3, 262144),
    _llmq("L40S", "0_5b", 16, 42e3, 524288),
    _llmq("L40S", "1_5b_base", 8, 17e3, 524288),
    _llmq("L40S", "3b", 4, 8.9e3, 524288),
    _llmq("L40S", "7b_base", 4, 3.9e3, 524288, optimizer="stream"),
    Published("torchtune", "RTX 4090", _LLAMA, 2, 2048, 1650, _TORCHTUNE, recompute=True, fused=True,
              optimizer="stream", state_bytes=2.0, note="PagedAdamW8bit in backward, whose pages come when touched"),
    Published("torchtune", "RTX 4090", _LLAMA, 2, 2048, 3083, _TORCHTUNE, recompute=True, fused=True, lora_rank=8),
    Published("torchtune", "RTX A6000", _LLAMA, 2, 2048, 2579, _TORCHTUNE, fused=True, recompute=True,
              note="needs 98 % of the data sheet's FLOPS, with the recomputation that 37.4 GiB need"),
    Published("torchtune", "RTX A6000", _LLAMA, 2, 2048, 4699, _TORCHTUNE, fused=True, lora_rank=8,
              note="needs nearly all of the data sheet's FLOPS, even without recomputation"),
    *(
        Published("LLM Foundry", card, "torchtune.models.llama2.llama2_7b", batch, length, speed, _FOUNDRY,
                  recompute=recompute, note="MPT 7B, played by Llama-2 7B; FSDP on 8 cards")
        for card, batch, length, recompute, speed in (
            ("A100 80GB", 6, 2048, False, 4641), ("A100 80GB", 64, 1024, True, 4357),
            ("H100", 6, 2048, False, 10643), ("H100", 64, 1024, True, 10203),
        )
    ),
    Published("torchtitan", "H100", _LLAMA, 2, 8192, 5762, _TITAN,
              note="FSDP on 8 cards at 500 W with 2.4 TB/s; recomputes every other layer's attention and products"),
    Published("torchtitan", "H100", _LLAMA, 2, 8192, 6667, _TITAN, fused=True, note="the same, compiled"),
)  # fmt: skip
