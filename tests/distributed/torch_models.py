"""The models, and the ways to shard and to train them, of PyTorch's own tests of ``fully_shard``.

Sources: the models of ``torch.testing._internal``; what is done with them is that of
https://github.com/pytorch/pytorch/tree/main/test/distributed/_composable/fsdp (test_fully_shard_training.py,
test_fully_shard_frozen.py, test_fully_shard_mixed_precision.py, test_fully_shard_autograd.py and
test_fully_shard_comm.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard
from torch.testing._internal.common_dist_composable import CompositeParamModel
from torch.testing._internal.common_fsdp import MLP, DoubleLinear, MLPStack
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer, TransformerBlock

# Importing torch.testing forbids everyone in the process to set torch.backends' flags.
torch.backends.__allow_nonbracketed_mutation_flag = True  # type: ignore[attr-defined]

DIM = 8

Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """A model, and how it is trained.

    Attributes:
        build: makes it and shards it.
        loss: of the model and its input.
        width: of the input; 0 for tokens.
        before: called before each micro-batch, with the model, the step and whether it is the last micro-batch.
        accumulation: micro-batches of a step.
        is_scaled: losses are scaled, and gradients unscaled, by torch.amp.GradScaler.
        groups: parameter groups; by default one of all parameters.
    """

    build: Callable[[], Any]
    loss: Loss = lambda model, x: model(x).float().sum()
    width: int = DIM
    before: Callable[[Any, int, bool], object] = lambda model, step, is_last: None
    accumulation: int = 1
    is_scaled: bool = False
    groups: Callable[[Any], list[Any]] = lambda model: list(model.named_parameters())


def each(model: Any, modules: Any = None, **options: Any) -> Any:
    for module in model if modules is None else modules:
        fully_shard(module, **options)
    return fully_shard(model, **options)


def mlps(count: int = 3, **options: Any) -> nn.Sequential:
    return nn.Sequential(*(MLP(DIM, **options) for _ in range(count)))


def linears(*shapes: tuple[int, int]) -> nn.Sequential:
    modules: list[nn.Module] = []
    for rows, columns in shapes:
        modules += [nn.Linear(rows, columns), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def by_the_largest(model: Any) -> Any:
    def largest(param: nn.Parameter) -> Shard:
        return Shard(max(range(param.dim()), key=lambda dim: param.shape[dim]))

    for module in model:
        if isinstance(module, nn.Linear):
            fully_shard(module, shard_placement_fn=largest)
    return fully_shard(model, shard_placement_fn=largest)


def transformer(**args: Any) -> Any:
    model = Transformer(ModelArgs(n_layers=3, dropout_p=0.0, **args))
    blocks = [module for module in model.modules() if isinstance(module, TransformerBlock)]
    return each(model, blocks)


class MultiForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(DIM, DIM), nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x) + self.inner(x))


def shared_modules() -> Any:
    """The same module in two places, and a parameter of two modules."""
    model = mlps(4)
    model[2] = model[0]
    model[3].in_proj.weight = model[1].in_proj.weight
    model[0] = fully_shard(model[0])
    return fully_shard(model)


class OneOutput(nn.Module):
    """Of two outputs, one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = DoubleLinear(DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)[0])


