"""When each unit is updated: in backward or at ``step``, waited for by the next forward or by ``step`` itself.

The engine listens to backward through gradient hooks, keeps track of where every gradient rests, and hands complete
pieces to a pipeline (``stream`` on the device, ``host`` on the CPU). Where device and host are one memory, and for
strategy ``resident``, there is nothing to overlap: updates run at once, on the caller's thread.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from offload.engine.accumulation import HostGradients
from offload.engine.base import Hyperparameters, PartialStep, Snapshots, scaled_gradients
from offload.engine.both import Both
from offload.engine.copy_on_write import CopyOnWrite, Snapshot
from offload.engine.fsdp import VERSIONS, AllGatherWaits, difference
from offload.engine.gradients import TakenGradient
from offload.engine.host import HostCopies
from offload.engine.in_flight import InFlight
from offload.engine.marks import ALL, mark
from offload.engine.model import ModelWaits, weakly
from offload.engine.norms import Norms, total_norm
from offload.engine.pipeline import Gradient, Job, Pipeline
from offload.engine.runtime import Event, Runtime, traced
from offload.engine.shards import LocalParameters, gradient_of, local, set_gradient
from offload.engine.states import States
from offload.engine.units import Piece, Unit


@dataclass(frozen=True)
class Schedule:
    """What the caller chose.

    Attributes:
        offload_gradients: gradients rest on the host.
        update_in_backward: a piece is updated as soon as its gradients are final.
    """

    offload_gradients: bool
    update_in_backward: bool


_Options = tuple[Hyperparameters, Tensor | None, list[Event]]
"""Hyperparameters, factor of the gradients, and the events after which both may be read."""


@dataclass
class _Progress:
    """Of the step under way.

    Attributes:
        expected: parameters of each piece that had a gradient in the last step.
        arrived: those whose gradients are final in this one.
        streams: those that the gradients came on, by piece.
        order: pieces in the order in which they became complete; a dict for its order and its speed.
        submitted: parameters whose update was submitted in backward.
    """

    expected: dict[Piece, set[nn.Parameter]] = field(default_factory=dict)
    arrived: dict[Piece, set[nn.Parameter]] = field(default_factory=dict)
    streams: dict[Piece, set[Hashable]] = field(default_factory=dict)
    order: dict[Piece, None] = field(default_factory=dict)
    submitted: set[nn.Parameter] = field(default_factory=set)

    def next(self) -> _Progress:
        """An empty record for the next step, which expects what came in this one."""
        seen = {piece: params for piece, params in self.arrived.items() if params}
        return _Progress(expected={**self.expected, **seen})


class Engine:
    """Gradients in, updated parameters out.

    Attributes:
        gradients: holds gradients on the host; None where they stay on the device.
        norms: of the gradients of the step under way.
        accumulating: gradients that come are not final.
        at_first: called once, when the first gradient comes.

    Args:
        runtime: streams of the parameters' device.
        schedule: when updates run and where gradients rest.
        in_flight: holds device tensors that queued work uses, and bounds the gradients among them.
        step: runs the base optimizer on part of its parameters.
        states: where the base optimizer's states are.
        worker: carries updates out beside this thread; None to do them at once.
        copies: host copies of the parameters that the CPU updates, where the device has a memory of its own.
        snapshots: keep what is read beside training before it is updated.
        names: what messages call each parameter.
        groups: the caller's parameter groups as they are now.
    """

    def __init__(
        self,
        runtime: Runtime,
        schedule: Schedule,
        *,
        in_flight: InFlight,
        step: PartialStep,
        states: States,
        worker: Pipeline | Both | None,
        copies: HostCopies | None,
        snapshots: CopyOnWrite,
        names: dict[Tensor, str],
        groups: Callable[[], Sequence[Mapping[str, Any]]],
    ) -> None:
        self._runtime = runtime
        self._schedule = schedule
        self._in_flight = in_flight
        self._step = step
        self._states = states
        self._worker = worker
        self._copies = copies
        self._kept = snapshots
        self._expected: list[Piece] = []
        self.gradients: HostGradients | None = None
        self._names = names
        self._groups = groups
        self._snapshots = Snapshots()
        self._on_host: tuple[Hyperparameters, Hyperparameters, list[Event]] = [], [], []
        self._taken: Hyperparameters = ()
        self._snapshot_stream: Hashable = None
        self.units: list[Unit] = []
        self._pieces: dict[nn.Parameter, list[Piece]] = {}
        self._waits: ModelWaits | None = None
        self._gathers: AllGatherWaits | None = None
        self._handles: list[RemovableHandle] = []
        self._progress = _Progress()
        self.norms = Norms()
        self.at_first: Callable[[], None] | None = None
        self._scale: Tensor | None = None
        self.accumulating = False

    # Set-up

    def add_units(self, units: Sequence[Unit]) -> None:
        """Take charge of more parameters."""
        self.units += units
        for unit in units:
            for piece in unit.pieces:
                for part in piece.slices:
                    known = self._pieces.setdefault(part.param, [])
                    if piece not in known:
                        known.append(piece)
            for param in unit.params:
                if param.requires_grad:
                    self._hook(param)
        self._new_step()
        self._cover()

    @property
    def has_updated(self) -> bool:
        """Whether a backward of the step under way has submitted updates, which stand."""
        return bool(self._progress.submitted)

    def params(self) -> Collection[nn.Parameter]:
        """Those that it takes charge of."""
        return self._pieces.keys()

    @property
    def pieces(self) -> list[Piece]:
        """Those of all units."""
        return [piece for unit in self.units for piece in unit.pieces]

    def attach(self, model: nn.Module) -> None:
        """Let the model's forward wait for each unit, so that :meth:`step` need not wait for any."""
        self._detach()
        if self._worker is None:
            return
        if other := difference(model):
            warnings.warn(
                f"optimizer: fully_shard of torch {torch.__version__} is not that of torch {VERSIONS}, whose "
                f"all-gathers can wait for their layer's update ({other}): step() waits for all updates instead",
                stacklevel=3,
            )
        else:
            self._waits = ModelWaits(model, self.wait, self.wait_for_all, self.settle, self._loaded)
            self._gathers = AllGatherWaits(model, weakly(self.wait_to_gather))
            self._cover()

    def _cover(self) -> None:
        if self._waits is not None:
            self._waits.cover(self.units)
        if self._gathers is not None:
            self._gathers.cover(self.units)

    def _detach(self) -> None:
        """Take the hooks off the model."""
        if self._waits is not None:
            self._waits.remove()
        if self._gathers is not None:
            self._gathers.remove()
        self._waits = self._gathers = None

    def _loaded(self, params: Iterable[nn.Parameter]) -> None:
        """The model has loaded new values into some parameters."""
        if self._copies is not None:
            self._copies.read(self._copies.known(params))

    def _hook(self, param: nn.Parameter) -> None:
        if self._worker is None and self.gradients is None and not self._schedule.update_in_backward:
            return  # nothing to do before step()
        engine = weakref.ref(self)

        def on_gradient(param: Tensor) -> None:
            alive = engine()
            if alive is not None:
                assert isinstance(param, nn.Parameter)
                alive._gradient_ready(param)

        self._handles.append(param.register_post_accumulate_grad_hook(on_gradient))

    def close(self) -> None:
        """Finish what was submitted, end all threads and take the hooks off parameters and model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._detach()
        if self.gradients is not None:
            self.gradients.close()
        if self._worker is not None:
            self._worker.close()
        # Buffers, host memory and what is held in flight go with this object: nothing may use them any more.
        self._runtime.drain()

    # Backward

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside, gradients are not final."""
        if self.gradients is not None:
            # Not in a hook, where page-locking would hold up backward.
            self.gradients.reserve(list(self._pieces), sums=True)
        before, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = before

    @torch.no_grad()
    def _gradient_ready(self, param: nn.Parameter) -> None:
        """Runs in backward, each time autograd has finished a parameter's gradient."""
        if gradient_of(param) is None:
            return
        if param in self._progress.submitted:
            raise RuntimeError(
                f"{self._names[param]} was already updated in this step: with update_in_backward=True, run the "
                "backward of every micro-batch but the last inside `with optimizer.accumulate():`, and call "
                "optimizer.step() after the last"
            )
        if not self._progress.arrived:
            refuse_graphs(param)
            if self.at_first is not None:
                check, self.at_first = self.at_first, None
                check()
        self.norms.begin()
        is_final = not self.accumulating
        on_device = self._take_addend(param, is_final)
        if on_device:
            gradient = gradient_of(param)
            assert gradient is not None
            in_backward = is_final and self._schedule.update_in_backward
            if self.gradients is not None and not in_backward:
                self._check_dense(param, gradient)
                if is_final:
                    self.norms.leave({param: gradient})
                self._lend(param, gradient)
                self.gradients.take(param, gradient, self._unit(param), measure=is_final and self.norms.measure)
            elif in_backward and self._worker is not None:
                self._check_dense(param, gradient)
                self._in_flight.hold(gradient)
        if is_final:
            self._final(param)
        # Backward is queued far ahead of the device: without a wait, all its gradients would be alive at once.
        self._in_flight.wait()

    def _take_addend(self, param: nn.Parameter, is_final: bool) -> bool:
        """Bring what autograd delivered together with what is there; True if the sum is an ordinary gradient."""
        gradient = gradient_of(param)
        if not isinstance(gradient, TakenGradient):
            return True
        addend, gradient.arrived = gradient.arrived, None
        assert addend is not None
        self.norms.changed(param)
        if gradient.rest is None:
            set_gradient(param, addend)
        elif not gradient.on_host:
            set_gradient(param, gradient.rest.add_(addend))
        else:
            assert self.gradients is not None
            self._lend(param, addend)
            measure = is_final and self.norms.measure
            self.gradients.add(param, gradient, addend, self._unit(param), measure=measure)
            return False
        return True

    def _unit(self, param: nn.Parameter) -> str:
        """The name of a parameter's unit."""
        return self._pieces[param][0].unit.name

    def _lend(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Count a gradient that goes to the host at once."""
        if not self._runtime.shares_memory:
            self._in_flight.hold(gradient)
            self._in_flight.submit({gradient: self._unit(param)})

    def _final(self, param: nn.Parameter) -> None:
        complete = []
        stream = self._runtime.stream()
        for piece in self._pieces[param]:
            arrived = self._progress.arrived.setdefault(piece, set())
            self._progress.streams.setdefault(piece, set()).add(stream)
            was_complete = piece in self._progress.order
            arrived.add(param)
            if not was_complete and arrived >= self._progress.expected[piece]:
                self._progress.order[piece] = None
                complete.append(piece)
        if complete and self._schedule.update_in_backward:
            submitted = self._submit(complete, early=True)
            self._progress.submitted |= submitted
            for consumed in submitted:
                gradient = gradient_of(consumed)
                if isinstance(gradient, TakenGradient):
                    self.norms.left(consumed, gradient)
                set_gradient(consumed, TakenGradient(local(consumed), None, wait=_nothing))

    # Updates

    def _submit(self, pieces: Iterable[Piece], *, early: bool = False) -> set[nn.Parameter]:
        """Hand the update of all gradients of some pieces to the worker; returns whose.

        ``early``: in backward, on whichever stream that computes the last of a piece's gradients.
        """
        taken: dict[nn.Parameter, Gradient] = {}
        jobs = []
        for piece in pieces:
            gradients = {}
            for param in (part.param for part in piece.slices):
                gradient = taken.get(param) or self._gradient(param)
                if gradient is not None:
                    gradients[param] = taken[param] = gradient
            if gradients:
                jobs.append((piece, gradients))
        groups = self._hyperparameters()
        here = self._runtime.stream()
        streams = {stream for piece, _ in jobs for stream in self._progress.streams.get(piece, ())} if early else set()
        for other in (streams | {self._snapshot_stream}) - {here}:
            self._runtime.wait(self._runtime.record(other))
        on_device = {param: gradient.values for param, gradient in taken.items() if not gradient.on_host}
        if early:
            self.norms.leave(on_device)
        options = self._options(groups, {piece.way == "host" for piece, _ in jobs})
        ready = self._runtime.record()
        made = [Job(piece, gradients, ready, *options[piece.way == "host"]) for piece, gradients in jobs]
        if self._worker is not None:
            self._in_flight.submit({gradient: self._unit(param) for param, gradient in on_device.items()})
            self._worker.submit(made)
        else:
            for job in made:
                self._update_now(job)
        return set(taken)

    def _hyperparameters(self) -> Hyperparameters:
        """The hyperparameters now."""
        groups = self._snapshots.take(self._groups())
        if groups is not self._taken:
            self._taken, self._snapshot_stream = groups, self._runtime.stream()
        return groups

    def _options(self, groups: Hyperparameters, ways: Iterable[bool]) -> dict[bool, _Options]:
        """What updates need beside gradients: for those on the device, and if asked for on the CPU (True), where
        tensors are brought to the host."""
        options: dict[bool, _Options] = {False: (groups, self._scale, [])}
        if True in ways:
            if self._on_host[0] is not groups:
                read: list[Event] = []
                brought = [{key: self._bring(value, read) for key, value in group.items()} for group in groups]
                self._on_host = groups, brought, read
            _, on_host, before = self._on_host
            options[True] = on_host, self._bring(self._scale, read := list(before)), read
        return options

    def _bring(self, value: Any, read: list[Event]) -> Any:
        """A 0-dim tensor's copy on the host, there after the event that is added to ``read``; else the value."""
        if not isinstance(value, Tensor) or self._runtime.is_on_host(value):
            return value
        host = self._runtime.empty_pinned(value.nbytes).view(value.dtype).view(value.shape)
        read.append(self._runtime.copy(host, value, "down", (self._runtime.record(),), mark("copy down", ALL)))
        self._in_flight.release([value], read[-1])
        return host

    def _gradient(self, param: nn.Parameter) -> Gradient | None:
        """What the next update of a parameter uses; None where it has no gradient."""
        gradient = gradient_of(param)
        if gradient is None or (isinstance(gradient, TakenGradient) and gradient.rest is None):
            return None
        self._check_dense(param, gradient)
        if self._copies is not None:
            self._copies.check(param)
        if not isinstance(gradient, TakenGradient):
            return Gradient(gradient.contiguous() if local(param).is_contiguous() else gradient)
        assert gradient.rest is not None
        if not gradient.on_host or self._runtime.shares_memory:
            return Gradient(gradient.rest)
        assert self.gradients is not None
        held = self.gradients
        return Gradient(gradient.rest, on_host=True, arrived=lambda: held.arrived(param))

    def _check_dense(self, param: nn.Parameter, gradient: Tensor) -> None:
        if gradient.is_sparse and (self._worker is not None or self.gradients is not None):
            raise RuntimeError(
                f"{self._names[param]} has a sparse gradient, which cannot be offloaded; build the embedding with "
                "sparse=False, or use strategy=resident with offload_gradients=False."
            )

    def _update_now(self, job: Job) -> None:
        self._kept.before_update(job.piece)
        gradients = {part: part.of(job.gradients[part.param].values) for part in job.slices}
        with traced(mark("update", job.piece.name)):
            self._states.update(
                {part: (part.of(local(part.param).detach()), gradient) for part, gradient in gradients.items()},
                lambda entries: self._step(entries, job.groups, job.scale),
            )

    def step(self) -> None:
        """Submit the update of everything that has a gradient and was not updated in backward."""
        submitted = self._submit(sorted(self.pieces, key=lambda piece: piece.rank))
        self._scale = None
        self.norms.end_step(keep=self._schedule.update_in_backward)
        self._new_step()
        if self._waits is None:
            self.wait_for_all()
            return
        self._waits.step()
        for param in submitted:
            gradient = gradient_of(param)
            assert gradient is not None
            if not isinstance(gradient, TakenGradient):
                set_gradient(param, TakenGradient(local(param), gradient, wait=self.settle))

    def _new_step(self) -> None:
        self._in_flight.forget()
        last, self._progress = self._progress, self._progress.next()
        pieces = self.pieces
        for piece in pieces:
            trained = {part.param for part in piece.slices if part.param.requires_grad}
            self._progress.expected.setdefault(piece, trained)
        came = {piece: position for position, piece in enumerate(last.order)}
        if came:
            # The last gradients of backward belong to what the next forward needs first.
            for rank, piece in enumerate(sorted(pieces, key=lambda piece: -came.get(piece, -1))):
                piece.rank = rank
        in_backward = self._schedule.update_in_backward and came
        self._expected = list(last.order) if in_backward else sorted(pieces, key=lambda piece: piece.rank)
        if self._worker is not None:
            self._worker.expect(self._expected)

    @contextmanager
    def gradients_in_place(self, base: torch.optim.Optimizer, parts: LocalParameters) -> Iterator[None]:
        """Inside, what the base optimizer updates has ordinary tensors for its gradients, for a step of the whole base
        optimizer; ``parts``: of parameters that several ranks share."""
        parts.refresh()
        self._before_all_updates()
        before = []
        for param in self._pieces:
            gradient = values = gradient_of(param)
            if isinstance(gradient, TakenGradient):
                values = None if gradient.rest is None else gradient.rest.to(param.dtype)
            part = parts.of(param)
            if values is not gradient or part is not param:
                before.append((part, part.grad))
                part.grad = values
        try:
            with self._folding(base, self._take_scale()), traced(mark("update", ALL)):
                yield
        finally:
            for part, gradient in before:
                part.grad = gradient

    def _folding(self, base: torch.optim.Optimizer, scale: Tensor | None) -> AbstractContextManager[None]:
        """Inside, a step of the whole base optimizer applies a clipping factor, if it folds."""
        return scaled_gradients(base, scale) if self._step.folds else nullcontext()

    def _take_scale(self) -> Tensor | None:
        """The pending clipping factor, which then is none any more."""
        scale, self._scale = self._scale, None
        return scale

    @contextmanager
    def gradients_on_host(self, base: torch.optim.Optimizer, copies: HostCopies) -> Iterator[list[nn.Parameter]]:
        """Inside, the host copies have the gradients; for a step of the whole base optimizer on the CPU."""
        self.settle()
        self._before_all_updates()
        scale = self._take_scale()
        on_host = scale
        if scale is not None and not self._runtime.is_on_host(scale):
            on_host = self._on_the_host(scale)
        updated = []
        for param in self._pieces:
            gradient = self._gradient(param)
            if gradient is not None:
                values = gradient.values
                factor = on_host if gradient.on_host else scale
                if factor is not None and not self._step.folds:
                    values.mul_(factor)
                if not gradient.on_host:
                    values = self._on_the_host(values)
                copies.of(param).grad = values.to(param.dtype)
                updated.append(param)
        self.norms.clear()
        try:
            with self._folding(base, scale), traced(mark("update", ALL)):
                yield updated
        finally:
            for param in updated:
                copies.of(param).grad = None

    def _on_the_host(self, values: Tensor) -> Tensor:
        """A copy of a device tensor in pageable host memory, at once."""
        host = torch.empty_like(values, device="cpu")
        self._runtime.copy(host, values, "down", (self._runtime.record(),), mark("gradient down", ALL)).synchronize()
        return host

    def upload(self, params: Iterable[nn.Parameter], copies: HostCopies) -> None:
        """Bring updated host copies to the device, at once."""
        for param in params:
            local(param).copy_(copies.of(param))
            copies.written(param)

    # Snapshots

    def take_snapshot(self) -> Snapshot:
        """Parameters and states as they are now, when nothing is queued; see
        :class:`offload.engine.copy_on_write.Snapshot`."""
        return self._kept.take(dict.fromkeys([*self._expected, *self.pieces]))

    def _before_all_updates(self) -> None:
        for piece in self.pieces:
            self._kept.before_update(piece)

    # Norms and scale

    @torch.no_grad()
    def grad_norm(self, params: Iterable[nn.Parameter], norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Norm of all gradients of ``params``, over all ranks, 0-dim; that of each is computed where it rests."""
        on_host: Callable[[nn.Parameter], Tensor | None] = _nothing if self.gradients is None else self.gradients.norm
        norms = self.norms.of(params, norm_type, names=self._names, on_host=on_host, settle=self.settle)
        if self._scale is not None:
            norms = [norm * self._scale.to(norm.device) for norm in norms]
        total = total_norm(norms, norm_type, error_if_nonfinite=error_if_nonfinite)
        # They were made on the streams of backward's hooks, and are read on this one.
        self._in_flight.release(self.norms.taken_early(), self._runtime.record())
        return total

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by ``factor`` (0-dim), now or when the next update uses it."""
        if self._worker is not None or self._step.folds:
            self._scale = factor if self._scale is None else self._scale * factor.to(self._scale.device)
            return
        for param in self._pieces:
            gradient = gradient_of(param)
            gradient = gradient.rest if isinstance(gradient, TakenGradient) else gradient
            if gradient is not None:
                gradient.mul_(factor.to(gradient.device))
        self.norms.clear()

    def zero_grad(self, params: Iterable[nn.Parameter], set_to_none: bool) -> None:
        """Drop or zero all gradients, wherever they rest, and the pending clipping factor; begin a new step."""
        self._scale = None
        self.norms.clear()
        for param in params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_() if param.grad.grad_fn is not None else param.grad.requires_grad_(False)
                param.grad.zero_()
        # What an exception left of a backward is over; the updates that it submitted stand.
        self._progress = _Progress(expected=self._progress.expected)
        self._in_flight.forget()

    # Waiting

    def wait(self, unit: Unit) -> None:
        """Make the current stream wait for a unit's update."""
        if self._worker is not None:
            # Of a unit that several groups of FSDP2 hold, a later all-gather waits for the same update elsewhere.
            self._worker.wait(unit, keep=bool(self._gathers))
            self._in_flight.collect()

    def wait_to_gather(self, unit: Unit) -> None:
        """Make the current stream, which is not the one that computes, wait for a unit's update."""
        if self._worker is not None:
            self._worker.wait(unit, keep=True)

    def wait_for_all(self) -> None:
        """Make the current stream wait for every update."""
        for unit in self.units:
            self.wait(unit)

    def settle(self, *, readers: bool = False) -> None:
        """Block until every queued update, copy and addition is done.

        ``readers``: and until nobody reads a snapshot, since parameters or states change in other ways than by updates.
        """
        with traced(mark("wait", ALL)):
            if self.gradients is not None:
                self.gradients.synchronize()
            if self._worker is not None:
                self._worker.settle()
            if readers:
                self._kept.wait()


def _nothing(*_: Any) -> None:
    return None


def refuse_graphs(param: Tensor) -> None:
    """Raises RuntimeError where gradients come out of CUDA graphs, which write the next ones into the same memory
    while updates still read these."""
    if param.device.type != "cuda":
        return
    if _has_compiled_graphs(param.device) or torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "gradients come out of a CUDA graph, which reuses their memory while the optimizer still reads it; compile "
            'without graphs (torch.compile(mode="default") or "max-autotune-no-cudagraphs"), do not capture backward, '
            "or use strategy=resident with update_in_backward=False"
        )


def _has_compiled_graphs(device: torch.device) -> bool:
    """Whether torch.compile has made CUDA graphs for a device."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    try:
        return trees.get_manager(device.index or 0, create_if_none_exists=False) is not None
    except AssertionError:
        # Torch 2.11 keeps them by thread, and in one that it has made none for asserts that it has.
        return False
