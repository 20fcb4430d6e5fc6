"""Adam and AdamW whose state is packed: :class:`AdamW`, :class:`Adam`."""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from offload.optim import codes, cpu, gpu, interchange
from offload.optim.formats import (
    BLOCK,
    MASTERS,
    STATE_BLOCK,
    STATE_DTYPES,
    Constants,
    Item,
    Kind,
    flat,
    is_dense,
    param_kind,
    random_key,
    state_dtype_of,
    state_spec,
    tensor_key,
)

Group = dict[str, Any]

OWN_OPTIONS = ("state_dtype", "master")
"""What a group keeps when a state is loaded: an optimizer's format is its own, a loaded state is converted."""


class Adam(torch.optim.Optimizer):
    """Adam (https://arxiv.org/abs/1412.6980) with 2 to 8 bytes of state per parameter, an exact master included.

    ============ ========== ========== ==============================================================================
    state_dtype  master     bytes      of state per bf16 parameter, beside the parameter's own 2
    ============ ========== ========== ==============================================================================
    fp32         split      10         as fp32 Adam, with its own fp32 parameters
    bf16         split      6
    int8         split      4.03       moments in blocks of 256 that share a scale
    int8         split24    3.03       the master has 24 bits, their expectation is exact
    int8         stochastic 2.03       the parameter keeps 8 bits of precision; their expectation is exact
    int8         none       2.03       changes below 1/256 of a weight are lost, as with torch.optim.AdamW in bf16
    ============ ========== ========== ==============================================================================

    With ``split``, a bf16 parameter is the upper half of an fp32 master weight, whose lower half lies beside the
    moments; with ``split24`` only the upper 8 bits of that do, rounded stochastically. fp32 parameters are their own
    master. A parameter that is changed elsewhere keeps its remainder, which moves the master by less than the
    parameter's own rounding. Every result is a function of parameters, gradients,
    hyperparameters and ``seed`` alone: neither threads, nor the ranges that a tensor is updated in, nor the device
    change a bit.

    With fp32 moments, the operations are those of ``torch.optim.Adam(fused=True)`` on fp32 parameters, in their order,
    each rounded on its own. Stock wheels of torch round a product and a sum once (fused multiply-add) on GPUs and on
    CPUs with AVX2 or AVX-512, so that last bits differ there: after 50 steps of AdamW, weights by up to two units in
    the last place of the tensor's largest, moments by up to two of theirs. Without it (``ATEN_CPU_CAPABILITY=default``)
    results equal torch's to the last bit.

    Args:
        params: parameters, groups or named parameters; fp32 or bf16, dense.
        lr: learning rate, a float or a 0-dim tensor.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: added to the gradient, as a multiple of the parameter.
        amsgrad: is not supported; False.
        maximize: ascend.
        state_dtype: of both moments: ``fp32``, ``bf16`` or ``int8``.
        master: what keeps the changes of a bf16 parameter that are too small for it: ``none``, ``stochastic``
            rounding, ``split`` or ``split24``.
        seed: of the random bits that round bf16 second moments, ``stochastic`` parameters and ``split24`` masters.

    ``state_dtype`` and ``master``, like the hyperparameters, may differ between groups.

    Raises:
        ValueError: for a value out of range, a name that is not one of those above, or parameters of another dtype.
    """

    per_parameter = True
    elementwise = True
    same_on_every_device = True
    folds_gradient_scale = True
    owns_loaded_states = True
    state_block: Mapping[str, int] = STATE_BLOCK

    _step_supports_amp_scaling = True
    _coupled = True

    gradient_scale: Tensor | None = None
    """0-dim factor for the gradients of the next steps, applied by the update itself; None for 1."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        state_dtype: Literal["fp32", "bf16", "int8"] = "int8",
        master: Literal["none", "stochastic", "split", "split24"] = "split",
        seed: int = 0,
    ) -> None:
        options = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "state_dtype": state_dtype,
            "master": master,
            "seed": seed,
        }
        super().__init__(params, options)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as :meth:`torch.optim.Optimizer.add_param_group` does, whose options may differ."""
        super().add_param_group(param_group)
        try:
            self._check_group(len(self.param_groups) - 1, self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise
        # What states have stays as it is when betas change.
        self.param_groups[-1]["codes"] = codes.best_for(float(self.param_groups[-1]["betas"][1]))
        self._prepare(self.param_groups[-1])

    def _prepare(self, group: Group) -> None:
        """Compile and try what updates the group's parameters where they are."""
        kinds: dict[torch.device, set[Kind]] = defaultdict(set)
        for param in group["params"]:
            if param.device.type != "cpu":
                kinds[param.device].add(_kind(_as_for(param, group), param.dtype, self._coupled))
        for device, those in kinds.items():
            gpu.prepare(device, those)

    def _check_group(self, index: int, group: Group) -> None:
        name = type(self).__name__
        if group["amsgrad"]:
            raise ValueError(f"amsgrad=True: {name} keeps no third moment; set amsgrad=False or use torch.optim.{name}")
        for key, known in (("state_dtype", STATE_DTYPES), ("master", MASTERS)):
            if group[key] not in known:
                near = difflib.get_close_matches(str(group[key]), known, n=1, cutoff=0.0)[0]
                raise ValueError(f"{key}={group[key]!r}: expected one of {', '.join(known)}; did you mean {near}?")
        limits = {"lr": math.inf, "eps": math.inf, "weight_decay": math.inf}
        values = {key: float(group[key]) for key in limits}
        values |= {f"betas[{i}]": float(beta) for i, beta in enumerate(group["betas"])}
        for key, value in values.items():
            limit = limits.get(key, 1.0)
            if not 0.0 <= value < limit:
                raise ValueError(f"{key}={value}: expected at least 0 and less than {limit}")
        for position, param in enumerate(group["params"]):
            if param.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(
                    f"parameter {position} of group {index} is {param.dtype}: {name} takes torch.float32 and "
                    f"torch.bfloat16; convert the model, or use torch.optim.{name}"
                )

    # Update

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; one call of a kernel for all of them.

        A ``torch.amp.GradScaler`` hands its scale over, which the update applies, and a gradient that is not
        finite leaves parameters and states alone. Whether there is one is read on the host, which waits for it; so
        is a ``lr`` on a device.

        ``torch.compile`` leaves the update as it is.

        Raises:
            RuntimeError: for a sparse gradient, or while a CUDA graph is captured.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None or not found_inf.item():
            self._update()
        return loss

    # What torch.compile made of it would be rounded in other places.
    @torch._disable_dynamo
    def _update(self) -> None:
        trained, steps, position = [], [], 0
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                grad = param.grad
                if grad is not None:
                    if grad.layout != torch.strided:
                        raise RuntimeError(
                            f"{type(self).__name__} does not support sparse gradients; build the embedding with "
                            "sparse=False"
                        )
                    state = self._state_of(param, group)
                    trained.append((index, position, param, grad, state))
                    steps.append(state["step"])
                position += 1
        if not trained:
            return
        self._refuse_capture()
        # A Python number would be made a tensor for each of them, which takes most of the time.
        torch._foreach_add_(steps, torch.tensor(1.0, dtype=torch.float32, device="cpu"), alpha=1.0)
        scale, factor = self._scale(), 1.0
        if scale is not None and "cpu" in {scale.device.type, *(param.device.type for _, _, param, _, _ in trained)}:
            factor, scale = float(scale), None
        plans: dict[tuple[int, float, bool], _Plan] = {}
        copied: list[tuple[Tensor, Tensor]] = []
        by_device: dict[torch.device, list[Item]] = defaultdict(list)
        for (index, position, param, grad, state), step in zip(trained, steps, strict=True):
            key = index, step.item(), "exp_avg_scale" in state
            plan = plans.get(key)
            if plan is None:
                group = _as_for(param, self.param_groups[index])
                plan = plans[key] = _Plan(group, int(key[1]), self._coupled, factor)
            by_device[param.device].append(plan.item(param, grad, state, position, copied))
        for device, items in by_device.items():
            if device.type == "cpu":
                cpu.update(items)
            else:
                gpu.update(items, scale)
        for target, source in copied:
            target.copy_(source)

    def _refuse_capture(self) -> None:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self).__name__}.step() cannot be captured in a CUDA graph, which would repeat one step's "
                "number, learning rate and random bits: capture forward and backward, and step outside of the graph"
            )

    def _state_of(self, param: Tensor, group: Group) -> dict[str, Any]:
        state = self.state[param]
        if not state:
            # Whatever the default dtype is: bf16 counts to 256 only.
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state_dtype = state_dtype_of(param, group["state_dtype"])
            spec = state_spec(param.dtype, param.numel(), state_dtype, group["master"])
            for key, dtype in spec.items():
                if key in STATE_BLOCK:
                    like = param.new_empty(-(-param.numel() // BLOCK), dtype=dtype)
                else:
                    like = torch.empty_like(param, dtype=dtype)
                if like.device.type == "cpu":
                    cpu.advise_huge_pages(like)
                state[key] = like.zero_()
        return state

    def _scale(self) -> Tensor | None:
        """What the gradients are multiplied with: the engine's factor, over that of a GradScaler."""
        scale, grad_scale = self.gradient_scale, getattr(self, "grad_scale", None)
        if grad_scale is None:
            return scale
        inverse = grad_scale.double().reciprocal().float()
        if scale is None:
            return inverse
        # Of two devices; a number on the host is an argument of the product's kernel, which waits for nothing.
        if "cpu" not in (scale.device.type, inverse.device.type):
            scale = scale.to(inverse.device)
        return inverse * scale

    # States

    def load_state_dict(self, state_dict: Mapping[str, Any], states_on: torch.device | None = None) -> None:
        """Load a state of any format: of this class, or of torch.optim.AdamW and Adam.

        States are converted to the format that this optimizer was built with, which therefore stays as it is.
        Where the saved state has fp32 ``master`` weights (see :func:`offload.optim.from_plain`) and this one keeps
        a remainder, parameters have to have their values already.

        Args:
            state_dict: what ``state_dict()`` gave.
            states_on: where loaded states go; each parameter's own device by default.

        Raises:
            ValueError: where groups, shapes or masters do not fit.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)  # type: ignore[arg-type]
            state_dict = state_dict if replaced is None else replaced
        state, groups = interchange.loaded(state_dict, self.param_groups, OWN_OPTIONS, states_on)
        for index, group in enumerate(groups):
            self._check_group(index, group)
        self.__setstate__({"state": state, "param_groups": groups})
        for group in groups:
            self._prepare(group)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


class AdamW(Adam):
    """Adam with decoupled weight decay (https://arxiv.org/abs/1711.05101); all else as :class:`Adam`.

    Args:
        weight_decay: each step shrinks the parameter by ``lr * weight_decay`` of itself.
    """

    _coupled = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        state_dtype: Literal["fp32", "bf16", "int8"] = "int8",
        master: Literal["none", "stochastic", "split", "split24"] = "split",
        seed: int = 0,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            state_dtype=state_dtype,
            master=master,
            seed=seed,
        )


class _Plan:
    """What the tensors of one group at one step number, with one factor of the gradients, have in common."""

    def __init__(self, group: Group, step: int, coupled: bool, factor: float) -> None:
        self._constants = _constants(group, step, coupled, factor)
        state_dtype, master = group["state_dtype"], group["master"]
        self._kinds = {dtype: _kind(group, dtype, coupled) for dtype in (torch.float32, torch.bfloat16)}
        seed = group["seed"]
        self._param_key = random_key(seed, step, 0) if master in ("stochastic", "split24") else None
        self._is_coded = state_dtype == "int8"
        self._v_key = random_key(seed, 0 if self._is_coded else step, 1) if state_dtype != "fp32" else None
        self._walked = codes.GOLDEN_RATIO * step
        self._is_random = self._param_key is not None or self._v_key is not None

    def item(
        self,
        param: Tensor,
        grad: Tensor,
        state: Mapping[str, Any],
        position: int,
        copied: list[tuple[Tensor, Tensor]],
    ) -> Item:
        """What a kernel needs to know of the parameter at a position over all groups.

        ``copied`` gains what is updated in a copy: a parameter that is not dense, tensors that begin within a block.
        """
        values = param
        is_contiguous = param.is_contiguous()
        if not is_contiguous and not is_dense(param):
            values = param.contiguous()
            copied.append((param, values))
        is_alike = grad.is_contiguous() if is_contiguous else grad.stride() == values.stride()
        dtype = param.dtype
        if not is_alike or grad.dtype != dtype:
            grad = torch.empty_like(values).copy_(grad)
        position, start = getattr(param, "offload_range", (position, 0))
        item = Item(
            self._kinds[dtype],
            values,
            grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            state.get("exp_avg_scale"),
            state.get("exp_avg_sq_scale"),
            state.get("remainder"),
            start,
            *(self._keys(position) if self._is_random else (0, 0)),
            self._constants,
        )
        lead = 0 if self._is_coded else start % BLOCK
        return item if lead == 0 else _from_block(item, lead, copied) if self._is_random else item._replace(start=0)

    def _keys(self, position: int) -> tuple[int, int]:
        """``key_param`` and ``key_v``; 0 where nothing is random."""
        key_param = 0 if self._param_key is None else tensor_key(self._param_key, position)
        key_v = 0 if self._v_key is None else tensor_key(self._v_key, position)
        return key_param, (key_v + self._walked) & 0xFFFFFFFF if self._is_coded else key_v


def _kind(group: Group, dtype: torch.dtype, coupled: bool) -> Kind:
    """Which loop updates a group's parameters of one dtype."""
    return Kind(param_kind(dtype, group["master"]), group["state_dtype"], coupled and bool(group["weight_decay"] != 0))


def _constants(group: Group, step: int, coupled: bool, factor: float) -> Constants:
    """In double precision; see :class:`Constants`."""
    lr, eps, weight_decay = float(group["lr"]), group["eps"], group["weight_decay"]
    beta1, beta2 = map(float, group["betas"])
    bc2_sqrt = math.sqrt(1 - beta2**step)
    step_size = lr / (1 - beta1**step)
    is_folded, has_ratios = group["state_dtype"] != "fp32", group["codes"] == codes.RATIOS
    is_corrected = has_ratios and group["state_dtype"] == "int8"
    return Constants(
        gscale=-factor if group["maximize"] else factor,
        l2=weight_decay if coupled else 0.0,
        decay=1.0 if coupled else 1 - lr * weight_decay,
        beta1=beta1,
        w1=1 - beta1,
        beta2=beta2,
        w2=1 - beta2,
        eps=eps * bc2_sqrt if is_folded else eps,
        step_size=step_size * bc2_sqrt if is_folded else step_size,
        bc2_sqrt=bc2_sqrt,
        eps_before=eps * math.sqrt(1 - beta2 ** (step - 1)),
        has_ratios=float(has_ratios),
        ahead=lr * bc2_sqrt * codes.ahead(beta1) if is_corrected else 0.0,
    )


def _as_for(param: Tensor, group: Group) -> Group:
    """A group whose ``state_dtype`` is that of one of its parameters."""
    state_dtype = state_dtype_of(param, group["state_dtype"])
    return group if state_dtype == group["state_dtype"] else {**group, "state_dtype": state_dtype}


def _from_block(item: Item, lead: int, copied: list[tuple[Tensor, Tensor]]) -> Item:
    """An item over copies behind ``lead`` elements that are nobody's, so that it begins where a block does.

    ``copied`` gains them, ahead of copies that they are copies of.
    """
    copies = {}
    for name in ("param", "grad", "exp_avg", "exp_avg_sq", "remainder"):
        tensor = getattr(item, name)
        if tensor is not None:
            copies[name] = tensor.new_zeros(lead + tensor.numel())
            copies[name][lead:] = flat(tensor)
            if name != "grad":
                copied.insert(0, (flat(tensor), copies[name][lead:]))
    return item._replace(start=item.start - lead, **copies)