class Sometimes(nn.Module):
    """A branch that not every step, and not every rank, uses."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.branch, self.uses = MLP(DIM), MLP(DIM), True

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        return self.branch(x) if self.uses else x


def sometimes(model: Any, step: int, is_last: bool) -> None:
    model.uses = step % 2 == 0


def frozen(model: Any, *, across: bool) -> Any:
    """Biases, or every other layer."""
    for index, mlp in enumerate(model):
        for name, param in mlp.named_parameters():
            if index % 2 == 0 if across else name.endswith("bias"):
                param.requires_grad_(False)
    return each(model)


class Thawing:
    """Freezes a layer in every other step."""

    def __call__(self, model: Any, step: int, is_last: bool) -> None:
        model[0].requires_grad_(step % 2 == 1)


def ignoring() -> Any:
    model = mlps()
    ignored = {model[1].out_proj.bias}
    for mlp in model:
        fully_shard(mlp, ignored_params=ignored)
    return fully_shard(model, ignored_params=ignored)


def plain_apart(model: Any) -> list[Any]:
    """torch's fused kernels take DTensors or others, not both."""
    named = list(model.named_parameters())
    is_shared = [hasattr(param, "device_mesh") for _, param in named]
    shared = [entry for entry, distributed in zip(named, is_shared, strict=True) if distributed]
    return [{"params": shared}, {"params": [entry for entry in named if entry not in shared]}]


def norms_in_fp32() -> Any:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, DIM))
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    fully_shard(model[1], mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    for linear in (model[0], model[2]):
        fully_shard(linear, mp_policy=low)
    return fully_shard(model, mp_policy=low)


def mixed(param: torch.dtype | None, reduce: torch.dtype | None, **options: Any) -> Any:
    return each(mlps(), mp_policy=MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, **options))


def accumulating(model: Any, step: int, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)


def replicas_last(model: Any, step: int, is_last: bool) -> None:
    model.set_requires_all_reduce(is_last)


def kept_between(model: Any, step: int, is_last: bool) -> None:
    model.set_reshard_after_backward(is_last)
    model.set_is_last_backward(is_last)


def hsdp(**options: Any) -> Any:
    shape = (2, torch.distributed.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return each(mlps(), mesh=mesh, **options)


def told(model: Any, **choices: Any) -> Any:
    """Calls the model's setters."""
    for name, value in choices.items():
        getattr(model, name)(value)
    return model


def ahead() -> Any:
    """Explicit prefetching, forward and backward, by more than one layer."""
    model = each(mlps(5))
    layers = list(model)
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 3])
        layer.set_modules_to_backward_prefetch(layers[max(index - 2, 0) : index][::-1])
    return model


def unsharded_by_hand(model: Any, step: int, is_last: bool) -> None:
    for module in list(model):
        module.unshard(async_op=True)


