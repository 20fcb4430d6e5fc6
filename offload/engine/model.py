"""The model's side of asynchronous updates: each unit's forward waits for that unit's update, and for no other."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from offload.engine.units import Unit, clean_name, unit_of

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules whose forward nobody calls; what they hold is used by the module around them."""


class ModelWaits:
    """Hooks that call ``wait(unit)`` before whichever module uses the unit runs.

    A unit waits at the module of its name (``layers.3``) and at every other module that holds one of its
    parameters (a tied head). Units whose modules turn out not to be called by the model's forward (their
    weights are used by a module further out) wait at the start of that forward; when it returns, everything
    has been waited for, so that a loss may use any parameter.

    Hooks run outside of compiled regions: a module that was compiled in place waits before its compiled code.

    Args:
        model: the model whose forward reads the parameters.
        wait: makes the current stream wait for a unit.
        wait_for_all: the same for all units.
        settle: blocks until everything is done; before the model's state is saved or loaded.
        loaded: told which parameters of a module were loaded.
    """

    def __init__(
        self,
        model: nn.Module,
        wait: Callable[[Unit], None],
        wait_for_all: Callable[[], None],
        settle: Callable[[], None],
        loaded: Callable[[Iterable[nn.Parameter]], None],
    ) -> None:
        self._model = weakref.ref(model)
        self._wait = weakly(wait)
        self._wait_for_all = weakly(wait_for_all)
        self._settle = weakly(settle)
        self._loaded = weakly(loaded)
        self._units: dict[nn.Module, list[Unit]] = {}
        self._reached: set[Unit] = set()
        self._early: list[Unit] = []
        self._uncovered: list[Unit] = []
        self._inside = False
        self._watched: set[nn.Module] = set()
        self._handles: list[Any] = []
        self._watch(model, self._begin)
        self._handles.append(model.register_forward_hook(_outside(self._end), always_call=True))
        for module in model.modules():
            self._handles.append(module.register_state_dict_pre_hook(lambda *_: self._settle()))
            self._handles.append(module.register_load_state_dict_pre_hook(lambda *_: self._settle()))
            self._handles.append(module.register_load_state_dict_post_hook(self._after_loading))

    def cover(self, units: Sequence[Unit]) -> None:
        """Hook the modules of all ``units``; those that the model does not have are left to :meth:`step`."""
        model = self._model()
        assert model is not None
        modules = dict(reversed([(clean_name(name), module) for name, module in model.named_modules()]))
        unit_by_param = {param: unit for unit in units for param in unit.params}
        self._units = {}
        covered: set[nn.Parameter] = set()
        for name, module in model.named_modules():
            for attribute, param in module.named_parameters(recurse=False):
                unit = unit_by_param.get(param)
                if unit is None:
                    continue
                covered.add(param)
                target = unit_of(f"{clean_name(name)}.{attribute}")
                while isinstance(modules[target], CONTAINERS):
                    target = target.rpartition(".")[0]
                waiting = self._units.setdefault(modules[target], [])
                if unit not in waiting:
                    waiting.append(unit)
        self._uncovered = [unit for unit in units if not covered.issuperset(unit.params)]
        for module in self._units:
            if module not in self._watched and module is not model:
                self._watched.add(module)
                self._watch(module, self._before)

    def _watch(self, module: nn.Module, call: Callable[[nn.Module], None]) -> None:
        """Run ``call(module)`` before each forward of a module."""
        compiled = module._compiled_call_impl
        if compiled is None:
            self._handles.append(module.register_forward_pre_hook(_outside(lambda module, *_: call(module))))
            return

        def wait_and_call(*args: Any, **kwargs: Any) -> Any:
            call(module)
            return compiled(*args, **kwargs)

        module._compiled_call_impl = wait_and_call
        self._handles.append(_Undo(module, compiled))

    def _begin(self, model: nn.Module) -> None:
        self._inside = True
        self._reached.clear()
        for unit in [*self._units.get(model, ()), *self._early]:
            self._wait(unit)

    def _before(self, module: nn.Module) -> None:
        for unit in self._units.get(module, ()):
            self._reached.add(unit)
            self._wait(unit)

    def _after_loading(self, module: nn.Module, incompatible: Any) -> None:
        self._loaded(list(module.parameters(recurse=False)))

    def _end(self, *_: Any) -> None:
        if self._inside and torch.is_grad_enabled():
            model = self._model()
            own = self._units.get(model, []) if model is not None else []
            everywhere = {unit for units in self._units.values() for unit in units}
            self._early = [unit for unit in everywhere if unit not in self._reached and unit not in own]
        self._inside = False
        self._wait_for_all()

    def step(self) -> None:
        """What :meth:`OffloadOptimizer.step` has to wait for: units that no module of the model holds."""
        for unit in self._uncovered:
            self._wait(unit)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Undo:
    """Handle that gives a module its compiled call back."""

    def __init__(self, module: nn.Module, compiled: Any) -> None:
        self._module, self._compiled = module, compiled

    def remove(self) -> None:
        self._module._compiled_call_impl = self._compiled


def _outside(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook, kept out of what torch.compile traces."""
    return torch.compiler.disable(hook)


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A bound method that does not keep its object alive, and does nothing once that is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*args)

    return call
