"""``tune plan``: the memory that a run will take, whether it fits, how fast it is, and what fits and is faster."""

from __future__ import annotations

import argparse
import contextlib
import gc
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli import registry, write_config
from offload.cli.planned_run import Limits, PlannedRun, Rates, Sister, limits_of
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
    parser.add_argument("--write", metavar="FILE", help="writes the config with the fastest of the overrides that "
                        "fit and keep the optimizer's formats, ready for `tune run`")  # fmt: skip
    options = parser.add_argument_group("of a recipe for several processes, as for `tune run`")
    options.add_argument("--nproc_per_node", "--nproc-per-node", type=int, default=1, metavar="N", help="of each host")
    options.add_argument("--nnodes", default="1", metavar="N", help="hosts; of MIN:MAX the most")
    options.add_argument("--network", metavar="RATE", help="between a host and the others, all of its adapters "
                         "together, each way, such as 100Gbit/s")  # fmt: skip
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
    if machine.network is not None:
        rate(machine.network, "--network")
    file = None if machine.write is None else write_config.destination(machine.write)
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
    run = PlannedRun(chosen, config.path, list(overrides), world)
    device = run.device(elsewhere=vram is not None)
    run.check(())
    limits = run.limits = limits_of(device, vram, ram, card.name if card else None, processes=world.local_size)
    if file is not None and limits.device is None:
        raise UserError('--write: for which card? --gpu "RTX 4090" and --ram 64GiB tell')
    found = run.plan(())
    title = f"{config.name} for {chosen.name}"
    rates = _machine(device, card, machine, run.settings.dtype, cards=world.local_size)
    listed = _tell_one if world.size == 1 else _tell_of_several
    choices, sister = listed(run, config, title, found, limits, rates)
    fits: bool = found.budget.fits(limits.device, limits.host)
    if file is not None:
        return _write(file, run, choices, sister, config.name, limits, machine)
    return 0 if fits else 1


def _tell_one(
    run: PlannedRun, config: registry.ConfigRef, title: str, found: Any, limits: Limits, rates: Rates | None
) -> tuple[list[Any], Sister | None]:
    """Tells of one process; returns the settings that were ranked, and the config of an adapter beside them."""
    device = run.device(elsewhere=limits.device is not None)
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
    if device.type == "cpu":
        return [], None
    if fits and rates is None:
        return [run.as_it_is(found)], None
    choices = run.best(limits, rates or Rates(_ordering_machine(), None, ""), SHOWN)
    sister = run.sister(config.name, limits, rates, found.budget) if config.shipped and not fits else None
    print(f"\n{_ranked(choices, sister, fits=fits, with_speed=rates is not None)}")
    return choices, sister


def _tell_of_several(
    run: PlannedRun, config: registry.ConfigRef, title: str, found: Any, limits: Limits, rates: Rates | None
) -> tuple[list[Any], Sister | None]:
    """Tells of several processes; returns the settings that were ranked."""
    title = f"{title}, each of {run.processes} processes"
    placed, prediction, why = run.placed(found, limits, rates) if rates is not None else (found, None, [])
    print("\n".join([_text(title, placed, run.settings.dtype, limits), *why]))
    if run.division:
        print(f"auto: {run.division}")
    fits: bool = found.budget.fits(limits.device, limits.host)
    if rates is not None:
        print(f"\n{_speed(prediction, rates.source + _exchanged(run, rates), of=run.processes)}")
        choices = run.best(limits, rates, SHOWN)
        print(f"\n{_ranked(choices, None, fits=fits, with_speed=True)}")
        return choices, None
    if fits:
        return [run.as_it_is(found)], None
    print(
        "what takes less: more processes, a smaller batch_size, enable_activation_checkpointing=True, "
        "reshard_after_forward=True, optimizer.offload_gradients=True"
    )
    return [], None


def _exchanged(run: PlannedRun, rates: Rates) -> str:
    """How fast its collectives are taken to be."""
    system = run.system(rates)
    way = "through the host" if system.through_host else "over NVLink"
    line = f", collectives at {system.bus / 1e9:.0f} GB/s {way}"
    if run.hosts == 1:
        return line
    told = " assumed (--network 100Gbit/s tells)" if rates.network is None else ""
    return (
        f"{line}, and between {run.hosts} hosts at {system.network / 1e9:.3g} GB/s of each, of "
        f"{run.network(rates) * 8 / 1e9:.4g} Gbit/s{told}, in rings through all cards"
    )


def _write(
    file: Path,
    run: PlannedRun,
    choices: Sequence[Any],
    sister: Sister | None,
    name: str,
    limits: Limits,
    machine: argparse.Namespace,
) -> int:
    """Writes the config with the best of the settings that fit; returns the status."""
    best = write_config.best_of(choices)
    if best is None and sister is not None:
        run, best, name = sister.run, sister.choice, sister.name
    if best is None:
        print("nothing fits, and nothing is written")
        return 1
    host = "" if limits.host is None else f" with {machine.ram or f'{limits.host / GIB:.0f} GiB'} of host memory"
    where = machine.gpu or machine.vram or "the GPU here"
    several = [f"--nnodes {run.hosts}"] * (run.hosts > 1) + [f"--nproc_per_node {run.processes // run.hosts}"]
    options = " ".join(several) if run.processes > 1 else ""
    for_what = f"{where}{host}" + (f", {options}" if options else "")
    write_config.write(file, run, best, name=name, machine=for_what)
    words = " ".join(run.words(best.changes)) or "no override"
    line = " ".join(["tune run", *([options] if options else []), run.recipe.name, "--config", shlex.quote(str(file))])
    print(f"\nwrote {file}: {name} with {words}\n  {line}")
    return 0