class OwnMethod(nn.Module):
    """What is called is not ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = MLP(DIM), nn.Linear(DIM, 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


def own_method() -> Any:
    model = OwnMethod()
    fully_shard(model.body)
    fully_shard(model)
    register_fsdp_forward_method(model, "encode")
    return model


def replicated() -> Any:
    model = mlps()
    for mlp in model:
        replicate(mlp)
    return replicate(model)


def every_other(model: Any, step: int, is_last: bool) -> None:
    model.alone = step % 2 == 1


def part_alone(model: Any, x: Tensor) -> Tensor:
    """A module that is not the root, beside the root or by itself."""
    whole = 0.0 if model.alone else model(x).sum()
    return whole + model[0](x).sum()


SUBJECTS: dict[str, Subject] = {
    "MLPs": Subject(lambda: each(mlps())),
    "MLPs, kept after forward": Subject(lambda: each(mlps(), reshard_after_forward=False)),
    "uneven": Subject(lambda: each(MLPStack(7)), width=7),
    "single group, uneven": Subject(lambda: fully_shard(linears((7, 15), (15, 3))), width=7),
    "largest dimension": Subject(lambda: by_the_largest(linears((8, 16), (16, 8), (8, 4)))),
    "transformer": Subject(lambda: transformer(weight_tying=False), width=0),
    "transformer, tied": Subject(lambda: transformer(weight_tying=True), width=0),
    "transformer, checkpointed": Subject(lambda: transformer(checkpoint_activations=True), width=0),
    "checkpointed": Subject(lambda: each(nn.Sequential(*map(checkpoint, mlps())))),
    "multi-forward": Subject(lambda: (lambda model: each(model, [model.inner]))(MultiForward())),
    "shared modules": Subject(shared_modules),
    "unused module": Subject(lambda: each(nn.Sequential(DoubleLinear(DIM, False), nn.Linear(DIM, DIM)))),
    "unused output": Subject(lambda: (lambda model: each(model, [model.first]))(OneOutput())),
    "unused now and then": Subject(lambda: (lambda m: each(m, [m.always, m.branch]))(Sometimes()), before=sometimes),
    "composite": Subject(
        lambda: (lambda m: each(m, [m.u1, m.u2]))(CompositeParamModel(torch.device("cpu"))), width=100
    ),
    "non-root": Subject(lambda: each(mlps()), part_alone, before=every_other),
    "frozen biases": Subject(lambda: frozen(mlps(), across=False)),
    "frozen layers": Subject(lambda: frozen(mlps(), across=True)),
    "frozen now and then": Subject(lambda: each(mlps()), before=Thawing()),
    "ignored": Subject(ignoring, groups=plain_apart),
    "bf16 parameters": Subject(lambda: each(mlps().bfloat16()), lambda model, x: model(x.bfloat16()).float().sum()),
    "param bf16": Subject(lambda: mixed(torch.bfloat16, None)),
    "param bf16, reduce fp32": Subject(lambda: mixed(torch.bfloat16, torch.float32)),
    "reduce bf16": Subject(lambda: mixed(None, torch.bfloat16)),
    "output fp32": Subject(lambda: mixed(torch.bfloat16, torch.bfloat16, output_dtype=torch.float32)),
    "norms fp32": Subject(norms_in_fp32),
    "fp16, scaled": Subject(lambda: mixed(torch.float16, torch.float16), is_scaled=True),
    "no sync": Subject(lambda: each(mlps()), before=accumulating, accumulation=3),
    "no sync, param bf16": Subject(lambda: mixed(torch.bfloat16, torch.float32), before=accumulating, accumulation=2),
    "kept between micro-batches": Subject(lambda: each(mlps()), before=kept_between, accumulation=2),
    "HSDP": Subject(hsdp),
    "HSDP, all-reduced last": Subject(hsdp, before=replicas_last, accumulation=2),
    "HSDP, reduce bf16": Subject(lambda: hsdp(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))),
    "divided": Subject(lambda: told(each(mlps()), set_gradient_divide_factor=3.0)),
    "summed": Subject(lambda: told(each(mlps()), set_force_sum_reduction_for_comms=True)),
    "two buffers": Subject(lambda: told(each(mlps()), set_reduce_scatter_max_input_buffers=2)),
    "own group": Subject(lambda: told(each(mlps()), set_separate_reduce_scatter_group=True)),
    "zeros for unused": Subject(
        lambda: told((lambda m: each(m, [m.always, m.branch]))(Sometimes()), set_reduce_scatter_unused_params=True),
        before=sometimes,
    ),
    "prefetched": Subject(ahead),
    "unsharded by hand": Subject(lambda: each(mlps()), before=unsharded_by_hand),
    "own method": Subject(own_method, lambda model, x: model(x).sum() + model.encode(x).sum()),
    "replicated": Subject(replicated),
    "kept for two": Subject(lambda: each(mlps(), reshard_after_forward=2)),
}

YOUNGER = {
    "two buffers": "set_reduce_scatter_max_input_buffers",
    "own group": "set_separate_reduce_scatter_group",
    "zeros for unused": "set_reduce_scatter_unused_params",
}
"""Of FSDP2, what torch 2.11 does not have."""

for name, method in YOUNGER.items():
    if not hasattr(FSDPModule, method):
        del SUBJECTS[name]

OF_FOUR = {"kept for two"}
"""On two ranks it is what another is."""


def inputs(subject: Subject, step: int, micro: int) -> Tensor:
    """Of this rank."""
    seed = 1000 * step + 10 * micro + torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(seed)
    if subject.width:
        return torch.randn(4, subject.width, generator=generator)
    return torch.randint(8, (2, 6), generator=generator)
