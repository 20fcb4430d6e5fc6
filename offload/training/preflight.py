"""What a run refuses before it reads data and weights.

Recipes check it first, and ``tune validate`` alone: one function, so that both refuse the same in the same words. The
model is built on the meta device, from its arguments or the files that have its sizes, the optimizer over small
stand-ins for its parameters, the loss is called on a few numbers. Nothing is written, no random number of the run is
drawn, no metric logger is started, no code of a model's folder is run.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from offload import component as components
from offload.component import LocalModuleError
from offload.config.interpolation import is_known, tree_of
from offload.config.loading import instantiate
from offload.config.schema import arguments_of, resolve
from offload.device import is_here
from offload.engine.forecast import LARGE, stand_in
from offload.engine.units import clean_name
from offload.errors import UserError
from offload.models.source import check_section, empty_model
from offload.optim import cpu
from offload.optimizer import OffloadOptimizer
from offload.peers import TorchAOCPUOffloadOptimizer
from offload.training.activations import check_activations, prepare_activations
from offload.training.loss import IGNORE_INDEX, LinearCrossEntropyLoss
from offload.training.optimizer import check_async_checkpointing, check_optimizer
from offload.training.outline import outline
from offload.training.profiler import check_profiler
from offload.training.settings import TrainSettings
from offload.training.step import build_scheduler, check_training

NUM_STEPS = 1_000_000
"""Steps of a run whose data nobody has counted yet, for its learning-rate schedule."""

_Named = list[tuple[str, nn.Parameter]]


def check_run(
    settings: TrainSettings,
    device: torch.device,
    dtype: torch.dtype,
    *,
    adapts: bool = False,
    notes: list[str] | None = None,
) -> None:
    """Refuse settings with which no run comes to its first step, whatever its data and weights are.

    A part is left out where only a run can tell: a value of a resolver that prepares files, a model that brings code, a
    component that :func:`offload.component.installed_only` does not import.

    Args:
        settings: that the schema accepts.
        device: trains.
        dtype: of the parameters.
        adapts: an adapter trains, and not the whole model.
        notes: where given, the run may be on another machine: it gets a line about what was not checked because its
            files are not here. The tokenizer and the base checkpoint are opened too, which a run does anyway.

    Raises:
        UserError: names the key, and the way out.
    """
    tree = tree_of(settings.model)
    if settings.enable_async_checkpointing and not adapts:
        check_async_checkpointing(settings.optimizer)
    with _trying():
        check_activations(
            checkpointing=settings.enable_activation_checkpointing,
            offloading=settings.enable_activation_offloading,
            device=device,
        )
        with contextlib.suppress(LocalModuleError):
            if is_known(settings.loss, tree):
                check_loss(instantiate(settings.loss), settings.loss["_component_"])
        with contextlib.suppress(LocalModuleError):
            check_section(settings.model, device, dtype, adapts=adapts)
        model = check_model(settings.model, dtype, tree, adapts=adapts)
        if model is None or notes is not None:
            parts = outline(settings, dtype, tree, adapts=adapts, notes=notes)
            if parts is not None:
                prepare_activations(
                    parts, checkpointing=settings.enable_activation_checkpointing, offloading=False, device=device
                )
                model = parts.module
        with contextlib.suppress(LocalModuleError):
            if is_known(settings.optimizer, tree):
                _check_optimizer(settings, model, device, dtype, tree)
        with contextlib.suppress(LocalModuleError):
            if settings.metric_logger is not None and is_known(settings.metric_logger, tree):
                _check_imports(settings.metric_logger, "metric_logger")
        if settings.profiler is not None and notes is None and is_known(settings.profiler, tree):
            check_profiler(settings.profiler)


@contextlib.contextmanager
def _trying() -> Iterator[None]:
    """What is built here is thrown away: the run warns, and draws random numbers, when it builds its own."""
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            yield
    finally:
        if cpu.load.cache_info().currsize and cpu.load() is None:
            cpu.load.cache_clear()  # which warns once, of a kernel that is missing: the run has to


def check_model(
    section: DictConfig, dtype: torch.dtype, tree: dict[str, Any] | None = None, *, adapts: bool = False
) -> nn.Module | None:
    """The ``model`` component on the meta device; None where only a run can build it.

    Args:
        section: the component.
        dtype: of the parameters.
        tree: the configuration's values, where they are at hand.
        adapts: an adapter trains, and not the whole model.

    Raises:
        UserError: it cannot be built from its arguments.
    """
    if not is_known(section, tree_of(section) if tree is None else tree):
        return None
    path = section["_component_"]
    try:
        component = resolve(path, key="model._component_")
        given = arguments_of(section)
        signature = components.signature_of(component, given)
        for name, parameter in signature.parameters.items():
            is_variable = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if parameter.default is parameter.empty and not is_variable and name not in given:
                return None  # config.json of the base checkpoint has it
        return empty_model(section, dtype, adapts=adapts)
    except LocalModuleError:
        return None
    except UserError:
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or "no reason given"
        raise UserError(
            f"model: {path} cannot be built from its arguments: {type(error).__name__}: {reason}"
        ) from error


def check_loss(loss: Any, path: str) -> None:
    """Refuse a loss that does not make one number of logits and labels.

    Args:
        loss: the component.
        path: its dotted path, for messages.

    Raises:
        UserError: says what it did.
    """
    if isinstance(loss, LinearCrossEntropyLoss):
        return
    number, vocabulary = 8, 5
    logits = torch.linspace(-1, 1, number * vocabulary).reshape(1, number, vocabulary)
    labels = torch.arange(number).remainder(vocabulary).reshape(1, number)
    labels[0, -1] = getattr(loss, "ignore_index", IGNORE_INDEX)
    way_out = "use offload.training.loss.LinearCrossEntropyLoss or torch.nn.CrossEntropyLoss"
    try:
        if hasattr(loss, "num_output_chunks"):
            value = loss(list(logits.chunk(loss.num_output_chunks, dim=1)), labels)
        else:
            value = loss(logits[0], labels[0])
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "").strip()
        raise UserError(
            f"loss: {path} does not take logits [tokens, vocabulary] and labels [tokens] "
            f"({type(error).__name__}: {reason}); {way_out}"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        made = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise UserError(
            f"loss: {path} makes {made} of {number} labels, expected one number; set loss.reduction=mean where it "
            f"takes one, or {way_out}"
        )


def _check_optimizer(
    settings: TrainSettings,
    model: nn.Module | None,
    device: torch.device,
    dtype: torch.dtype,
    tree: dict[str, Any],
) -> None:
    """Build the optimizer over stand-ins, and ask it for the recipe's settings; then the schedule over it."""
    section = settings.optimizer
    check_optimizer(section)
    kind = resolve(section["_component_"], key="optimizer._component_")
    if kind is TorchAOCPUOffloadOptimizer and not is_here(device):
        return  # it takes parameters of an accelerator alone
    # On an accelerator ours would page-lock host memory.
    named = _stand_ins(
        model, device if is_here(device) and kind is not OffloadOptimizer else torch.device("cpu"), dtype
    )
    if model is None:
        section = section.copy()
        for patterns in ("offload_states", "param_groups"):  # on names that are not known
            section.pop(patterns, None)
    optimizer = instantiate(section, named)
    check_training(
        optimizer,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        clip_grad_norm=settings.clip_grad_norm,
    )
    with contextlib.suppress(LocalModuleError):
        if settings.lr_scheduler is not None and is_known(settings.lr_scheduler, tree):
            build_scheduler(settings.lr_scheduler, optimizer, NUM_STEPS)


