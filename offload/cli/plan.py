"""``tune plan``: the memory that a run will take, whether it fits, how fast it is, and what fits and is faster."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli import registry
from offload.errors import UserError

if TYPE_CHECKING:
    from offload.distributed.world import World

GIB = 2**30

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "MB": 10**6, "GB": 10**9, "TB": 10**12}

SHOWN = 4
"""Settings that are told at most."""

ORDERING_CARD = "RTX 4070 Ti SUPER"
"""Whose rates order the settings where a machine is told by its memory alone: they are not told."""


def add_parser(commands: Any) -> None:
    """Adds ``plan`` to the sub-commands of an argparse parser."""
    parser = commands.add_parser(
        "plan",
        help="will it fit, and how fast is it? before anything is downloaded",
        description="Tells the memory that a run will take on the GPU, on the host and on disk, item by item, whether "
        "it fits, how fast it will be and what bounds it, and which overrides fit and are faster. Nothing is "
        "downloaded and no weight is allocated. Exit status 1 "
        "where it does not fit.",
        epilog='example: tune plan --config llama2_7b_offload --gpu "RTX 4070 Ti SUPER" --ram 32GiB',
    )
    parser.add_argument("--config", metavar="NAME", help="a config from `tune ls`, or a path")
    parser.add_argument("--recipe", help="the recipe to run (default: the one that the config is for)")
    parser.add_argument("overrides", nargs="*", default=[], metavar="override", help="as for `tune run`")
    add_machine(parser)
    options = parser.add_argument_group("of a recipe for several processes, as for `tune run`")
    options.add_argument("--nproc_per_node", "--nproc-per-node", type=int, default=1, metavar="N", help="of each host")
    options.add_argument("--nnodes", type=int, default=1, metavar="N", help="hosts")
    parser.set_defaults(execute=_execute)


def _execute(args: argparse.Namespace) -> int:
    name, overrides = args.config, list(args.overrides)
    if name is None:  # as `tune validate` takes it
        name = next((word for word in overrides if "=" not in word and not word.startswith("~")), None)
        if name is None:
            raise UserError("which config? For example: tune plan --config llama2_7b_offload; `tune ls` lists them")
        overrides.remove(name)
    return plan(name, overrides, args, recipe=args.recipe)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Adds the options that describe a machine."""
    card = parser.add_mutually_exclusive_group()
    card.add_argument("--gpu", metavar="NAME", help='a card, such as "RTX 4090" (default: the one that is here)')
    card.add_argument("--vram", metavar="SIZE", help="memory of the GPU, such as 16GiB")
    parser.add_argument("--ram", metavar="SIZE", help="memory of the host, such as 32GiB")
    parser.add_argument("--ram-bandwidth", metavar="SIZE", help="of the host's memory modules in a second, such as "
                        "51GB for two channels of DDR4-3200")  # fmt: skip


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


