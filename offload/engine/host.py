"""Strategy ``host``: parameters have a copy in host memory, and the base optimizer updates it on the CPU.

Life of one gradient: backward produces it on the device; a copy stream brings it down into a host buffer
(while backward continues, if this is the last micro-batch); ``step`` waits for it, applies the clipping
factor, lets the base optimizer update the host parameter, and queues the copy up to the device.

Where parameters are on the CPU already, host copies alias them and nothing is copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import torch
from torch import Tensor, nn

from offload.engine.gradients import TakenGradient, tensor_norm
from offload.engine.memory import HostMemory
from offload.engine.runtime import Event, Runtime

STAGING_SLOTS = 2
"""Micro-batches after the first arrive in this many buffers, each as large as the largest gradient."""


class HostStrategy:
    """Host copies of parameters and gradients, and the traffic between them and the device.

    Args:
        runtime: streams and page-locked memory of the parameters' device.
        offload_gradients: move each gradient to the host as backward produces it and free it on the device.
        names: what messages call each parameter.
    """

    def __init__(self, runtime: Runtime, *, offload_gradients: bool, names: Mapping[Tensor, str]) -> None:
        self.memory = HostMemory(runtime)
        self._runtime = runtime
        self._offload_gradients = offload_gradients
        self._names = names
        self._host: dict[Tensor, nn.Parameter] = {}
        self._device_of: dict[Tensor, nn.Parameter] = {}
        self._gradient_buffers: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}
        self._arrivals: dict[Tensor, tuple[Event, Tensor, int]] = {}
        self._uploads: dict[Tensor, Event] = {}
        self._device_norms: dict[Tensor, Tensor] = {}
        self._keep_device_norms = False
        self._scale: Tensor | None = None
        self.accumulating = False
        self._worker: ThreadPoolExecutor | None = None
        self._additions: list[Future[None]] = []
        self._staging: SimpleQueue[Tensor] = SimpleQueue()

    @property
    def immediate(self) -> bool:
        """True where nothing is copied, so that there is nothing to overlap the update with."""
        return self._runtime.shares_memory

    # Parameters

    def add(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Host parameters for ``params``, in order, holding their values. Frozen ones are aliased."""
        trainable = [p for p in params if p.requires_grad]
        if self._runtime.shares_memory:
            copies = [p.detach() for p in trainable]
        else:
            copies = self.memory.allocate(trainable, "parameters")
            buffers = self.memory.allocate(trainable, "gradients")
            self._gradient_buffers.update(zip(trainable, buffers, strict=True))
        for param, copy in zip(trainable, copies, strict=True):
            host = nn.Parameter(copy, requires_grad=True)
            self._host[param] = host
            self._device_of[host] = param
            self._hook(param)
        self.read_parameters(trainable)
        return [self._host.get(p, p) for p in params]

    def _hook(self, param: nn.Parameter) -> None:
        if self._runtime.shares_memory and not self._offload_gradients:
            return  # nothing to do before step()
        strategy = weakref.ref(self)

        def on_gradient(param: Tensor) -> None:
            alive = strategy()
            if alive is not None:
                alive._gradient_ready(param)

        handle = param.register_post_accumulate_grad_hook(on_gradient)
        weakref.finalize(self, handle.remove)

    def host_parameter(self, param: nn.Parameter) -> nn.Parameter:
        """Where ``param`` is updated; the parameter itself if it is frozen."""
        return self._host.get(param, param)

    def device_parameter(self, host: Tensor) -> Tensor:
        """The inverse of :meth:`host_parameter`."""
        return self._device_of.get(host, host)

    def read_parameters(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Copy parameters from the device to their host copies (all of them by default)."""
        with torch.no_grad():
            for param in list(self._host) if params is None else params:
                host = self._host[param]
                if self._runtime.shares_memory:
                    host.data = param.detach()
                else:
                    host.copy_(param)
                    self._versions[param] = param._version

    def _check_unchanged(self, param: nn.Parameter) -> None:
        if self._runtime.shares_memory:
            stale = self._host[param].data_ptr() != param.data_ptr()
        else:
            stale = self._versions[param] != param._version
        if stale:
            raise RuntimeError(
                f"{self._names[param]} was changed outside the optimizer since its host copy was made (by "
                "load_state_dict, .to() or an in-place operation); call optimizer.sync_from_model() after "
                "changing parameters, or the change would be lost."
            )

    # Gradients

    def _gradient_ready(self, param: Tensor) -> None:
        """Runs in backward, each time autograd has finished a parameter's gradient."""
        gradient = param.grad
        if gradient is None:
            return
        if not self._offload_gradients:
            if not self.accumulating and not self._runtime.shares_memory:
                self._fetch(param, gradient)
        elif not isinstance(gradient, TakenGradient):
            self._take(param, gradient)
        elif gradient.arrived is not None:
            arrived, gradient.arrived = gradient.arrived, None
            self._accumulate(param, gradient, arrived)

    def _fetch(self, param: Tensor, gradient: Tensor) -> Tensor:
        """Queue the copy of ``gradient`` into the parameter's host buffer; returns the buffer."""
        if gradient.is_sparse:
            raise RuntimeError(
                f"{self._names[param]} has a sparse gradient, which strategy=host cannot copy; "
                "build the embedding with sparse=False or use strategy=resident."
            )
        buffer = self._gradient_buffers[param]
        event = self._runtime.copy(buffer, gradient, "down")
        self._arrivals.pop(param, None)
        self._arrivals[param] = (event, gradient, gradient._version)
        return buffer

    def _take(self, param: Tensor, gradient: Tensor) -> None:
        # After the parameter's earlier gradient was dropped, its buffer may still be waiting for an addition.
        self._wait_for_additions()
        if self._keep_device_norms:
            self._device_norms[param] = tensor_norm(gradient, 2.0)
        host = gradient if self._runtime.shares_memory else self._fetch(param, gradient)
        # The buffer and its event are looked up by parameter, so the device gradient can be freed now.
        if param in self._arrivals:
            self._arrivals[param] = (self._arrivals[param][0], host, host._version)
        param.grad = TakenGradient(param, host, self.wait_for_gradients)

    def _accumulate(self, param: Tensor, marker: TakenGradient, arrived: Tensor) -> None:
        self._device_norms.pop(param, None)
        if self._runtime.shares_memory:
            marker.host.add_(arrived)
            return
        if self._worker is None:
            self._start_worker()
        slot = self._staging.get()
        view = slot[: arrived.nbytes].view(arrived.dtype).view(arrived.shape)
        event = self._runtime.copy(view, arrived, "down")
        first = self._arrivals.get(param)

        def add() -> None:
            try:
                if first is not None:
                    first[0].synchronize()
                event.synchronize()
                marker.host.add_(view)
            finally:
                self._staging.put(slot)

        assert self._worker is not None
        self._additions.append(self._worker.submit(add))

    def _start_worker(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="offload-accumulate")
        largest = max(self._gradient_buffers.values(), key=lambda buffer: buffer.nbytes)
        for slot in self.memory.allocate([largest] * STAGING_SLOTS, "staging"):
            self._staging.put(slot.view(-1).view(torch.uint8))

    def wait_for_gradients(self) -> None:
        """Block until every gradient that was taken lies complete in host memory."""
        self._wait_for_additions()
        for event, _, _ in self._arrivals.values():
            event.synchronize()

    def _wait_for_additions(self) -> None:
        for addition in self._additions:
            addition.result()
        self._additions.clear()

    def norms(self, params: Iterable[nn.Parameter], norm_type: float) -> list[Tensor]:
        """Norms of the gradients of ``params``, each computed where the gradient rests, 0-dim fp32."""
        self._keep_device_norms = self._offload_gradients and not self._runtime.shares_memory
        waited = False
        norms = []
        for param in params:
            gradient = param.grad
            if gradient is None:
                continue
            if not isinstance(gradient, TakenGradient):
                norms.append(tensor_norm(gradient, norm_type))
            elif norm_type == 2.0 and param in self._device_norms:
                norms.append(self._device_norms[param])
            else:
                if not waited:
                    self.wait_for_gradients()
                    waited = True
                norms.append(tensor_norm(gradient.host, norm_type))
        return norms if self._scale is None else [norm * self._scale.to(norm.device) for norm in norms]

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by ``factor`` (0-dim) when it is used in the next update."""
        self._scale = factor if self._scale is None else self._scale * factor.to(self._scale.device)

    def zero_grad(self, params: Iterable[nn.Parameter], set_to_none: bool) -> None:
        """Drop or zero all gradients, wherever they rest, and the pending clipping factor."""
        self.wait_for_gradients()
        self._scale = None
        self._arrivals.clear()
        self._device_norms.clear()
        for param in params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_() if param.grad.grad_fn is not None else param.grad.requires_grad_(False)
                param.grad.zero_()

    # Update

    def host_gradients(self, params: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield ``(parameter, host gradient)``, each complete and scaled, in the order of arrival.

        All copies are queued before the first is waited for, so later ones overlap the caller's work.
        """
        self._wait_for_additions()
        scale = None if self._scale is None else self._scale.to("cpu")
        self._scale = None
        self._device_norms.clear()  # those of unscaled gradients
        ready: dict[nn.Parameter, Tensor] = {}
        for param in params:
            gradient = param.grad
            assert gradient is not None
            self._check_unchanged(param)
            if isinstance(gradient, TakenGradient):
                ready[param] = gradient.host
            elif self._runtime.shares_memory:
                ready[param] = gradient
            else:
                _, source, version = self._arrivals.get(param, (None, None, -1))
                # A gradient changed after its early copy (accumulation, a user's scaling) is copied again.
                if source is not gradient or version != gradient._version:
                    self._fetch(param, gradient)
                ready[param] = self._gradient_buffers[param]
        arrival = {param: position for position, param in enumerate(self._arrivals)}
        for param in sorted(ready, key=lambda p: arrival.get(p, len(arrival))):
            if param in self._arrivals:
                self._arrivals[param][0].synchronize()
            if param in self._uploads:
                self._uploads.pop(param).synchronize()
            host_gradient = ready[param]
            if scale is not None:
                host_gradient.mul_(scale.to(host_gradient.device))
            yield param, host_gradient

    def upload(self, param: nn.Parameter) -> None:
        """Queue the copy of the updated host parameter to the device; the next forward waits for it."""
        if self._runtime.shares_memory:
            return
        event = self._runtime.copy(param.detach(), self._host[param].detach(), "up")
        self._uploads[param] = event
        self._versions[param] = param._version

    def uploads_done(self) -> None:
        """Make the device's later work wait for the queued uploads, and forget this step's arrivals."""
        for event in self._uploads.values():
            self._runtime.compute_wait(event)
        if not self._offload_gradients:
            self._arrivals.clear()

    def synchronize(self) -> None:
        """Block until every copy and addition is done."""
        self.wait_for_gradients()
        self._runtime.synchronize()