def _stand_ins(model: nn.Module | None, device: torch.device, dtype: torch.dtype) -> _Named:
    """Small parameters with names, dimensions and dtypes of those that train; large ones still count as large."""
    if model is None:
        return [("weight", nn.Parameter(torch.zeros(4, LARGE // 4, dtype=dtype, device=device)))]
    named = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            named.append((clean_name(name), stand_in(param, device)))
    return named


def _check_imports(section: DictConfig, key: str) -> None:
    """Refuse a component whose constructor imports what is not installed.

    A metric logger is not built for that: it would start a run.
    """
    path = section["_component_"]
    component: Any = resolve(path, key=f"{key}._component_")
    function = component.__init__ if inspect.isclass(component) else component
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return
    for name in _imports(tree):
        try:
            importlib.import_module(name)
        except ImportError as error:
            package = (getattr(error, "name", None) or name).partition(".")[0]
            raise UserError(
                f"{key}: {path} imports {name}, and that fails ({type(error).__name__}: {error}): pip install "
                f"{package}, or choose another {key}"
            ) from error


def _imports(node: ast.AST) -> Iterator[str]:
    """Modules that the code imports, but for those that it can do without."""
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
    is_optional = isinstance(node, ast.Try) and not all(
        any(isinstance(inner, ast.Raise) for inner in ast.walk(handler)) for handler in node.handlers
    )
    if not is_optional:
        for child in ast.iter_child_nodes(node):
            yield from _imports(child)