def _ranked(choices: Sequence[Any], sister: Sister | None, *, fits: bool, with_speed: bool) -> str:
    """The table of settings that fit."""
    if not choices and not sister:
        return ("no combination of batch_size, tokenizer.max_seq_len, activation checkpointing and the optimizer's "
                "settings fits: a smaller model, or more memory")  # fmt: skip
    rows = [(choice, " ".join(choice.changes) or "(as it is)") for choice in choices]
    if sister:
        rows.append((sister.choice, f"--config {sister.name}"))
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


def _ordering_machine() -> Any:
    from offload.plan.cards import find_card
    from offload.plan.machines import machine_of_card

    return machine_of_card(find_card(ORDERING_CARD))


def _machine(device: Any, card: Any, options: argparse.Namespace, dtype_name: str, *, cards: int) -> Rates | None:
    """The rates of the card that was named, or of the one that is here, one of so many ``cards``; None where neither is
    known."""
    import torch

    from offload.device import DTYPES
    from offload.plan import machines

    dtype = DTYPES[dtype_name]
    network = None if options.network is None else rate(options.network, "--network")
    stated = None if options.ram_bandwidth is None else float(size(options.ram_bandwidth, "--ram-bandwidth", "50GB"))
    if device.type == "cpu" or (card is None and options.vram is not None):
        return None
    if card is None:
        from offload.device import is_here
        from offload.metrics.this_machine import machine_here

        here = machine_here(device, fp32=dtype == torch.float32, cards=cards) if is_here(device) else None
        return here and Rates(here[0], dtype, here[1], machines.card_named(here[0].name), network)
    machine = machines.machine_of_card(card, ram_bandwidth=stated, fp32=dtype == torch.float32, cards=cards)
    memory = f"{machine.host / 1e9:.0f} GB/s of host memory"
    told = "" if stated else " assumed (--ram-bandwidth 90GB tells)"
    return Rates(
        machine, dtype, f"from the data sheet of {card.name} and published runs, {memory}{told}", card, network
    )


def _speed_on_cpu(run: PlannedRun, plan: Any) -> str:
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

    local, hosts = machine.nproc_per_node, _most(str(machine.nnodes))
    for option, number in (("--nproc_per_node", local), ("--nnodes", hosts)):
        if number < 1:
            raise UserError(f"{option}: got {number}, expected a number above 0")
    if local * hosts > 1 and not recipe.distributed:
        given = [f"--nnodes {hosts}"] * (hosts > 1) + [f"--nproc_per_node {local}"] * (local > 1)
        raise UserError(registry.single_device(recipe.name, given))
    if machine.network is not None and hosts == 1:
        raise UserError("--network: is between hosts, and there is one: add --nnodes 2, or leave it out")
    return World(0, local * hosts, 0, local)


def _most(text: str) -> int:
    """Of torchrun's ``--nnodes``: ``2``, or ``1:4``, of which a plan is for the most.

    Raises:
        UserError: it is neither.
    """
    found = re.fullmatch(r"(?:(\d+):)?(-?\d+)", text.strip())
    if found is None or int(found[1] or 0) > int(found[2]) >= 0:
        raise UserError(f"--nnodes: got {text!r}, expected a number of hosts, or MIN:MAX as torchrun takes it")
    return int(found[2])


def rate(text: str, option: str) -> float:
    """Bytes per second of ``100Gbit/s`` or ``12.5GB/s``.

    Raises:
        UserError: names the option.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(bit/s|bps|b/s|B/s)", text.strip(), re.IGNORECASE)
    if found is None or not float(found[1]):
        raise UserError(f"{option}: got {text!r}, expected a rate above 0 with its unit, such as 100Gbit/s or 12.5GB/s")
    factor = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}[found[2].upper()]
    return float(found[1]) * factor / (1 if found[3] in ("B/s", "Bps") else 8)


def _recipe_of(path: Path) -> str:
    """Of a user's config: an adapter's section, or a lora builder, means the recipe for adapters, and a key of several
    processes the one for those."""
    text = path.read_text(encoding="utf-8")
    adapts = re.search(r"^adapter:\s*(#.*)?$", text, re.M) or re.search(r"_component_:.*\.q?lora_", text)
    is_distributed = re.search(r"^(reshard_after_forward|data_parallel_replicate_dim|reduce_dtype):", text, re.M)
    kind = registry.DISTRIBUTED if is_distributed else registry.SINGLE_DEVICE
    return f"lora_finetune{kind}" if adapts else f"full_finetune{kind}"


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
