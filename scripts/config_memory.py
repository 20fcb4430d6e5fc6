"""What memory each config takes, computed from its model on the meta device; writes headers of configs and a table.

    python scripts/config_memory.py           # computes and records it, about two minutes
    python scripts/config_memory.py --write   # also writes the configs' headers and the table of docs/models.md

Weights, states and gradients in flight follow from the number of parameters and the config. What a step takes beside
them (activations, and the gradients that backward is computing) is counted: forward, fused loss and backward run on
tensors that have shapes and no memory, with the config's own batch, length, chunks and checkpointing, and each tensor
counts while it lives. That every token has a label, and that all of a budget is in flight while the rest is at its
most, makes it an upper bound. Dimensions of transformers' models are those that their publishers state
(offload/models/huggingface/published.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pages import MODELS, ROOT, write_table

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from offload import torchao_shim
from offload.cli import registry
from offload.cli.validate import load_recipe
from offload.config.loading import load_and_check
from offload.models.protocol import CausalLM, Packed
from offload.models.source import describe
from offload.plan.budget import CONTEXT
from offload.plan.cards import CARDS as KNOWN_CARDS
from offload.plan.footprint import PARAMETERS
from offload.tiny import register_resolvers
from offload.training.settings import TrainSettings
from offload.training.tracing import Tracer

torchao_shim.install()

RECORD = ROOT / "scripts" / "results" / "config_memory.json"
BEGIN, END = "<!-- scripts/config_memory.py writes this table -->\n", "<!-- end of the configs -->\n"
GIB = 2**30

METHODS = ("offload", "lora", "qlora")
CORRECTING = ("L4", "A10")
"""Cards of 24 GB that leave 22 with error correction, which they come with: `tune plan --gpu L4` tells what fits."""
CARDS = {
    size: min(
        card.reported for card in KNOWN_CARDS if card.nominal == size and card.reported and card.name not in CORRECTING
    )
    - CONTEXT / GIB
    for size in (8, 12, 16, 24, 32, 48, 80)
}
"""GiB for PyTorch by a card's GB: the least total that torch was seen to report of one, less the CUDA context."""
FRAGMENTED = 0.7
"""GiB that PyTorch's allocator holds besides what is in use: 14.97 for 14.31 in peak_memory.py."""

RAM = (16, 32, 64, 96, 128, 192)
OTHER_RAM = 8.0
"""GiB of the host for Python, CUDA, data, pages of files that are read and written, and the system."""
USABLE_RAM = 0.95

ADAPTER_BYTES = 8
"""Per parameter of an adapter in bf16: weight, gradient, two moments."""
STATE_BYTES = 4 + 8 / 256
"""Per parameter that trains: two moments of 8 bits with an fp32 scale for 256 each, 16 bits of the master."""


@dataclass(frozen=True)
class Memory:
    """Of one config, in parameters and bytes.

    Attributes:
        parameters: of the model, without an adapter.
        trained: parameters that train.
        tokens: of a forward, at most.
        in_4bit: parameters of linear layers in NF4.
        weights: bytes of the model.
        adapter: bytes of the adapter, its gradients and states.
        in_flight: bytes of the optimizer's budget on the device.
        working: bytes of activations, and of gradients that backward is computing, at most.
        host: bytes of page-locked host memory.
    """

    parameters: int
    trained: int
    tokens: int
    in_4bit: int
    weights: int
    adapter: int
    in_flight: int
    working: int
    host: int

    @property
    def device(self) -> int:
        """Bytes on the device at most."""
        return self.weights + self.adapter + self.in_flight + self.working

    @property
    def card(self) -> int:
        """GB of the smallest card that has room."""
        return next(size for size, gib in CARDS.items() if self.device + FRAGMENTED * GIB <= gib * GIB)

    @property
    def ram(self) -> int:
        """GB of the smallest host that has room."""
        return next(size for size in RAM if self.host + OTHER_RAM * GIB <= size * USABLE_RAM * GIB)


# ---- configs -----------------------------------------------------------------------------------------------


def configs() -> dict[str, Path]:
    """By name: those that name a model worth the arithmetic."""
    return {
        name: path
        for name, path in registry.our_configs().items()
        if name.rpartition("_")[2] in METHODS
        and not name.startswith(("hf_", "tiny_"))
        and not (name.endswith("_qlora") and not is_written(path))  # in torchao's NF4
    }


def described(name: str, path: Path) -> tuple[CausalLM, Packed, TrainSettings]:
    """The config's model in parts, on the meta device in bf16, with its adapter; those of its weights that 4 bits
    hold; and its settings."""
    register_resolvers()
    schema: Any = load_recipe(registry.find_recipe(registry.recipe_of_config(name)).path).Settings
    settings: TrainSettings
    _, settings = load_and_check(path, [], schema, [])
    adapter = getattr(settings, "adapter", None)
    found = describe(settings.model, adapter, torch.bfloat16, adapts=name.endswith("lora"))
    assert found is not None
    return *found, settings


