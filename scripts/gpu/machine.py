"""What the machine is, and that nothing would be measured in place of what is meant."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = ("torch", "triton", "torchao", "torchtune", "bitsandbytes", "transformers", "wandb")

OPTIONAL = {
    "torchao": "its optimizers, and the recipes",
    "bitsandbytes": "its optimizers",
    "torchtune": "the recipes",
    "omegaconf": "the recipes",
    "datasets": "the recipes",
    "sentencepiece": "the recipes",
    "wandb": "wandb's mirror of the recipes' logs",
}
"""What is left out where a package is missing."""


FALLBACK = ".*kernel of offload.optim cannot be used"
"""The warning where PyTorch's operations take a kernel's place."""


class Unfit(RuntimeError):
    """Something else than what is meant would be measured here."""


def missing_packages() -> list[str]:
    """Of :data:`OPTIONAL`, those that cannot be imported here."""
    missing = []
    for name in OPTIONAL:
        try:
            found = importlib.util.find_spec(name)
        except ImportError:
            found = None
        if found is None:
            missing.append(name)
    return missing


def build_kernel() -> str:
    """Compile the CPU kernel unless it is newer than its sources; what was done, in words.

    Raises:
        Unfit: there is no C compiler, or the kernel cannot be loaded.
    """
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    import hatch_build
    from offload.optim import cpu

    try:
        done = hatch_build.build()
    except hatch_build.NoCompiler as error:
        raise Unfit(
            f"the CPU kernel of offload.optim cannot be compiled, and PyTorch's operations would be measured in its "
            f"place: {error}; install gcc or clang, or name a compiler in CC"
        ) from error
    cpu.load.cache_clear()
    if cpu.load() is None:
        raise Unfit(
            "the CPU kernel of offload.optim was compiled but cannot be loaded, and PyTorch's operations would be "
            f"measured in its place: see the warning above, or delete {cpu.LIBRARY} and run python hatch_build.py"
        )
    return done


def check_kernels(device: str) -> dict[str, Any]:
    """Take a step of the packed AdamW where it would be measured, and compare its bits with the CPU kernel's.

    Returns:
        dict: ``cpu_kernel``, the instruction set that it uses; on a GPU also ``same_bits``, whether the
        kernel there gives the same.

    Raises:
        Unfit: a kernel is missing.
    """
    from offload import optim
    from offload.optim import cpu

    facts: dict[str, Any] = {"cpu_kernel": next(iter(cpu.instruction_sets()), None)}
    if facts["cpu_kernel"] is None:
        raise Unfit("the CPU kernel of offload.optim is missing: python hatch_build.py compiles it")
    if device == "cpu":
        return facts
    torch.manual_seed(0)
    weights, gradients = torch.randn(3, 1000).bfloat16(), torch.randn(3, 1000).bfloat16()
    updated = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=FALLBACK)
        try:
            for place in ("cpu", device):
                param = torch.nn.Parameter(weights.clone().to(place))
                optimizer = optim.AdamW([param], lr=1e-2)
                for gradient in gradients:
                    param.grad = gradient.expand(3, -1).contiguous().to(place)
                    optimizer.step()
                updated.append([param.detach().cpu(), *(v.cpu() for v in optimizer.state[param].values())])
        except UserWarning as warning:
            raise Unfit(f"a fallback would be measured: {warning}") from warning
    facts["same_bits"] = all(torch.equal(one, other) for one, other in zip(*updated, strict=True))
    return facts


def describe_machine(device: str) -> dict[str, Any]:
    """Card, driver, processor, memory and versions."""
    facts: dict[str, Any] = {
        "device": device,
        "python": platform.python_version(),
        "cpu_threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
        "system": platform.platform(),
    }
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = None
    facts["torch"] = torch.__version__
    if hasattr(os, "sysconf"):
        facts["host_memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", cpu.read_text(), re.MULTILINE) if cpu.exists() else None
    facts["cpu"] = match[1] if match else platform.processor()
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts.update(card=properties.name, device_memory_bytes=properties.total_memory, cuda=torch.version.cuda)
        facts.update(driver_facts())
    return facts


def driver_facts() -> dict[str, Any]:
    """Driver and link, as nvidia-smi tells them; nothing is changed."""
    fields = {
        "driver": "driver_version",
        "pcie_generation": "pcie.link.gen.max",
        "pcie_lanes": "pcie.link.width.max",
        "clock": "clocks.max.sm",
        "power_limit": "power.limit",
    }
    query = ["nvidia-smi", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        return dict(zip(fields, answer.splitlines()[0].split(", "), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {"driver": None}


def git_commit() -> str | None:
    """The checkout's, with a word where tracked files differ from it; None outside of a repository."""
    commands = (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
    try:
        commit, changes = (
            subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit} with changes" if changes else commit
