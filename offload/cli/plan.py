"""``tune plan``: the memory that a run will take, whether it fits, and what makes it fit."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.cli import registry
from offload.errors import UserError

GIB = 2**30

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "MB": 10**6, "GB": 10**9, "TB": 10**12}

SHOWN = 6
"""Ways to make a run fit that are told at most."""

TRIED = 16
"""Combinations of changes that are planned at most, of each number of changes; the most promising first."""


def add_parser(commands: Any) -> None:
    """Adds ``plan`` to the sub-commands of an argparse parser."""
    parser = commands.add_parser(
        "plan",
        help="will it fit? a run's memory before anything is downloaded",
        description="Tells the memory that a run will take on the GPU, on the host and on disk, item by item, whether "
        "it fits, and which overrides make it fit. Nothing is downloaded and no weight is allocated. Exit status 1 "
        "where it does not fit.",
        epilog='example: tune plan --config llama2_7b_offload --gpu "RTX 4070 Ti SUPER" --ram 32GiB',
    )
    parser.add_argument("--config", required=True, metavar="NAME", help="a config from `tune ls`, or a path")
    parser.add_argument("--recipe", help="the recipe to run (default: the one that the config is for)")
    parser.add_argument("overrides", nargs="*", metavar="override", help="as for `tune run`")
    add_machine(parser)
    parser.set_defaults(execute=lambda args: plan(args.config, args.overrides, args, recipe=args.recipe))


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Adds the options that describe a machine."""
    card = parser.add_mutually_exclusive_group()
    card.add_argument("--gpu", metavar="NAME", help='a card, such as "RTX 4090" (default: the one that is here)')
    card.add_argument("--vram", metavar="SIZE", help="memory of the GPU, such as 16GiB")
    parser.add_argument("--ram", metavar="SIZE", help="memory of the host, such as 32GiB")


@dataclass(frozen=True)
class Limits:
    """What a machine has.

    Attributes:
        device: bytes of the accelerator; None where it is not known.
        host: bytes of the host for this run; None where it is not known.
        names: what each is called, by ``device`` and ``host``.
    """

    device: int | None
    host: int | None
    names: dict[str, str]


