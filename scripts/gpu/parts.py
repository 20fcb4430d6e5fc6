"""What belongs to each command of the plan, in the order of what is most worth knowing.

a  Is it right? Tests of native kernels, engine and every optimizer, the recipes on the tiny default, the sanitizer.
b  What does it cost on a whole card? Every way to update, beside no optimizer, which comes first and last.
c  Does it fit? The default of the configs, held to cards of 16 and 24 GB, and recipes on 7B shapes beside their plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gpu.recipes import NEEDED, RecipeRun
from gpu.testing import Selection

BUDGET_SECONDS = 560.0
"""Of each part, where nothing else is said: a command has ten minutes, and what it leaves has to be fetched."""

HEADLINE = "packed-stream-in-backward+model"

LOCKING = {
    "PyTorch's default": "",
    "8 threads": "pinned_use_cuda_host_register:True,pinned_num_register_threads:8",
}
"""Ways to page-lock host memory, as PYTORCH_CUDA_ALLOC_CONF."""


@dataclass(frozen=True)
class CaseItem:
    """A case at some step sizes. ``reserves``: of the time, enough is kept for it, whatever comes before."""

    name: str
    tokens: tuple[int, ...]
    memory_gib: float | None = None
    allocator: str = ""
    reserves: bool = False


@dataclass(frozen=True)
class MachineItem:
    """A measurement of the machine that results are compared with: ``rates``, ``page-locking`` or ``doctor``."""

    name: str
    settings: tuple[tuple[str, str], ...] = field(default=())


Item = CaseItem | MachineItem | Selection | RecipeRun


@dataclass(frozen=True)
class Size:
    """What to rehearse with, or to measure: the model's name, and tokens of a step where the card is whole or held."""

    device: str
    model: str
    whole: tuple[int, ...]
    held: tuple[int, ...]

    @property
    def is_rehearsal(self) -> bool:
        return self.device == "cpu"


def size_of(device: str, model: str, tokens: list[int] | None) -> Size:
    """Sizes for a device; ``tokens`` replaces both lists."""
    whole, held = ((1024, 8192), (1024, 4096)) if device != "cpu" else ((16, 32), (16, 32))
    if tokens:
        whole = held = tuple(sorted(tokens))
    return Size(device, model, whole, held)


SIZE_ON_A_GPU = size_of("cuda", "7b", None)

KERNEL_TESTS = ("tests/optim/test_triton_kernel.py", "tests/optim/test_native_kernel.py")
ENGINE_TESTS = ("tests/engine/test_late_streams.py", "tests/engine/test_on_accelerator.py")
PARITY_TESTS = ("tests/engine/test_parity.py", "tests/comparison/test_exposed.py")
RECIPE_TESTS = ("tests/recipes/test_recipes_on_accelerator.py",)

SANITIZED = "packed or bit_for_bit or long_copies or clipping"
"""Of the engine's tests, those worth their time under the sanitizer: every strategy, with and without accumulation."""


def part_a(size: Size) -> list[Item]:
    """Correctness."""
    if size.is_rehearsal:
        return [
            Selection("kernels", KERNEL_TESTS, marker="not slow", keyword="interpreter and addresses"),
            Selection("engine", ENGINE_TESTS, marker="not slow", keyword="threaded and activation"),
            Selection("recipes", RECIPE_TESTS, marker="slow", keyword="lora", needs=NEEDED),
            Selection("sanitizer", ENGINE_TESTS, marker="not slow", keyword="sanitizer_sees", sanitize=True),
            *tiny_recipes(steps=3),
        ]
    return [
        Selection("kernels", KERNEL_TESTS, processes=6),
        Selection("engine", ENGINE_TESTS, processes=4),
        Selection("recipes", RECIPE_TESTS, processes=2, needs=NEEDED),
        *tiny_recipes(steps=20),
        Selection("optimizers", PARITY_TESTS, processes=4),
        Selection("sanitizer", ENGINE_TESTS, keyword=SANITIZED, sanitize=True, processes=4),
    ]


def tiny_recipes(steps: int) -> list[Item]:
    return [
        RecipeRun("full-tiny", "full_finetune_single_device", "tiny_llama_offload", steps=steps),
        RecipeRun("lora-tiny", "lora_finetune_single_device", "tiny_llama_lora", steps=steps),
    ]


def part_b(size: Size) -> list[Item]:
    """Speed on the whole card."""
    compared = [
        HEADLINE,
        "packed",
        "adamw",
        "packed-stream-in-backward-8-gib-in-flight+model",
        "packed-host-in-backward+model",
        "packed-stream-offload-gradients+model",
        "torchao-offload-gradients",
    ]
    return [
        MachineItem("rates"),
        CaseItem("none", size.whole),
        *(CaseItem(name, size.whole) for name in compared),
        MachineItem("page-locking", tuple(LOCKING.items())),
        CaseItem("none-again", size.whole, reserves=True),
    ]


def part_c(size: Size) -> list[Item]:
    """The default of the configs on smaller cards, and what the planner says of the recipes."""
    return [
        CaseItem(HEADLINE, size.held, memory_gib=16),
        CaseItem(HEADLINE, size.held, memory_gib=24),
        MachineItem("doctor"),
        *large_recipes(size),
        CaseItem("none", size.held),
        MachineItem("rates"),
        CaseItem("packed-stream-in-backward-128-mib-in-flight+model", size.held, memory_gib=16),
        CaseItem(HEADLINE, size.held, memory_gib=16, allocator="expandable_segments:True"),
        CaseItem("none-again", size.held, reserves=True),
    ]


FULL, LORA = "full_finetune_single_device", "lora_finetune_single_device"
AUTO_STEPS = 16
"""That ``auto`` is given: it corrects itself in the first ones, and what is told are medians over the second half."""


def large_recipes(size: Size) -> list[RecipeRun]:
    """Random weights; a rehearsal takes the shapes of the tiny default, and shorter sequences."""
    rehearsed: dict[str, Any] = {"tokenizer.max_seq_len": 64, "batch_size": 1} if size.is_rehearsal else {}
    shape = "tiny-recipe" if size.is_rehearsal else "7b"

    def run(name: str, title: str, config: str, steps: int = 8, *, card: float | None = None, **overrides: Any) -> Any:
        recipe = FULL if name.startswith("full") else LORA
        overrides = {key.replace("__", "."): value for key, value in overrides.items()} | rehearsed
        return RecipeRun(name, recipe, config, shape, 2 if size.is_rehearsal else steps, overrides, card, title)

    full, lora, auto = "llama2_7b_offload", "llama2_7b_lora", {"optimizer__strategy": "auto"}
    return [
        run("full-7b-16gb", "full, streamed in backward", full, card=16, batch_size=1, tokenizer__max_seq_len=1024),
        run("full-7b-24gb", "full, streamed in backward", full, card=24, batch_size=2),
        run("full-7b-24gb-auto", "full, `auto`", full, AUTO_STEPS, card=24, batch_size=2, **auto),
        run("full-7b", "full, streamed in backward", full),
        run("lora-7b", "LoRA", lora),
    ]


PARTS = {"a": part_a, "b": part_b, "c": part_c}


def seconds_expected(item: Item) -> float:
    """A guess for the plan, of a fast card and a 7B model."""
    if isinstance(item, CaseItem):
        return (
            15 + 12 * len(item.tokens) + (20 if item.name.startswith(("packed-", "torchao", "stream", "host")) else 0)
        )
    if isinstance(item, MachineItem):
        return 30.0
    if isinstance(item, RecipeRun):
        return 50.0 if item.shape else 25.0
    return 180.0 if item.sanitize else 100.0