def size(text: str, option: str, example: str = "16GiB") -> int:
    """Bytes of ``16GiB``.

    Raises:
        UserError: names the option.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    units = {name.lower(): factor for name, factor in UNITS.items()}
    if found is None or found[2].lower() not in units or not float(found[1]):
        kind = " above 0" if found and not float(found[1]) else f" with its unit ({', '.join(UNITS)})"
        raise UserError(f"{option}: got {text!r}, expected a size{kind}, such as {example}")
    return int(float(found[1]) * units[found[2].lower()])


def plan(name: str, overrides: Sequence[str], machine: argparse.Namespace, *, recipe: str | None = None) -> int:
    """Prints the plan of a run; returns 0, or 1 where it does not fit.

    Args:
        name: a config's name or path.
        overrides: as on a ``tune run`` line.
        machine: with ``gpu``, ``vram`` and ``ram``, and ``nproc_per_node`` and ``nnodes`` of several processes.
        recipe: that runs it.

    Raises:
        UserError: the problems, one per line.
    """
    with _uncollected():
        return _plan(name, overrides, machine, recipe)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without searches for garbage, which take a sixth of the time: what is imported and built here stays."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _plan(name: str, overrides: Sequence[str], machine: argparse.Namespace, recipe: str | None) -> int:
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
    world = _world(chosen, machine)
    run = _Run(chosen, config.path, list(overrides), world)
    device = run.device(elsewhere=vram is not None)
    run.check(())
    limits = run.limits = _limits(device, vram, ram, card.name if card else None, processes=world.local_size)
    found = run.plan(())
    title = f"{config.name} for {chosen.name}"
    rates = _machine(device, card, machine, run.settings.dtype, cards=world.local_size)
    if world.size > 1:
        return _of_several(run, f"{title}, each of {world.size} processes", found, limits, rates)
    placed, prediction, why = run.placed(found, limits, rates) if rates is not None else (found, None, [])
    if rates is None and device.type != "cpu":
        why = run.told_of_room(found, limits)
    print("\n".join([_text(title, placed, run.settings.dtype, limits), *why]))
    if rates is not None:
        print(f"\n{_speed(prediction, rates.source)}")
    elif device.type == "cpu":
        print(f"\n{_speed_on_cpu(run, found)}")
    elif limits.device is None:
        print('whether it fits, and how fast it is: --gpu "RTX 4090" and --ram 64GiB tell of a machine')
    fits = found.budget.fits(limits.device, limits.host)
    if device.type == "cpu" or (fits and rates is None):
        return 0 if fits else 1
    choices = run.best(limits, rates or _Rates(_ordering_machine(), None, ""), SHOWN)
    sister = run.sister(config.name, limits, rates, found.budget) if config.shipped and not fits else None
    print(f"\n{_ranked(choices, sister, fits=fits, with_speed=rates is not None)}")
    return 0 if fits else 1


def _of_several(run: _Run, title: str, found: Any, limits: Limits, rates: _Rates | None) -> int:
    """Tells of several processes; returns the status."""
    known = rates if run.is_on_one_host else None
    placed, prediction, why = run.placed(found, limits, known) if known is not None else (found, None, [])
    print("\n".join([_text(title, placed, run.settings.dtype, limits), *why]))
    if run.division:
        print(f"auto: {run.division}")
    fits: bool = found.budget.fits(limits.device, limits.host)
    if known is not None:
        system = run.system(known)
        way = "through the host" if system.through_host else "over NVLink"
        exchanged = f", collectives at {system.bus / 1e9:.0f} GB/s {way}"
        print(f"\n{_speed(prediction, known.source + exchanged, of=run.processes)}")
        print(f"\n{_ranked(run.best(limits, known, SHOWN), None, fits=fits, with_speed=True)}")
    elif rates is not None:
        print("\nspeed: of several hosts it is not told, whose network is not known")
    if not fits and known is None:
        print(
            "what takes less: more processes, a smaller batch_size, enable_activation_checkpointing=True, "
            "reshard_after_forward=True, optimizer.offload_gradients=True"
        )
    return 0 if fits else 1


def _ranked(choices: Sequence[Any], sister: tuple[str, Any] | None, *, fits: bool, with_speed: bool) -> str:
    """The table of settings that fit."""
    if not choices and not sister:
        return ("no combination of batch_size, tokenizer.max_seq_len, activation checkpointing and the optimizer's "
                "settings fits: a smaller model, or more memory")  # fmt: skip
    rows = [(choice, " ".join(choice.changes) or "(as it is)") for choice in choices]
    if sister:
        rows.append((sister[1], f"--config {sister[0]}"))
    lines = [f"what fits{'' if not fits else ' too'}, fastest first:" if with_speed else "what fits:"]
    lines.append(f"  {'tok/s  ' if with_speed else ''}   GPU    host  GiB")
    for choice, words in rows:
        budget = choice.plan.budget
        speed = f"{choice.prediction.tokens_per_second:7,.0f}" if with_speed else ""
        mark = "  *" if choice.rounds_otherwise else ""
        lines.append(f"{speed}  {budget.device / GIB:6.1f}  {budget.host / GIB:6.1f}  {words}{mark}")
    if any(choice.rounds_otherwise for choice, _ in rows):
        lines.append(
            "  * states or master weights in another format, which round otherwise than this run's (docs/adamw.md)"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class _Rates:
    """What predictions rest on.

    Attributes:
        machine: rates (:class:`offload.plan.workload.Machine`).
        dtype: torch's, of the run.
        source: of the rates, in words.
        card: of the table; None for one that is not there.
    """

    machine: Any
    dtype: Any
    source: str
    card: Any = None


def _ordering_machine() -> Any:
    from offload.plan.cards import find_card
    from offload.plan.machines import machine_of_card

    return machine_of_card(find_card(ORDERING_CARD))


def _machine(device: Any, card: Any, options: argparse.Namespace, dtype_name: str, *, cards: int) -> _Rates | None:
    """The rates of the card that was named, or of the one that is here, one of so many ``cards``; None where neither is
    known."""
    import torch

    from offload.device import DTYPES
    from offload.plan import machines

    dtype = DTYPES[dtype_name]
    stated = None if options.ram_bandwidth is None else float(size(options.ram_bandwidth, "--ram-bandwidth", "50GB"))
    if device.type == "cpu" or (card is None and options.vram is not None):
        return None
    if card is None:
        from offload.device import is_here
        from offload.metrics.this_machine import machine_here

        here = machine_here(device, fp32=dtype == torch.float32, cards=cards) if is_here(device) else None
        return here and _Rates(here[0], dtype, here[1], machines.card_named(here[0].name))
    machine = machines.machine_of_card(card, ram_bandwidth=stated, fp32=dtype == torch.float32, cards=cards)
    memory = f"{machine.host / 1e9:.0f} GB/s of host memory"
    told = "" if stated else " assumed (--ram-bandwidth 90GB tells)"
    return _Rates(machine, dtype, f"from the data sheet of {card.name} and published runs, {memory}{told}", card)


def _speed_on_cpu(run: _Run, plan: Any) -> str:
    """How fast a run is on this CPU, where that can be told."""
    import torch

    from offload.device import DTYPES

    found = run.predictor.predict_here(run.settings, plan, torch.device("cpu"), DTYPES[run.settings.dtype])
    if found is None:
        return "speed: `tune doctor` measures, once, what predicting it on a CPU takes"
    return _speed(*found)


def _speed(found: Any, source: str, *, of: int = 1) -> str:
    """How fast a run of so many processes is, and what bounds it."""
    from offload.plan.prediction import COMPUTE

    share = found.exposed_seconds / found.step_seconds
    tokens = round(found.tokens_per_second * found.step_seconds)
    others = ", ".join(
        f"{name} {seconds:.2f} s"
        for name, seconds in sorted(found.busy.items(), key=lambda item: -item[1])
        if name != COMPUTE and seconds >= 0.005
    )
    return "\n".join(
        [
            f"speed: {found.tokens_per_second:,.0f} tok/s{f' of all {of} processes' if of > 1 else ''}; {tokens:,} "
            f"tokens, a step, take {found.step_seconds:.2f} s",
            f"  forward and backward {found.compute_seconds:.2f} s, exposed {found.exposed_seconds:.2f} s ({share:.0%})"
            f", bounded by: {found.bottleneck}",
            *([f"  beside them: {others}"] if others else []),
            f"  predicted {source}",
        ]
    )


def _world(recipe: registry.RecipeRef, machine: argparse.Namespace) -> World:
    """The processes that a plan is for; a plan is of the first of them.

    Raises:
        UserError: there are none, or several for a recipe of one.
    """
    from offload.distributed.world import World

    local, hosts = machine.nproc_per_node, machine.nnodes
    for option, number in (("--nproc_per_node", local), ("--nnodes", hosts)):
        if number < 1:
            raise UserError(f"{option}: got {number}, expected a number above 0")
    if local * hosts > 1 and not recipe.distributed:
        raise UserError(registry.single_device(recipe.name, [f"--nproc_per_node {local}"]))
    return World(0, local * hosts, 0, local)


def _recipe_of(path: Path) -> str:
    """Of a user's config: an adapter's section, or a lora builder, means the recipe for adapters, and a key of several
    processes the one for those."""
    text = path.read_text(encoding="utf-8")
    adapts = re.search(r"^adapter:\s*(#.*)?$", text, re.M) or re.search(r"_component_:.*\.q?lora_", text)
    is_distributed = re.search(r"^(reshard_after_forward|data_parallel_replicate_dim|reduce_dtype):", text, re.M)
    kind = registry.DISTRIBUTED if is_distributed else registry.SINGLE_DEVICE
    return f"lora_finetune{kind}" if adapts else f"full_finetune{kind}"


class _Run:
    """One run and its variations.

    Args:
        recipe: that runs it.
        path: of its config.
        overrides: of its command line.
        world: its processes.

    Attributes:
        limits: of one of them.
        division: how they divide the model, where that was left open; empty where it was not.
    """

    def __init__(self, recipe: registry.RecipeRef, path: Path, overrides: list[str], world: World) -> None:
        from offload.cli.validate import recipe_class
        from offload.tiny import register_resolvers

        register_resolvers()
        self._path, self._overrides, self._world = path, overrides, world
        self.limits, self.division = Limits(None, None, {}), ""
        self._class: Any = recipe_class(recipe)
        self._schema: Any = self._class.Settings
        self.settings: Any = self._load(())

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
        from offload.device import DTYPES

        settings = self._load(changes)
        dtype = DTYPES[settings.dtype]
        return self.planner.plan(settings, self._device, dtype, sharding=self._sharding(settings, dtype))

    def placed(self, found: Any, limits: Limits, rates: _Rates) -> tuple[Any, Any, list[str]]:
        """A plan, with strategy ``auto`` of what that comes to; its prediction; what ``auto`` chooses, and why."""
        from offload.training.placement import Room, placed, told

        room = Room(limits.device, limits.host)
        if self.processes > 1:
            sharding = self._sharding(self.settings, rates.dtype)
            prediction = self.predictor.predict_ranks(
                self.settings, found, self.system(rates), sharding, rates.dtype, room, processes=self.processes
            )
        else:
            prediction = self.predictor.predict(self.settings, found, rates.machine, rates.dtype, room)
        plan = placed(found, prediction, self.settings.optimizer, rates.dtype.itemsize)
        return plan, prediction, told(found, prediction)

    def told_of_room(self, found: Any, limits: Limits) -> list[str]:
        """What strategy ``auto`` does with the memory that is left over, where nothing is known of rates."""
        from offload.training.placement import Room, is_auto, left_over

        if not is_auto(self.settings.optimizer) or limits.device is None:
            return []
        nbytes = left_over(self.settings.optimizer, found, Room(limits.device, limits.host))
        return [f"auto: begins as stream does; up to {nbytes / GIB:.2f} GiB of the optimizer's states move to the GPU"]

    def may_fit(self, limits: Limits) -> bool:
        """Whether there is room for what the run takes beside its activations."""
        from offload.device import DTYPES

        least = self.planner.least(self.settings, self._device, DTYPES[self.settings.dtype])
        return bool(least.budget.fits(limits.device, limits.host))

    @functools.cached_property
    def planner(self) -> Any:
        """Of the run's variations (:class:`offload.training.budgeting.Planner`)."""
        from offload.device import is_here
        from offload.training.budgeting import ELSEWHERE, Planner, process_of_a_run

        return Planner(process_of_a_run if is_here(self._device) else ELSEWHERE, adapts=self._class.adapts)

    def _sharding(self, settings: Any, dtype: Any) -> Any:
        from offload.training.dividing import choose, divisions, least

        if self._world.size == 1 or len(divisions(settings, self._world)) == 1:
            return least(settings, self._world)
        division, self.division = choose(
            settings,
            self._world,
            lambda sharding: self.planner.plan(settings, self._device, dtype, sharding=sharding).budget,
            device=self.limits.device,
            host=self.limits.host,
        )
        return division.sharding(settings, self._world)

    def check(self, changes: Sequence[str]) -> None:
        """As `tune validate`, but for a folder that has config.json and no weights yet.

        Raises:
            UserError: names the keys that a run would refuse.
        """
        from offload.component import installed_only

        settings = self._load(changes)
        if self._world.size > 1:
            from offload.distributed.sharding import check_shape
            from offload.models.source import check_divisible

            check_divisible(settings.model)
            replicate, kept = settings.data_parallel_replicate_dim, settings.reshard_after_forward
            check_shape(self._world, replicate=replicate, reshard_after_forward=kept)
        folder = Path(str(settings.model.get("path") or "")).expanduser()
        if (folder / "config.json").is_file() and not any(folder.glob("*.safetensors")):
            from offload.device import DTYPES
            from offload.models.source import check_section

            check_section(settings.model, self._device, DTYPES[settings.dtype], adapts=self._class.adapts)
            return
        with installed_only():
            self._class.check(settings, notes=[])

    def _is_allowed(self, changes: Sequence[str]) -> bool:
        try:
            self.check(changes)
        except UserError:
            return False
        return True

    @property
    def processes(self) -> int:
        """All of them."""
        return self._world.size

    @property
    def is_on_one_host(self) -> bool:
        return self._world.size == self._world.local_size

    def system(self, rates: _Rates) -> Any:
        """The cards of its host (:class:`offload.plan.collectives.System`)."""
        from offload.plan.collectives import system_of

        return system_of(rates.machine, rates.card)

    def best(self, limits: Limits, rates: _Rates, number: int) -> list[Any]:
        """Settings that fit, the fastest first (:class:`offload.training.ranking.Choice`); their lines were checked.

        Args:
            limits: of memory.
            rates: of the machine.
            number: of settings at most.
        """
        from offload.training.ranking import Ranking

        planner, predictor = self.planner, self.predictor
        beside: list[tuple[str, ...]] = [()]
        if self.processes > 1:
            from offload.training.several import PlannerOfRanks, PredictorOfRanks, exchanges

            planner = PlannerOfRanks(planner, self._world)
            predictor = PredictorOfRanks(predictor, self.system(rates), self._world)
            beside = list(exchanges(self.settings))
        ranking = Ranking(
            self.settings, planner, predictor, rates.machine, self._device, (limits.device, limits.host),
            self._is_allowed, beside,
        )  # fmt: skip
        return ranking.best(number)

    @functools.cached_property
    def predictor(self) -> Any:
        """Of the run's variations (:class:`offload.training.predicting.Predictor`)."""
        from offload.training.predicting import Predictor

        return Predictor(self.planner)

    def sister(self, name: str, limits: Limits, rates: _Rates | None, budget: Any) -> tuple[str, Any] | None:
        """The config of the same model that trains an adapter, and its memory and speed, where that fits.

        Args:
            name: of this run's config.
            limits: of memory.
            rates: for its speed.
            budget: of this run.
        """
        from offload.training.ranking import Choice

        model = name.rpartition("_")[0]
        for other in (f"{model}_lora", f"{model}_qlora"):
            if other == name or other not in registry.our_configs():
                continue
            with contextlib.suppress(UserError):
                recipe = registry.find_recipe(registry.recipe_of_config(other))
                run = _Run(recipe, registry.our_configs()[other], [], self._world)
                run.device(elsewhere=limits.device is not None)
                is_same = (run.settings.model, run.settings.dtype) == (self.settings.model, self.settings.dtype)
                if is_same and not budget.may_fit(limits.device):
                    continue
                if self._world.size == 1 and not run.may_fit(limits):
                    continue
                found = run.plan(())
                if found.budget.fits(limits.device, limits.host):
                    if rates is None:
                        return other, Choice((), found)
                    placed, speed, _ = run.placed(found, limits, rates)
                    return other, Choice((), placed, speed)
        return None


def _limits(device: Any, vram: int | None, ram: int | None, card: str | None, *, processes: int) -> Limits:
    from offload.host_memory import host_memory
    from offload.plan.budget import OS_SHARE

    names = {"device": f" of {card}" if card else "", "host": ""}
    has_here = False
    if device.type != "cpu" and vram is None:
        from offload.device import is_here, total_memory

        if is_here(device):
            import torch

            vram, has_here = total_memory(device), True
            names["device"] = f" of the {torch.get_device_module(device).get_device_name(device)} here"
    host = None if ram is None else int(ram * (1 - OS_SHARE))
    if ram is not None:
        names["host"] = ", 95 % of it"
    elif device.type == "cpu" or has_here:
        host = host_memory().usable
        names["host"] = " that this process can have"
    if host is not None and processes > 1:
        host //= processes
        names["host"] += f", for each of {processes} processes"
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