def compute(name: str, path: Path, *, working: int | None = None) -> Memory:
    """The memory of a config.

    Args:
        name: of the config.
        path: its file.
        working: bytes, where they have been counted before.
    """
    model, packed, settings = described(name, path)
    params = dict(model.module.named_parameters())
    is_lora = name.endswith("lora")
    trained = sum(param.numel() for param in params.values() if param.requires_grad)
    parameters = sum(param.numel() for param in params.values()) - (trained if is_lora else 0)
    length = int(settings.tokenizer.max_seq_len)
    if working is None:
        counted = Tracer().count(model, settings, torch.bfloat16, length, keeps=False)
        working = counted.peak() - counted.before.parts[PARAMETERS]
        working += 2 * max((weight.numel() for weight in packed.weights), default=0)  # a weight that is computed with
    return Memory(
        parameters=parameters,
        trained=trained,
        tokens=length * settings.batch_size,
        in_4bit=packed.elements,
        weights=2 * (parameters - packed.elements) + int(packed.nbytes * packed.elements),
        adapter=ADAPTER_BYTES * trained if is_lora else 0,
        in_flight=0 if is_lora else int(settings.optimizer.in_flight_gib * GIB),
        working=working,
        host=0 if is_lora else int(STATE_BYTES * trained),
    )


# ---- pages -------------------------------------------------------------------------------------------------


def header(memory: Memory) -> str:
    """The lines of a config's header."""

    def line(gib: float, what: str, place: str = "") -> str:
        return f"#   {place:4}{gib / GIB:6.1f} GiB  {what}"

    size = f"{memory.parameters / 1e9:.2f} B parameters in bf16"
    at = f"# Memory, computed from {size}, at {memory.tokens} tokens a forward:"
    fits = line(memory.device, f"in all, at most: a card of {memory.card} GB")
    if memory.adapter:
        rounded = f"{memory.in_4bit / 1e9:.2f} B in linear layers with 4.13 bits each, the others with 2 bytes"
        kinds = rounded if memory.in_4bit else "2 bytes per parameter"
        lines = [
            at,
            line(memory.weights, f"frozen weights ({kinds})", "GPU"),
            line(
                memory.adapter,
                f"the adapter's {memory.trained / 1e6:.1f} M parameters, their gradients and AdamW's states",
            ),
            line(memory.working, "activations"),
            fits,
        ]
        return "\n".join(lines) + "\n"
    frozen = memory.parameters - memory.trained
    besides = f", {frozen / 1e9:.2f} B of them frozen" if frozen else ""
    lines = [
        at,
        line(memory.weights, f"weights (2 bytes per parameter{besides})", "GPU"),
        line(memory.in_flight, "states and gradients in flight"),
        line(memory.working, "activations, and the gradients that backward is computing"),
        fits,
        line(
            memory.host,
            "page-locked: AdamW's moments in 8 bits, and what the weights lack of fp32 (4.03 bytes per",
            "host",
        ),
        f"#                   parameter): {memory.ram} GB of RAM",
        f"# torch.optim.AdamW with everything on the GPU would hold {8 * memory.trained / GIB:.1f} GiB there before "
        "the first activation, and its bf16",
        "# weights would lose every change below 1/256 of them.",
    ]
    return "\n".join(lines) + "\n"


def with_header(text: str, block: str) -> str:
    """A config's text with another block on memory: from its first line to the next empty one of the comment."""
    before, found, rest = text.partition("# Memory, ")
    _, ends, after = rest.partition("\n#\n")
    if not (found and ends):
        raise ValueError("no block `# Memory, ...` that ends in an empty line of the comment")
    return before + block + "#\n" + after


def is_written(path: Path) -> bool:
    """Whether the header's block is written here."""
    return "offload.models.huggingface.from_pretrained" in path.read_text(encoding="utf-8")


def table(found: dict[str, Memory]) -> str:
    """Markdown: a row for each config."""
    lines = [
        "| config | parameters | trained | GPU, GiB: weights | in all | host, GiB | needs |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in (each for each in configs() if each in found):
        memory = found[name]
        trained = f"{memory.trained / 1e9:.2f} B" if not memory.adapter else f"{memory.trained / 1e6:.1f} M"
        host = f"{memory.host / GIB:.1f}" if memory.host else "–"
        needs = f"{memory.card} GB card, {memory.ram} GB RAM"
        cells = [f"[{name}](../configs/{name}.yaml)", f"{memory.parameters / 1e9:.2f} B", trained]
        cells += [f"{memory.weights / GIB:.1f}", f"{memory.device / GIB:.1f}", host, needs]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def recorded() -> dict[str, Memory]:
    """By config, what was recorded last."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    return {name: Memory(**fields) for name, fields in record["configs"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="CONFIG", help="count these alone; the others are as recorded")
    parser.add_argument(
        "--write", action="store_true", help="write the configs' headers and the table of docs/models.md"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    import transformers

    found = recorded() if arguments.names else {}
    for name, path in configs().items():
        if arguments.names and name not in arguments.names:
            continue
        found[name] = compute(name, path)
        print(
            f"{name}: {found[name].device / GIB:.1f} GiB, of them {found[name].working / GIB:.2f} at work", flush=True
        )
    record = {
        "command": "python scripts/config_memory.py",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cards_gib": CARDS,
        "configs": {name: asdict(found[name]) for name in configs()},
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if arguments.write:
        for name, path in configs().items():
            if is_written(path):
                path.write_text(with_header(path.read_text(encoding="utf-8"), header(found[name])), encoding="utf-8")
        write_table(table(found), BEGIN, END, MODELS)
    print(table(found))


if __name__ == "__main__":
    main()
