"""One run that `tune plan` tells of, and its variations: their memory, their speed, what fits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli import registry
from offload.errors import UserError

if TYPE_CHECKING:
    from offload.distributed.world import World

GIB = 2**30


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


@dataclass(frozen=True)
class Rates:
    """What predictions rest on.

    Attributes:
        machine: rates (:class:`offload.plan.workload.Machine`).
        dtype: torch's, of the run.
        source: of the rates, in words.
        card: of the table; None for one that is not there.
        network: bytes per second each way between a host and the others; None for what is assumed.
    """

    machine: Any
    dtype: Any
    source: str
    card: Any = None
    network: float | None = None


class PlannedRun:
    """One run and its variations.

    Args:
        recipe: that runs it.
        path: of its config.
        overrides: of its command line.
        world: its processes.

    Attributes:
        recipe: that runs it.
        limits: of one of them.
        division: how they divide the model, where that was left open; empty where it was not.
    """

    def __init__(self, recipe: registry.RecipeRef, path: Path, overrides: list[str], world: World) -> None:
        from offload.cli.validate import recipe_class
        from offload.tiny import register_resolvers

        register_resolvers()
        self.recipe, self._path, self._overrides, self._world = recipe, path, overrides, world
        self.limits, self.division = Limits(None, None, {}), ""
        self._class: Any = recipe_class(recipe)
        self._schema: Any = self._class.Settings
        self.settings: Any = self._load(())

    def _load(self, changes: Sequence[str]) -> Any:
        from offload.config.loading import load_and_check

        _, settings = load_and_check(self._path, self.words(changes), self._schema, [])
        return settings

    def words(self, changes: Sequence[str]) -> list[str]:
        """All overrides, with more of them."""
        return [*self._overrides, *changes]

    def text(self, changes: Sequence[str]) -> str:
        """The config with all overrides in it, and its comments.

        Raises:
            UserError: it repeats values by aliases.
        """
        from omegaconf import OmegaConf

        from offload.config.editing import with_values
        from offload.config.loading import load_config

        cfg = load_config(self._path, self.words(changes), notes=[], schema=self._schema)
        tree: Any = OmegaConf.to_container(cfg, resolve=False)
        return with_values(self._path.read_text(encoding="utf-8"), tree)

    def at(self, path: Path) -> PlannedRun:
        """The run of another config, without overrides."""
        run = PlannedRun(self.recipe, path, [], self._world)
        run._device = self._device
        return run

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

    def placed(self, found: Any, limits: Limits, rates: Rates) -> tuple[Any, Any, list[str]]:
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
    def hosts(self) -> int:
        """Of the processes."""
        return self._world.hosts

    def system(self, rates: Rates) -> Any:
        """The cards of its hosts (:class:`offload.plan.collectives.System`)."""
        from offload.plan.collectives import system_of

        return system_of(rates.machine, rates.card, hosts=self.hosts, network=self.network(rates))

    def network(self, rates: Rates) -> float:
        """Bytes per second each way between one of its hosts and the others."""
        from offload.plan.collectives import network_of

        return network_of(rates.card, self._world.local_size) if rates.network is None else rates.network

    def as_it_is(self, found: Any) -> Any:
        """Its own settings as one that fits (:class:`offload.training.ranking.Choice`)."""
        from offload.training.ranking import Choice

        return Choice((), found)

    def best(self, limits: Limits, rates: Rates, number: int) -> list[Any]:
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
            beside = list(exchanges(self.settings, self._world))
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

    def sister(self, name: str, limits: Limits, rates: Rates | None, budget: Any) -> Sister | None:
        """The config of the same model that trains an adapter, where that fits.

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
                run = PlannedRun(recipe, registry.our_configs()[other], [], self._world)
                run.device(elsewhere=limits.device is not None)
                is_same = (run.settings.model, run.settings.dtype) == (self.settings.model, self.settings.dtype)
                if is_same and not budget.may_fit(limits.device):
                    continue
                if self._world.size == 1 and not run.may_fit(limits):
                    continue
                found = run.plan(())
                if found.budget.fits(limits.device, limits.host):
                    if rates is None:
                        return Sister(other, run, Choice((), found))
                    placed, speed, _ = run.placed(found, limits, rates)
                    return Sister(other, run, Choice((), placed, speed))
        return None


@dataclass(frozen=True)
class Sister:
    """A config of the same model that trains an adapter.

    Attributes:
        name: of the config.
        run: of it.
        choice: its memory and speed (:class:`offload.training.ranking.Choice`).
    """

    name: str
    run: PlannedRun
    choice: Any


def limits_of(device: Any, vram: int | None, ram: int | None, card: str | None, *, processes: int) -> Limits:
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
