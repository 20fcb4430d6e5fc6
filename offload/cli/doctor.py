"""``tune doctor``: what this machine is, what it gives, and what hinders training on it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offload.errors import UserError

GIB = 2**30

Section = dict[str, Any]


def add_parser(commands: Any) -> None:
    """Adds ``doctor`` to the sub-commands of an argparse parser."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine gives, and what hinders training on it",
        description="Tells versions and what of them does not fit together, the device and its link, memory and its "
        "limits, and measures the rates that offloading depends on (under a minute), which are kept in the user's "
        "cache. Exit status 1 where something hinders training.",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--quick", action="store_true", help="measure nothing")
    parser.add_argument("--device", default="auto", help="as in a config: auto, cpu, cuda:1 (default: %(default)s)")
    parser.add_argument("--lock-gib", type=int, default=4, metavar="N", help="page-lock up to N GiB to see whether the "
                        "system lets you; an accelerator's runs only (default: %(default)s)")  # fmt: skip
    parser.set_defaults(execute=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    if args.lock_gib < 1:
        raise UserError(f"--lock-gib: got {args.lock_gib}, expected a number of GiB from 1 on")
    from offload.cli.installation import problems
    from offload.device import find_device
    from offload.host_memory import host_memory, why_not_locked
    from offload.metrics.this_machine import cards

    device, _ = find_device(args.device)
    nvidia = cards()
    report: dict[str, Any] = {
        "software": _software(device),
        "device": _device(device, nvidia),
        "memory": _memory(),
        "disk": _disk(),
        "wandb": _wandb(),
    }
    found = [*problems(device, nvidia), *_memory_problems(report["memory"])]
    if not args.quick:
        with _telling("measuring"):
            report["rates"] = _measure(device, args.lock_gib)
        if locking := report["rates"].get("page_locking", {}).get("refused"):
            found.append(f"no more than {report['rates']['page_locking']['locked_gib']:g} GiB of host memory can be "
                         f"page-locked ({locking}): what is beyond stays pageable, and its copies block. "
                         f"{why_not_locked(host_memory(), GIB)}")  # fmt: skip
        report["kept in"] = _keep(device, nvidia, report["rates"])
    if args.json:
        print(json.dumps({**report, "problems": found}, indent=2))
    else:
        print(_text(report, found))
    return 1 if found else 0


def _software(device: Any) -> Section:
    import torch

    from offload.metrics.environment import environment
    from offload.optim import cpu

    facts = environment(str(device))
    kept = {key: value for key, value in facts.items()
            if key not in ("processor", "cores", "host_memory_gib", "device", "device_memory_gib")}  # fmt: skip
    built = torch.version.cuda and f"CUDA {torch.version.cuda}" or torch.version.hip and f"ROCm {torch.version.hip}"
    return {**kept, "torch built for": built or "CPU", "CPU kernel": next(iter(cpu.instruction_sets()), "missing")}


def _device(device: Any, nvidia: list[dict[str, str]]) -> Section:
    import torch

    section: Section = {"training on": str(device)}
    if device.type != "cpu":
        module = torch.get_device_module(device)
        properties = module.get_device_properties(device)
        section["name"] = properties.name
        section["memory_gib"] = round(properties.total_memory / GIB, 2)
        if hasattr(module, "mem_get_info"):
            section["free_gib"] = round(module.mem_get_info(device)[0] / GIB, 2)
    for index, card in enumerate(nvidia):
        section[f"card {index}"] = (
            f"{card['name']}, driver {card['driver']}, PCIe {card['pcie_generation_most']}.0 "
            f"x{card['pcie_lanes']} of x{card['pcie_lanes_most']}, {card['power_limit']} W"
        )
    return section


def _memory() -> Section:
    from offload.host_memory import host_memory
    from offload.metrics.environment import environment

    facts, memory = environment("cpu"), host_memory()
    section: Section = {
        "processor": facts.get("processor"),
        "cores": facts["cores"],
        "total_gib": round(memory.total / GIB, 2),
        "usable_gib": round(memory.usable / GIB, 2),
    }
    if memory.limit is not None and memory.limit < memory.total:
        section["limit_of_control_group_gib"] = round(memory.limit / GIB, 2)
    if memory.locked_limit is not None:
        section["ulimit_locked_gib"] = round(memory.locked_limit / GIB, 4)
    if memory.is_wsl:
        section["wsl"] = True
    return section


def _memory_problems(memory: Section) -> Iterator[str]:
    if memory.get("wsl"):
        yield (
            "this is WSL, whose driver page-locks a part of its memory only (about half): give WSL more in "
            "%UserProfile%\\.wslconfig ([wsl2] memory=...), or boot Linux"
        )


def _disk() -> Section:
    import shutil
    import tempfile

    places = {
        "here": Path.cwd(),
        "models": Path(os.path.expanduser("~/models")),
        "temporary": Path(tempfile.gettempdir()),
    }
    section: Section = {}
    for name, path in places.items():
        there = next(each for each in (path, *path.parents) if each.exists())
        with contextlib.suppress(OSError):
            section[f"{name}_free_gib"] = round(shutil.disk_usage(there).free / GIB, 1)
    return section


def _wandb() -> Section:
    try:
        import wandb

        from offload.metrics.wandb_logger import has_key

        return {"version": wandb.__version__, "key": "configured" if has_key(wandb) else "none: `wandb login`"}
    except ImportError:
        return {"version": "missing"}
    except Exception as error:  # its settings files are the user's
        return {"version": wandb.__version__, "key": f"cannot be told: {type(error).__name__}: {error}"}


def _measure(device: Any, lock_gib: int) -> dict[str, Any]:
    import torch

    from offload.plan import rates

    had = [rates.cores_had()]
    found: dict[str, Any] = {**rates.host_memory_rates(), "cpu_adamw": rates.cpu_adamw_rates()}
    had.append(rates.cores_had())
    name = str(device)
    found["matmul"] = rates.matmul_rate(name, 4096 if device.type != "cpu" else 1024)
    if device.type != "cpu":
        found.update(rates.copy_rates(name))
        found["page_locking"] = rates.locking(lock_gib)
    else:
        from offload.plan.calibration import training_costs

        found["training"] = {
            name: dataclasses.asdict(training_costs(dtype))
            for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        }
    return {**found, "cores_had": min(*had, rates.cores_had())}


def _keep(device: Any, nvidia: list[dict[str, str]], rates: dict[str, Any]) -> str | None:
    from offload.metrics.this_machine import machine_of
    from offload.plan.profile import Profile, write_profile

    try:
        return str(write_profile(Profile(machine_of(device, nvidia), rates)))
    except OSError as error:
        print(f"warning: what was measured cannot be kept: {error}", file=sys.stderr)
        return None


@contextlib.contextmanager
def _telling(what: str) -> Iterator[None]:
    """A word on standard error while something takes its time; gone again on a terminal."""
    is_terminal = sys.stderr.isatty()
    print(f"{what} …", end="" if is_terminal else "\n", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


_RATES = {
    "up": ("host to device, page-locked", "GB/s"),
    "down": ("device to host, page-locked", "GB/s"),
    "each_of_both": ("each way, both at once", "GB/s"),
    "pageable_up": ("host to device, pageable", "GB/s"),
    "pageable_down": ("device to host, pageable", "GB/s"),
    "device_copy": ("device memory", "GB/s"),
    "matmul": ("matrix products", "TFLOPS"),
    "host_copy": ("host memory, all threads", "GB/s"),
    "host_copy_one_thread": ("host memory, one thread", "GB/s"),
    "host_faults": ("host memory, new pages", "GB/s"),
}


def _text(report: dict[str, Any], found: list[str]) -> str:
    from offload.plan.profile import busy

    lines: list[tuple[str, str]] = []
    for section in ("software", "device", "memory", "disk", "wandb"):
        lines.append((section, ""))
        for name, value in report[section].items():
            words = name.removesuffix("_gib").replace("_", " ")
            lines.append((f"  {words}", f"{value} GiB" if name.endswith("_gib") else str(value)))
    if rates := report.get("rates"):
        lines.append(("measured", ""))
        for key, (words, unit) in _RATES.items():
            if key in rates:
                scaled = rates[key] / (1e12 if unit == "TFLOPS" else 1e9)
                lines.append((f"  {words}", f"{scaled:,.2f} {unit}" if scaled < 10 else f"{scaled:,.1f} {unit}"))
        for name, costs in rates.get("training", {}).items():
            others = f", others {1e-9 / costs['moved']:,.1f} GB/s" if costs["moved"] else ""
            text = f"products {1e-9 / costs['products']:,.0f} GFLOPS{others}"
            lines.append((f"  training on the CPU, {name}", text))
        for name, rate in rates["cpu_adamw"].items():
            lines.append((f"  AdamW on the CPU, {name}", f"{rate / 1e6:,.0f} M parameters/s"))
        if locking := rates.get("page_locking"):
            seconds = locking["seconds_per_gib"]
            text = f"{locking['locked_gib']:g} GiB" + (f", {seconds:.2f} s each" if seconds else "")
            lines.append(("  page-locked", text))
        if note := busy(rates):
            lines.append(("  machine", f"was busy: {note}"))
        if report["kept in"]:
            lines.append(("  kept in", report["kept in"]))
    width = max(len(name) for name, _ in lines)
    text = "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in lines)
    if not found:
        return f"{text}\n\nnothing hinders training here"
    return f"{text}\n\n" + "\n".join(f"problem: {each}" for each in found)