def size(text: str, option: str) -> int:
    """Bytes of ``16GiB``.

    Raises:
        UserError: names the option.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    units = {name.lower(): factor for name, factor in UNITS.items()}
    if found is None or found[2].lower() not in units or not float(found[1]):
        unit = " with its unit" if re.fullmatch(r"\d+(\.\d+)?", text.strip()) and float(text) else " above 0"
        raise UserError(f"{option}: got {text!r}, expected a size{unit}, such as 16GiB")
    return int(float(found[1]) * units[found[2].lower()])


def plan(name: str, overrides: Sequence[str], machine: argparse.Namespace, *, recipe: str | None = None) -> int:
    """Prints the plan of a run; returns 0, or 1 where it does not fit.

    Args:
        name: a config's name or path.
        overrides: as on a ``tune run`` line.
        machine: with ``gpu``, ``vram`` and ``ram``.
        recipe: that runs it.

    Raises:
        UserError: the problems, one per line.
    """
    vram = None if machine.vram is None else size(machine.vram, "--vram")
    ram = None if machine.ram is None else size(machine.ram, "--ram")
    card = None
    if machine.gpu is not None:
        from offload.plan.cards import find_card

        card = find_card(machine.gpu)
        vram = card.memory
    from offload.training.launch import quieten_libraries

    quieten_libraries()
    config = registry.find_config(name)
    if config.shipped and not config.ours:
        raise UserError(f"{name} is torchtune's: plans are for our recipes and configs; `tune ls` lists them")
    chosen = registry.find_recipe(
        recipe or (registry.recipe_of_config(config.name) if config.shipped else _recipe_of(config.path)), config=config
    )
    if not chosen.ours or chosen.name == "generate":
        raise UserError(f"{chosen.name}: plans are for recipes of ours that train")
    run = _Run(chosen, config.path, list(overrides))
    device = run.device(elsewhere=vram is not None)
    run.check(())
    limits = _limits(device, vram, ram, card.name if card else None)
    found = run.plan(())
    budget = found.budget
    print(_text(f"{config.name} for {chosen.name}", found, run.settings.dtype, limits))
    if device.type != "cpu" and limits.device is None:
        print('whether it fits: --gpu "RTX 4090", or --vram 24GiB, and --ram 64GiB tell of a machine')
    if budget.fits(limits.device, limits.host):
        return 0
    ways = list(itertools.islice(run.ways(limits), SHOWN))
    sister = run.sister(config.name, limits) if config.shipped else None
    if ways or sister:
        print("\nwhat fits, fewest changes first:")
        print(f"  {'GPU':>6}  {'host':>6}  GiB")
        for changes, other in ways:
            print(f"  {other.device / GIB:6.1f}  {other.host / GIB:6.1f}  {' '.join(changes)}")
        if sister:
            print(f"  {sister[1].device / GIB:6.1f}  {sister[1].host / GIB:6.1f}  --config {sister[0]}")
    else:
        print("\nno combination of batch_size, tokenizer.max_seq_len, activation checkpointing and the optimizer's "
              "settings fits: a smaller model, or more memory")  # fmt: skip
    return 1


def _recipe_of(path: Path) -> str:
    """Of a user's config: an adapter's section, or a lora builder, means the recipe for adapters."""
    text = path.read_text(encoding="utf-8")
    adapts = re.search(r"^adapter:\s*(#.*)?$", text, re.M) or re.search(r"_component_:.*\.q?lora_", text)
    return "lora_finetune_single_device" if adapts else "full_finetune_single_device"


class _Run:
    """One run and its variations.

    Args:
        recipe: that runs it.
        path: of its config.
        overrides: of its command line.
    """

    def __init__(self, recipe: registry.RecipeRef, path: Path, overrides: list[str]) -> None:
        from offload.cli.validate import load_recipe
        from offload.tiny import register_resolvers

        register_resolvers()
        self._path, self._overrides = path, overrides
        module = load_recipe(recipe.path)
        schema = getattr(module, "Settings", None)
        if schema is None:
            raise UserError(f"{recipe.name} declares no class Settings, so its configs cannot be read")
        self._schema: Any = schema
        self._class: Any = next(
            each for each in vars(module).values()
            if isinstance(each, type) and getattr(each, "Settings", None) is schema and hasattr(each, "check")
        )  # fmt: skip
        self.settings: Any = self._load(())
        self._planner: Any = None

    def _load(self, changes: Sequence[str]) -> Any:
        from offload.config.loading import load_and_check

        _, settings = load_and_check(self._path, [*self._overrides, *changes], self._schema, [])
        return settings

    def device(self, *, elsewhere: bool) -> Any:
        """Where it trains: on an accelerator that is ``elsewhere``, or as its settings say."""
        import torch

        from offload.device import find_device

        if elsewhere and self.settings.device in ("auto", "cpu"):
            if self.settings.device == "cpu":
                raise UserError("device: is cpu, which leaves a GPU idle: leave --gpu and --vram out, or device=cuda")
            self._device = torch.device("cuda")
        else:
            self._device, _ = find_device(self.settings.device, elsewhere=True)
        return self._device

    def plan(self, changes: Sequence[str]) -> Any:
        """The plan with more overrides.

        Raises:
            UserError: they do not go together, or with the rest.
        """
        import torch

        settings = self._load(changes)
        if self._planner is None:
            from offload.training.budgeting import Planner, process_of_a_run

            self._planner = Planner(process_of_a_run, adapts=self._class.adapts)
        dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
        return self._planner.plan(settings, self._device, dtype)

    def check(self, changes: Sequence[str]) -> None:
        """As `tune validate`, but for a folder that has config.json and no weights yet.

        Raises:
            UserError: names the keys that a run would refuse.
        """
        from offload.component import installed_only

        settings = self._load(changes)
        folder = Path(str(settings.model.get("path") or "")).expanduser()
        if (folder / "config.json").is_file() and not any(folder.glob("*.safetensors")):
            return
        with installed_only():
            self._class.check(settings, notes=[])

    def _is_allowed(self, changes: Sequence[str]) -> bool:
        try:
            self.check(changes)
        except UserError:
            return False
        return True

    def ways(self, limits: Limits) -> Iterator[tuple[list[str], Any]]:
        """Overrides with which it fits, fewest changes first; of equal number, those that cost least."""
        from offload.training.changes import cheaper

        start = self.plan(()).budget
        least = sum(item.nbytes for item in start.items if item.name in ("weights", "CUDA context"))
        if limits.device is not None and least > limits.device:
            return
        each: list[tuple[list[str], Any]] = []
        for changes in cheaper(self.settings):
            with contextlib.suppress(UserError):
                each.append((changes, self.plan(changes).budget))
        useful = [(c, b) for c, b in each if b.device < start.device or b.host < start.host]
        singles = [(c, b) for c, b in useful if b.fits(limits.device, limits.host) and self._is_allowed(c)]
        if singles:
            mildest = {frozenset(word.partition("=")[0] for word in c): (c, b) for c, b in reversed(singles)}
            yield from reversed(list(mildest.values()))
            return
        for count in (2, 3, 4):
            told: set[frozenset[str]] = set()
            tried = 0
            for chosen in itertools.combinations(useful, count):
                words = [word for changes, _ in chosen for word in changes]
                keys = [word.partition("=")[0] for word in words]
                device = start.device - sum(start.device - budget.device for _, budget in chosen)
                host = start.host - sum(start.host - budget.host for _, budget in chosen)
                promising = (limits.device is None or device <= limits.device) and (
                    limits.host is None or host <= limits.host
                )
                if len(set(keys)) < len(keys) or not promising or tried == TRIED or frozenset(keys) in told:
                    continue
                tried += 1
                with contextlib.suppress(UserError):
                    budget = self.plan(words).budget
                    if budget.fits(limits.device, limits.host) and self._is_allowed(words):
                        told.add(frozenset(keys))
                        yield words, budget
            if told:
                return

    def sister(self, name: str, limits: Limits) -> tuple[str, Any] | None:
        """The config of the same model that trains an adapter, and its budget, where that fits."""
        model = name.rpartition("_")[0]
        for other in (f"{model}_lora", f"{model}_qlora"):
            if other == name or other not in registry.our_configs():
                continue
            with contextlib.suppress(UserError):
                recipe = registry.find_recipe(registry.recipe_of_config(other))
                run = _Run(recipe, registry.our_configs()[other], [])
                run.device(elsewhere=limits.device is not None)
                budget = run.plan(()).budget
                if budget.fits(limits.device, limits.host):
                    return other, budget
        return None


def _limits(device: Any, vram: int | None, ram: int | None, card: str | None) -> Limits:
    from offload.host_memory import host_memory
    from offload.plan.budget import OS_SHARE

    names = {"device": f" of {card}" if card else "", "host": ""}
    has_here = False
    if device.type != "cpu" and vram is None:
        from offload.device import is_here

        if is_here(device):
            import torch

            properties = torch.get_device_module(device).get_device_properties(device)
            vram, has_here = properties.total_memory, True
            names["device"] = f" of the {properties.name} here"
    host = None if ram is None else int(ram * (1 - OS_SHARE))
    if ram is not None:
        names["host"] = ", 95 % of it"
    elif device.type == "cpu" or has_here:
        host = host_memory().usable
        names["host"] = " that this process can have"
    return Limits(vram if device.type != "cpu" else None, host, names)


def _text(title: str, found: Any, dtype: str, limits: Limits) -> str:
    count = f"{found.parameters / 1e9:,.2f} B" if found.parameters >= 1e8 else f"{found.parameters / 1e6:,.2f} M"
    share = "all trained" if found.trained == found.parameters else f"{found.trained / 1e6:,.1f} M trained"
    lines = [
        f"{title}: {count} parameters in {dtype}, {share}; {found.batch} x {found.length} tokens a forward, at most",
        "",
    ]
    budget = found.budget
    lines += budget.lines()
    for what, total, limit in (("GPU", budget.device, limits.device), ("host", budget.host, limits.host)):
        if not total:
            continue
        line = f"{what} in all, at the fullest moment: {total / GIB:.2f} GiB"
        if limit is not None:
            name = limits.names["device" if what == "GPU" else "host"]
            rest = (limit - total) / GIB
            verdict = f"fits, {rest:.2f} to spare" if rest >= 0 else f"DOES NOT FIT: {-rest:.2f} too much"
            line += f" of {limit / GIB:.2f}{name}: {verdict}"
        lines += ["", line] if what == "GPU" or not budget.device else [line]
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])
