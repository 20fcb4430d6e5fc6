"""What can be changed of a run so that it takes less memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from offload.training.settings import TrainSettings

COSTS = {
    "enable_activation_checkpointing": "each layer's forward is computed again in backward",
    "batch_size": "smaller products; gradient_accumulation_steps keeps the size of an update",
    "tokenizer.max_seq_len": "longer samples are cut, and packs hold less",
    "loss.num_output_chunks": "smaller products in the loss",
    "clip_grad_norm": "gradients are not clipped",
    "reshard_after_forward": "each layer's weights are gathered again in backward",
    "reduce_dtype": "sums of gradients are rounded",
    "optimizer": "states come and go over the link, behind the computation where it is long enough",
    "optimizer.optimizer_class": "states in 8 bits: within the noise of training runs, not the same numbers",
    "optimizer.strategy": "states come and go over the link, behind the computation where it is long enough",
    "optimizer.in_flight_gib": "less is on its way at once, so that waits can show",
    "optimizer.offload_gradients": "gradients cross the link",
    "optimizer.state_dtype": "states in 8 bits: within the noise of training runs, not the same numbers",
    "optimizer.master": "weights keep fewer bits between updates",
}
"""What each key costs beside memory and time."""

TIMES = {
    "enable_activation_checkpointing": "a third more time",
    "optimizer.update_in_backward": "no time",
}
"""What keys cost in time where nothing is known of the machine."""

TORCHS_OWN = ("fused", "foreach", "capturable", "differentiable")
"""Arguments of torch.optim.AdamW that say how, and not what, it computes."""


def cost(changes: Iterable[str], time: str | None = None) -> str:
    """What overrides cost, in words.

    Args:
        changes: the overrides.
        time: what they cost in time; None where that is not known.
    """
    keys = keys_of(changes)
    times = [TIMES[key] for key in keys if key in TIMES] if time is None else [time]
    return "; ".join(dict.fromkeys([*times, *(COSTS[key] for key in keys if key in COSTS)]))


def keys_of(changes: Iterable[str]) -> list[str]:
    """The keys that overrides set or remove."""
    return [change.partition("=")[0].lstrip("+~") for change in changes]


def cheaper(settings: TrainSettings) -> Iterator[list[str]]:
    """Overrides that take less memory, those that cost least first."""
    optimizer = settings.optimizer
    is_ours = str(optimizer["_component_"]).rpartition(".")[2] == "OffloadOptimizer"
    if getattr(settings, "reduce_dtype", None) == "fp32" and settings.dtype == "bf16":
        yield ["reduce_dtype=bf16"]
    if getattr(settings, "reshard_after_forward", True) is not True:
        yield ["reshard_after_forward=True"]
    if "num_output_chunks" in settings.loss:
        yield [f"loss.num_output_chunks={4 * int(settings.loss.num_output_chunks)}"]
    if is_ours:
        clips = ["clip_grad_norm=null"] if settings.clip_grad_norm is not None else []
        if not optimizer.get("update_in_backward") and settings.gradient_accumulation_steps == 1:
            yield ["optimizer.update_in_backward=True", *clips]
        if optimizer.get("strategy", "host") == "resident":
            yield ["optimizer.strategy=stream"]
        for gib in (0.25, 0.125):
            if float(optimizer.get("in_flight_gib", 1.0)) > gib:
                yield [f"optimizer.in_flight_gib={gib}"]
        if not optimizer.get("offload_gradients"):
            yield ["optimizer.offload_gradients=True"]
        if optimizer.get("strategy", "host") == "host":
            yield ["optimizer.strategy=stream"]
        if optimizer.get("optimizer_class", "torch.optim.AdamW") in ("torch.optim.Adam", "torch.optim.AdamW"):
            removed = [f"~optimizer.{key}" for key in TORCHS_OWN if key in optimizer]
            yield ["optimizer.optimizer_class=offload.optim.AdamW", *removed]
        if optimizer.get("optimizer_class") == "offload.optim.AdamW":
            master = optimizer.get("master", "split")
            if optimizer.get("state_dtype", "int8") != "int8":
                yield ["optimizer.state_dtype=int8"]
            if settings.dtype == "bf16" and master == "split":
                yield ["optimizer.master=split24"]
            if settings.dtype == "bf16" and master in ("split", "split24"):
                yield ["optimizer.master=stochastic"]
    elif str(optimizer["_component_"]).startswith(("torch.optim.", "bitsandbytes.optim.")):
        yield ["optimizer=offload.OffloadOptimizer", "optimizer.optimizer_class=offload.optim.AdamW",
               "optimizer.strategy=stream"]  # fmt: skip
    if not settings.enable_activation_checkpointing:
        yield ["enable_activation_checkpointing=True"]
    batch = settings.batch_size
    while batch > 1:
        batch //= 2
        yield [f"batch_size={batch}"]
    length = settings.tokenizer.get("max_seq_len")
    for share in (2, 4):
        if length is not None and int(length) // share >= 256:
            yield [f"tokenizer.max_seq_len={int(length) // share}"]
