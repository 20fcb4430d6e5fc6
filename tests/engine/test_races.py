"""Every wait of the engine is needed: taken out one at a time, each makes a scenario on the simulated accelerator fail.

The waits are found in the source, so that one that is added later has to be shown to be needed, too.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload.auto
import offload.engine.accumulation
import offload.engine.both
import offload.engine.copy_on_write
import offload.engine.engine
import offload.engine.fsdp
import offload.engine.gradients
import offload.engine.host
import offload.engine.in_flight
import offload.engine.memory
import offload.engine.model
import offload.engine.norms
import offload.engine.pipeline
import offload.engine.shards
import offload.engine.stream
import offload.engine.worker
import offload.optimizer
from offload import OffloadOptimizer
from offload.engine.runtime import DONE
from offload.simulation.accelerator import SimulatedAccelerator

# ---- the waits, and the engine without one of them

MODULES = (
    offload.engine.stream,
    offload.engine.host,
    offload.engine.pipeline,
    offload.engine.worker,
    offload.engine.in_flight,
    offload.engine.memory,
    offload.engine.accumulation,
    offload.engine.engine,
    offload.engine.model,
    offload.engine.fsdp,
    offload.engine.norms,
    offload.engine.gradients,
    offload.engine.shards,
    offload.engine.both,
    offload.engine.copy_on_write,
    offload.auto,
    offload.optimizer,
)

WAITING = {
    "drain",
    "join",
    "settle",
    "_settle",
    "synchronize",
    "wait",
    "_wait",
    "_wait_for",
    "wait_for_all",
    "_wait_for_all",
}
"""What a wait calls, as a statement. (A Signal's ``wait`` is left by leaving its loop.)"""

REMOVED = "_removed_event"


@dataclass
class Wait:
    """One wait in the source.

    Attributes:
        function: the outermost function that it is in.
        remove: takes it out of the module's tree that it was found in.
    """

    module: ModuleType
    name: str
    function: ast.FunctionDef
    tree: ast.Module
    remove: Callable[[], None]


def find_waits(module: ModuleType) -> list[Wait]:
    """All in one tree: after one is removed, only those of another call are of use."""
    return list(_find(module, _parse(module)))


@functools.cache
def _source(module: ModuleType) -> str:
    return Path(inspect.getsourcefile(module) or "").read_text()


def _parse(module: ModuleType) -> ast.Module:
    return ast.parse(_source(module))


def _find(module: ModuleType, tree: ast.Module) -> Iterator[Wait]:
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    seen: Counter[str] = Counter()
    for node in ast.walk(tree):
        for what, remove in [*_blocking(node, parents), *_handed_on(node, parents), *_ordering(node, parents)]:
            path: list[Any] = [node]
            while path[-1] in parents:
                path.append(parents[path[-1]])
            scopes = [scope for scope in reversed(path) if isinstance(scope, (ast.ClassDef, ast.FunctionDef))]
            functions = [scope for scope in scopes if isinstance(scope, ast.FunctionDef)]
            where = f"{Path(module.__file__ or '').name}:{'.'.join(scope.name for scope in scopes)}:{what}"
            seen[where] += 1
            name = where if seen[where] == 1 else f"{where}#{seen[where]}"
            yield Wait(module, name, functions[0], tree, remove)


Found = Iterator[tuple[str, Callable[[], None]]]


def _blocking(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Found:
    """Calls that block a thread or a stream."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    called, receiver = node.func.attr, node.func.value
    text = ast.unparse(node)
    if called == "arrived" and not node.keywords:
        yield text, lambda: _put(parents, node, ast.Name(REMOVED, ast.Load()))
    if called not in WAITING or isinstance(receiver, ast.Constant):
        return
    statement = parents[node]
    if called == "wait" and ast.unparse(receiver).endswith("_signal"):
        loop: Any = statement
        while not isinstance(loop, ast.While):
            loop = parents[loop]
        yield f"while {ast.unparse(loop.test)}: wait", lambda: _put(parents, statement, ast.Break())
    elif isinstance(statement, ast.Expr) and isinstance(receiver, ast.Call):
        yield text, lambda: _put(parents, node, receiver)  # what made the event is still called
    else:
        yield text, lambda: _put(parents, node, ast.Constant(None))


def _handed_on(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Found:
    """Waits given to somebody else to call, and the calls of those."""
    parent = parents.get(node)
    if isinstance(node, ast.Attribute) and node.attr in WAITING:
        owner = parents[parent] if isinstance(parent, ast.keyword) else parent
        is_argument = isinstance(owner, ast.Call) and owner.func is not node
        if is_argument and ast.unparse(owner.func) != "ModelWaits":  # whose own calls are found
            nothing = ast.parse("lambda *_: None", mode="eval").body
            yield f"{ast.unparse(owner.func)}({ast.unparse(node)})", lambda: _put(parents, node, nothing)
    if isinstance(node, ast.Call) and ast.unparse(node) == "call(module)":
        yield "call(module)", lambda: _put(parents, node, ast.Constant(None))


def _ordering(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Found:
    """Events behind which a copy is queued."""
    if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("_runtime.copy")):
        return
    after: Any = next((keyword.value for keyword in node.keywords if keyword.arg == "after"), None)
    if after is None and len(node.args) > 3:
        after = node.args[3]
    if isinstance(after, ast.Name):
        function: Any = node
        while not isinstance(function, ast.FunctionDef):
            function = parents[function]
        assigned = [
            s for s in ast.walk(function) if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == after.id
        ]
        assert len(assigned) == 1, f"{after.id} of {ast.unparse(node)}: write it as one tuple"
        after = assigned[0].value
    assert isinstance(after, ast.Tuple), f"{ast.unparse(node)}: write the events as one tuple"
    for event in after.elts:
        yield f"after[{ast.unparse(event)}]", functools.partial(_drop_event, parents, event)


def _drop_event(parents: dict[ast.AST, ast.AST], event: ast.expr) -> None:
    """The event is made, and not waited for."""
    both = ast.Tuple([event, ast.Constant(None)], ast.Load())
    _put(parents, event, ast.Subscript(both, ast.Constant(1), ast.Load()))


def _put(parents: dict[ast.AST, ast.AST], old: ast.AST, new: ast.AST) -> None:
    for name, value in ast.iter_fields(parents[old]):
        if value is old:
            setattr(parents[old], name, new)
        elif isinstance(value, list) and old in value:
            value[value.index(old)] = new
    ast.copy_location(new, old)


def without(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one wait out of the running engine."""
    (wait,) = [each for each in find_waits(wait.module) if each.name == wait.name]
    wait.remove()
    ast.fix_missing_locations(wait.tree)
    line = min([wait.function.lineno, *(decorator.lineno for decorator in wait.function.decorator_list)])
    code = compile(wait.tree, _source_name(wait.module), "exec")
    mutated = next(c for c in _codes(code) if (c.co_name, c.co_firstlineno) == (wait.function.name, line))
    function = next(
        f for f in _functions(wait.module) if (f.__name__, f.__code__.co_firstlineno) == (mutated.co_name, line)
    )
    monkeypatch.setitem(function.__globals__, REMOVED, DONE)
    monkeypatch.setattr(function, "__code__", mutated)


def _source_name(module: ModuleType) -> str:
    return f"{module.__file__}"


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """All functions of a module and methods of its classes, without their decorators."""
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    members = [member for value in own if isinstance(value, type) for member in vars(value).values()]
    for member in [*own, *members]:
        candidates = [member.fget, member.fset] if isinstance(member, property) else [member]
        for candidate in candidates:
            candidate = getattr(candidate, "__func__", candidate)  # of a class method
            function = inspect.unwrap(candidate) if callable(candidate) else None
            if isinstance(function, FunctionType):
                yield function


WAITS = [wait for module in MODULES for wait in find_waits(module)]

# ---- scenarios


class Watched(SimulatedAccelerator):
    """Also checks what waits are there to bound: memory, and how early the order of copies is decided."""

    def __init__(self, order: Any) -> None:
        super().__init__(order="late" if order == "pauses" else order)
        self.has_pauses = order == "pauses"
        self.running = 0
        self._ring: set[int] = set()
        self._under_way: list[tuple[str, str, Any]] = []

    def empty_device(self, nbytes: int) -> Tensor:
        buffer = super().empty_device(nbytes)
        self._ring.add(buffer.untyped_storage().data_ptr())
        return buffer

    def copy(self, dst: Tensor, src: Tensor, direction: Any, after: Any = (), name: str = "") -> Any:
        event = super().copy(dst, src, direction, after, name)
        piece, _, what = name.rpartition(" states ")
        if what == "down" and src.untyped_storage().data_ptr() not in self._ring:
            what = "created"
        if what in BOUNDS:
            self._under_way = [*(entry for entry in self._under_way if not entry[2].done), (what, piece, event)]
            pieces = {piece for kind, piece, _ in self._under_way if kind == what}
            assert len(pieces) <= BOUNDS[what], f"states of {len(pieces)} pieces under way: {what}"
        return event

    @contextmanager
    def pause(self) -> Iterator[None]:
        """With order="pauses": threads do all that they can, such as bringing things up ahead, and are late again."""
        if self.has_pauses:
            self.order = "early"
        yield
        if self.has_pauses:
            self.record()
            self.order = "late"

    def start(self, work: Callable[[], None], name: str) -> Any:
        def run() -> None:
            work()
            self.running -= 1

        self.running += 1
        return super().start(run, name)


BOUNDS = {"up": 2, "created": 1}
"""Pieces whose states may be on their way at a time. Those that a first update created lie in no staging buffer."""


class Whole(torch.optim.AdamW):
    """An optimizer of which nothing is known, so that it is stepped once with everything."""


STEPS = 3
WIDTH = 8


class Model(nn.Module):
    """Layers, a tied head, a parameter that no numbered module holds, and a branch that not every step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.branch = nn.Linear(WIDTH, 4 * WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 6, bias=False)
        self.head.weight = self.embed.weight
        self.uses_branch = False
        self.saved: dict[str, Any] = {}

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        if self.uses_branch:
            hidden = hidden + self.branch(hidden).unflatten(-1, (4, WIDTH)).sum(-2)
        return self.head(hidden * self.scale)


@dataclass(frozen=True)
class Scenario:
    """Training, under choices that change when things are done and not what comes out."""

    strategy: str
    in_backward: bool = False
    offload_gradients: bool = False
    attached: bool = False
    accumulation: int = 1
    extra: str = ""
    kwargs: tuple[tuple[str, Any], ...] = field(default=())

    def __str__(self) -> str:
        flags = {
            "in backward": self.in_backward,
            "gradients": self.offload_gradients,
            "model": self.attached,
            f"x{self.accumulation}": self.accumulation > 1,
            self.extra: bool(self.extra),
        }
        return " ".join([self.strategy, *(flag for flag, is_set in flags.items() if is_set)])


def tokens(seed: int) -> Tensor:
    return torch.randint(6, (4,), generator=torch.Generator().manual_seed(seed))


def backward(model: Model, seed: int, temperature: Tensor) -> None:
    nn.functional.cross_entropy(model(tokens(seed)) * temperature, tokens(seed + 100)).backward()


def train(scenario: Scenario, simulator: Watched | None) -> list[Tensor]:
    """What training lets one see: tensors that have to be the same whatever the optimizer.

    Without a simulator, the optimizer is the plain one.
    """
    plain = simulator is None
    torch.manual_seed(0)
    model, extra, kwargs = Model(), scenario.extra, dict(scenario.kwargs)
    if extra == "bf16":
        model.bfloat16()
    for layer in [*model.layers, *model.children()] if extra == "compiled" else ():
        layer._compiled_call_impl = layer._call_impl  # what compile() would put there, without a compiler
    temperature = nn.Parameter(torch.ones((), dtype=model.scale.dtype))  # the model does not have it
    named = [*model.named_parameters(), *([("loss.temperature", temperature)] if extra == "outside" else [])]
    grown = [(name, param) for name, param in named if extra == "grow" and name.startswith("layers.2")]
    params = [(name, param) for name, param in named if (name, param) not in grown]
    if extra == "one piece":
        params = [(name, param) for name, param in named if name.startswith("layers.0")]
    lr = torch.tensor(1e-2) if extra == "change lr" else 1e-2
    if extra == "change lr on the device":
        lr = torch.full((), 1e-2)
    optimizer: Any
    if plain:
        base_class = BASES.get(extra, torch.optim.AdamW)
        optimizer = base_class(params, lr=lr, **({} if base_class is Whole else {"fused": True}))
    else:
        optimizer = OffloadOptimizer(
            params,
            BASES.get(extra, torch.optim.AdamW),
            strategy=scenario.strategy,  # type: ignore[arg-type]
            update_in_backward=scenario.in_backward,
            offload_gradients=scenario.offload_gradients,
            model=model if scenario.attached else None,
            lr=lr,
            **kwargs,
        )
        if extra in SNAPSHOTS:
            optimizer.reserve_snapshot(SNAPSHOTS[extra])
        held = optimizer._machinery.in_flight
        held.limit = BUDGET
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda _: _check_budget(held, scenario))
    seen: list[Tensor] = []
    readers: list[Reader] = []
    for step in range(STEPS):
        model.uses_branch = "branch" in extra and step == 1
        sums: dict[nn.Parameter, Tensor] = {}
        for micro in range(scenario.accumulation):
            is_last = micro == scenario.accumulation - 1
            with nullcontext() if plain or is_last else optimizer.accumulate():
                backward(model, 10 * step + micro, temperature)
                if extra == "drop" and not is_last:
                    backward(model, 10 * step + micro + 4, temperature)  # is added to the first, and dropped with it
                    optimizer.zero_grad()
                    backward(model, 10 * step + micro + 5, temperature)
            if plain and extra == "bf16":  # sums in fp32, rounded once
                for _, param in params:
                    if param.grad is not None:
                        sums[param] = sums.get(param, torch.zeros(())) + param.grad.float()
                        param.grad = None
        for param, total in sums.items():
            param.grad = total.to(param.dtype)
        if extra == "clip":
            clip = functools.partial(torch.nn.utils.clip_grad_norm_, [param for _, param in params])
            seen.append((clip if plain else optimizer.clip_grad_norm_)(0.5))
        if extra == "norm":
            gradients = [param.grad for _, param in params if param.grad is not None]
            seen.append(torch.nn.utils.get_total_norm(gradients, 1.0) if plain else optimizer.grad_norm(1.0))
        if extra == "evaluate before":
            _evaluate(optimizer, model, seen)
        with nullcontext() if simulator is None or step == STEPS - 1 else simulator.pause():
            optimizer.step()
        if extra == "step twice":
            optimizer.step()
        if scenario.attached:
            seen.append(temperature * 2)
        if extra in SNAPSHOTS and step < STEPS - 1:
            readers.append(Reader(optimizer, model, simulator, stops=extra == "snapshot, given up" and step == 0))
        AFTER_STEP.get(extra.partition(", then ")[2] or extra, lambda *_: None)(optimizer, model, seen)
        if grown and step == 0:
            optimizer.add_param_group({"params": grown})
        if extra == "zeroing":
            optimizer.zero_grad(set_to_none=False)
        elif extra != "keep":
            optimizer.zero_grad()
    for reader in readers:
        seen += reader.result()
    if extra == "close" and simulator is not None:
        running = simulator.running
        optimizer._machinery.engine.gradients.close()
        assert simulator.running == running - 1, "the thread that adds gradients runs on"
    if extra == "delete":
        del optimizer
        return [*seen, model.scale * 2, model(tokens(0)).detach()]
    if scenario.attached and not plain:
        optimizer.synchronize()
    seen += [param.detach() * 2 for _, param in named]
    _read_state(optimizer, model, seen)
    if simulator is not None:
        simulator.finish()  # what was read is freed with the optimizer
    return seen


class Reader:
    """Reads parameters and states as they are now, beside what comes next.

    Args:
        simulator: None for a plain optimizer, of which they are copied at once.
        stops: it gives up in the middle.
    """

    def __init__(self, optimizer: Any, model: Model, simulator: Watched | None, *, stops: bool) -> None:
        self._read: list[Tensor] = []
        if simulator is None:
            self._read = [tensor.clone() for tensor in self._tensors(optimizer, model, stops)]
            return
        self._snapshot = optimizer.snapshot()
        self._tensors_now = self._tensors(optimizer, model, stops=False)
        self._count = len(self._tensors(optimizer, model, stops))
        self._snapshot.expect(self._tensors_now)
        self._thread = simulator.start(self._work, "reader")

    @staticmethod
    def _tensors(optimizer: Any, model: Model, stops: bool) -> list[Tensor]:
        states = optimizer.state_dict()["state"]
        tensors = [param.detach() for param in model.parameters()]
        tensors += [value for _, state in sorted(states.items()) for _, value in sorted(state.items()) if value.dim()]
        return tensors[: len(tensors) // 2] if stops else tensors

    def _work(self) -> None:
        for tensor in self._tensors_now[: self._count]:
            with self._snapshot.reading(tensor) as values:
                self._read.append(values.clone())
            self._snapshot.done(tensor)
        self._snapshot.close()

    def result(self) -> list[Tensor]:
        if hasattr(self, "_thread"):
            self._thread.join()
        return self._read


SNAPSHOTS = {
    "snapshot": 1 << 20,
    "snapshot, little room": 1 << 10,
    "snapshot, given up": 1 << 11,
    "snapshot, then load": 1 << 20,
    "snapshot, then sync": 1 << 20,
}
"""Bytes for copies of what is updated before it was read."""

BASES: dict[str, type[torch.optim.Optimizer]] = {"whole": Whole, "sgd": torch.optim.SGD}


BUDGET = 600
"""Bytes of gradients: two or three of the model's."""


def _check_budget(held: Any, scenario: Scenario) -> None:
    """After a hook: what is more than the budget belongs to pieces that are not complete, which hold a layer each."""
    complete = held._bytes - sum(held._counted[g] for g in held._counted if g not in held._submitted)
    leaving = {tensor for _, tensors, _ in held._leaving for tensor in tensors}
    complete += sum(nbytes for gradient, nbytes in held._counted.items() if gradient in leaving)
    assert complete <= BUDGET, f"{complete} bytes of gradients pile up on the device"


def _save_and_load(optimizer: Any, model: Model, seen: list[Tensor]) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg"].mul_(0.5)
    optimizer.load_state_dict(saved)


def _load(optimizer: Any, model: Model, seen: list[Tensor]) -> None:
    """An old state: nothing waits before it is loaded."""
    if not model.saved:
        model.saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(copy.deepcopy(model.saved))  # torch goes on in the loaded tensors


def _edit_state(optimizer: Any, model: Model, seen: list[Tensor]) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def _edit_params(optimizer: Any, model: Model, seen: list[Tensor]) -> None:
    with torch.no_grad():
        getattr(optimizer, "synchronize", lambda: None)()
        for param in model.parameters():
            param.mul_(0.9)
    getattr(optimizer, "sync_from_model", lambda: None)()


def _read_state(optimizer: Any, model: Model, seen: list[Tensor]) -> None:
    states = optimizer.state_dict()["state"]
    seen += [value.clone() for _, state in sorted(states.items()) for _, value in sorted(state.items())]


def _read_model(optimizer: Any, model: Model, seen: list[Tensor]) -> None:
    seen += [value.clone() for value in model.state_dict().values()]


def _load_model(optimizer: Any, model: Model, seen: list[Tensor]) -> None:
    if not model.saved:
        model.saved = copy.deepcopy(model.state_dict())
    model.load_state_dict(model.saved)
    getattr(optimizer, "sync_from_model", lambda: None)()


def _evaluate(optimizer: Any, model: Model, seen: list[Tensor]) -> None:
    with torch.no_grad():
        seen.append(model(tokens(7)))


def _use_after_forward(optimizer: Any, model: Model, seen: list[Tensor]) -> None:
    """A forward that does not need every parameter; then those that it did not need."""
    model.uses_branch = False
    with torch.no_grad():
        seen += [model(tokens(7)), model.branch.weight * 2]


def _sync(optimizer: Any, model: Model, seen: list[Tensor]) -> None:
    getattr(optimizer, "sync_from_model", lambda: None)()


def _report(optimizer: Any, model: Model, seen: list[Tensor]) -> None:
    if isinstance(optimizer, OffloadOptimizer):
        optimizer.memory_report()  # counts what is there, and gives nothing up


def _change_lr(optimizer: Any, model: Model, seen: list[Tensor]) -> None:
    for group in optimizer.param_groups:
        group["lr"].mul_(0.7)


def _exchange(optimizer: Any, model: Model, seen: list[Tensor]) -> None:
    """The same values in other parameters, as somebody puts them into the groups who wraps the model."""
    others = {param: nn.Parameter(param.detach()) for param in model.parameters()}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            setattr(module, name, others[param])
    if not isinstance(optimizer, OffloadOptimizer):
        for param in list(optimizer.state):
            optimizer.state[others[param]] = optimizer.state.pop(param)
    for group in optimizer.param_groups:
        group["params"] = [others[param] for param in group["params"]]


def _move(optimizer: Any, model: Model, seen: list[Tensor]) -> None:
    """States come to the device, leave it again, and the CPU updates the rest; nobody waits before."""
    if not isinstance(optimizer, OffloadOptimizer):
        return
    auto = optimizer.auto
    assert auto is not None
    auto._runtime.memory_left = lambda: (2000, 2000)  # type: ignore[method-assign]
    auto._course = auto._watch()  # what it would do by itself waits before
    ways = optimizer.auto.placed()
    if "resident" in ways:
        assert auto.give_back() > 0
    elif "host" not in ways:
        auto._fill()
        assert "resident" in auto.placed()
    else:
        auto.let_cpu_update([])


def _let_cpu_update(optimizer: Any, model: Model, seen: list[Tensor]) -> None:
    if isinstance(optimizer, OffloadOptimizer):
        assert optimizer.auto is not None
        portions = optimizer.auto.portions()
        if {portion.way for portion in portions} == {"stream"}:
            optimizer.auto.let_cpu_update(portions[::2])


def _wait_for_all(optimizer: Any, model: Model, seen: list[Tensor]) -> None:
    getattr(optimizer, "synchronize", lambda: None)()
    seen += [p.detach().clone() for p in model.parameters()]
    base = optimizer.base_optimizer if isinstance(optimizer, OffloadOptimizer) else optimizer
    states = [base.state[p] for group in base.param_groups for p in group["params"] if p in base.state]
    seen += [value.clone() for state in states for _, value in sorted(state.items())]


AFTER_STEP: dict[str, Callable[[Any, Model, list[Tensor]], None]] = {
    "save and load": _save_and_load,
    "load": _load,
    "edit state": _edit_state,
    "edit parameters": _edit_params,
    "read state": _read_state,
    "read model": _read_model,
    "load model": _load_model,
    "evaluate": _evaluate,
    "evaluate after a branch": _use_after_forward,
    "sync": _sync,
    "report": _report,
    "change lr": _change_lr,
    "change lr on the device": _change_lr,
    "wait": _wait_for_all,
    "exchange": _exchange,
}
MOVES = {"move": _move, "cpu": _let_cpu_update}
AFTER_STEP |= MOVES

BASIC = [
    Scenario(strategy, in_backward, offload_gradients, attached, accumulation)
    for accumulation in (1, 2)
    for attached in (False, True)
    for in_backward in (False, True)
    for offload_gradients in (False, True)
    for strategy in ("stream", "host")
]
PLACED = (("offload_states", "exp_avg/embed.*"),)
EXTRAS = [
    *(extra for extra in AFTER_STEP if extra not in MOVES),
    *[
        "clip",
        "norm",
        "zeroing",
        "keep",
        "drop",
        "branch",
        "grow",
        "delete",
        "evaluate before",
        "step twice",
        "compiled",
        "sgd",
        "one piece",
        "unforeseen",
    ],
]
EXTRAS += SNAPSHOTS
EXTRAS.append("outside")  # step() waits for what the model does not have, and so for what was queued before it
SPECIAL = [
    Scenario(strategy, offload_gradients=offload_gradients, attached=attached, accumulation=accumulation, extra=extra)
    for extra in EXTRAS
    for strategy in ("stream", "host")
    for offload_gradients, accumulation, attached in [(False, 1, True), (True, 2, True), (True, 2, False)]
]
SPECIAL += [Scenario("stream", attached=attached, extra="wait", kwargs=PLACED) for attached in (False, True)]
SPECIAL += [Scenario("host", offload_gradients=True, accumulation=a, extra="whole") for a in (1, 2)]
SPECIAL += [Scenario(strategy, True, True, True, extra="delete") for strategy in ("stream", "host")]
SPECIAL += [
    Scenario(strategy, False, True, attached, accumulation, "bf16", (("accumulation_dtype", "fp32"),))
    for attached in (False, True)
    for accumulation in (1, 2)
    for strategy in ("stream", "host")
]
SPECIAL += [Scenario("host", offload_gradients=True, accumulation=2, extra="close")]
SPECIAL += [
    Scenario("auto", in_backward, offload_gradients, attached, extra=extra)
    for extra in MOVES
    for in_backward, offload_gradients, attached in [(False, False, True), (True, False, True), (False, True, False)]
]
SCENARIOS = [*BASIC, *SPECIAL]
ORDERS = ["late", "pauses", "early", 0, 1]


@functools.cache
def expected(scenario: Scenario) -> list[Tensor]:
    return train(scenario, None)


def fails(scenario: Scenario, order: Any, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What goes wrong in a scenario; None if nothing does."""
    want = expected(Scenario("", attached=scenario.attached, accumulation=scenario.accumulation, extra=scenario.extra))
    try:
        with Watched(order=order) as simulator:
            monkeypatch.setattr("offload.machinery.runtime_for", lambda device: simulator)
            monkeypatch.setattr("offload.machinery.is_same_everywhere", lambda base_class: True)
            if scenario.extra == "unforeseen":  # so that buffers grow as states come
                monkeypatch.setattr("offload.machinery.forecast", lambda *args: None)
            got = train(scenario, simulator)
            assert simulator.running == 0 or scenario.extra != "delete", "threads of a discarded optimizer run on"
            simulator.finish()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if len(got) != len(want):
        return f"{len(got)} tensors to see, not {len(want)}"
    differing = [index for index, (a, b) in enumerate(zip(got, want, strict=True)) if not torch.equal(a, b)]
    return f"tensors {differing} of {len(want)} differ" if differing else None


@pytest.mark.parametrize(
    "order", [*ORDERS[:2], *(pytest.param(order, marks=pytest.mark.slow) for order in ORDERS[2:])], ids=str
)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_the_engine_as_it_is_passes(scenario: Scenario, order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fails(scenario, order, monkeypatch) is None


LIKELY = {
    "_uploaded": "step twice",
    "_stage:after[self._rested": "one piece",
    "_stage:after[slot.made]": "unforeseen",
    "read.synchronize": "change lr on the device",
    "Engine._bring:": "change lr on the device",
    "Engine.close:": "delete",
    "Worker.close": "delete",
    "HostGradients.take": "drop",
    "HostGradients._wait_for": "drop",
    "HostGradients.synchronize:while": "norm",
    "HostGradients.synchronize:event": "whole",
    "Engine.settle:self.gradients": "norm",
    "_bring_gradients:after[slot.freed]": "sgd",
    "HostPipeline._update:after": "evaluate before",
    "last_staged": "save and load",
    "StreamPipeline.settle:self._last_update": "sgd",
    "StreamPipeline.settle:while": "edit state",
    "gradients_on_host": "whole",
    "norms": "norm",
    "call(module)": "compiled",
    "ModelWaits.step": "outside",
    "_end": "evaluate after a branch",
    "__init__:self._settle()": "read model",
    "__init__:self._settle()#2": "load model",
    "first.wait": "zeroing",
    "before_zeroing": "zeroing",
    "TakenGradient(": "zeroing",
    "HostGradients(": "zeroing",
    "add_param_group": "grow",
    "OffloadOptimizer._ready": "exchange",
    "state_dict": "read state",
    "OffloadOptimizer._load:": "load",
    "sync_from_model": "sync",
    "OffloadOptimizer.state:": "edit state",
    "auto.py:": "move",
    "both.py:": "cpu",
    "let_cpu_update": "cpu",
    "copy_on_write.py:": "snapshot",
    "while part.is_open": "snapshot, little room",
    "Engine.settle:self._kept": "snapshot, then load",
    "OffloadOptimizer.snapshot": "snapshot",
}
"""The kind of scenario that is tried first: saves time, decides nothing."""

LIKELY_PAUSES = (
    "_stage:self._uploads",
    "StreamPipeline._work_once",
    "HostPipeline._bring_next",
    "sync_from_model",
    "_last_staged",
    "Both.wait:self.device",
)
"""Waits that are missed first where the worker does some of its work early: the same."""


ELSEWHERE = {
    # Without it the norm is computed once more, after everything has settled: test_in_flight.py sees that it is not.
    "accumulation.py:HostGradients.norm:self._wait_for(param)",
    # Without it the loop around it spins for ever; test_in_flight.py counts what is waited for.
    "in_flight.py:InFlight.wait:oldest.synchronize()",
    # Scenarios are too small for more than one slab; test_memory.py page-locks several in parallel.
    "memory.py:HostMemory._pin:thread.join()",
    # Orders what the link does next, and no values: a test of test_in_flight.py counts pieces on their way up.
    "stream.py:StreamPipeline._stage:self._uploads.popleft().synchronize()",
    # A reader and an update at the same memory at the same time, and room that is used again while it is copied into:
    # test_copy_on_write.py makes both happen.
    "copy_on_write.py:Snapshot.before_update:while part.reading: wait",
    "copy_on_write.py:Snapshot._let_go:part.copied.synchronize()",
    # Where the engine has streams it settles first; without, test_copy_on_write.py has work on the caller's stream.
    "copy_on_write.py:CopyOnWrite.take:self._runtime.record().synchronize()",
    # Every scenario's backward runs on one stream; test_streams.py has one on two.
    "engine.py:Engine._submit:self._runtime.wait(self._runtime.record(other))",
    # Base optimizers that step as a whole have their own scenarios, on the simulator too: tests/test_schedulefree.py.
    "engine.py:Engine._on_the_host:self._runtime.copy(host, values, 'down', (self._runtime.record(),), "
    "mark('gradient down', ALL)).synchronize()",
    "engine.py:Engine._on_the_host:after[self._runtime.record()]",
    "optimizer.py:OffloadOptimizer._switch:self._machinery.engine.settle(readers=True)",
    # Need FSDP2 and its streams, or sums over ranks: tests/distributed/test_races.py.
    "shards.py:gradient_of:part.wait()",
    "fsdp.py:AllGatherWaits._watched.wait_and_unshard:self._wait(unit)",
    "engine.py:Engine.wait_to_gather:self._worker.wait(unit, keep=True)",
    # Between them lies what is timed, and nothing moves.
    "auto.py:Auto._timed:self._engine.settle()",
    "auto.py:Auto._timed:self._engine.settle()#2",
    "auto.py:measured:end.synchronize()",
    # Units that are not seen to be waited for wait at the start of the forward instead: values are right, the overlap
    # is lost. tests/engine/test_model_waits.py::test_each_forward_waits_for_its_own_unit_only asserts that it is there.
    "model.py:ModelWaits._watch.wait_and_call:call(module)",
}
"""Waits that a test of their own covers."""


def likely_first(wait: Wait) -> list[tuple[Scenario, Any]]:
    extras = [extra for part, extra in LIKELY.items() if part in wait.name]
    strategy = "stream" if "stream.py" in wait.name else "host" if "host.py" in wait.name else ""

    first_order = "pauses" if any(part in wait.name for part in LIKELY_PAUSES) else "late"

    def key(case: tuple[Scenario, Any]) -> tuple[bool, bool, bool]:
        other_kind = case[0].extra not in extras if extras else False
        return case[1] != first_order, other_kind, strategy not in case[0].strategy

    cases = [(scenario, order) for order in ORDERS for scenario in SCENARIOS]
    return sorted(cases, key=key)


@pytest.mark.parametrize("wait", [wait for wait in WAITS if wait.name not in ELSEWHERE], ids=lambda wait: wait.name)
def test_removing_a_wait_fails_a_scenario(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    without(wait, monkeypatch)
    if not any(fails(scenario, order, monkeypatch) for scenario, order in likely_first(wait)):
        pytest.fail(f"no scenario notices that {wait.name} is missing")
