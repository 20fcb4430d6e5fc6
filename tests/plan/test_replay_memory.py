"""What replays count of device memory: activations and gradients by hand, limits, and the sums for a Llama layer."""

from __future__ import annotations

import collections
import dataclasses
import json
from typing import Any

import peak_memory
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from offload.plan.footprint import footprint
from offload.plan.replay import Result, replay, replay_compute, replay_torchao
from offload.plan.workload import LLAMA2_7B, MACHINES, Activations, Machine, Workload, llama_activations
from offload.simulation.memory import CachingAllocator
from offload.simulation.touched import touched_by
from offload.training.loss import LinearCrossEntropyLoss

MIB = 1 << 20
FAST = Machine("fast", *[1e15] * 5)
LAYERS = 6
WEIGHT = 64
"""MiB of a tensor, and of its gradient."""

LOAD = Workload(
    LAYERS,
    (2**24, 2**24),
    tokens=1024,
    dtype=torch.float32,
    activations=Activations(passing=16 << 10, kept=(32 << 10, 96 << 10), gradients=(0, 48 << 10), logits=0),
)
"""A layer passes 16 MiB on; its tensors keep 32 and 96 MiB; the second's backward takes 48 MiB."""

PARAMETERS = LAYERS * 2 * WEIGHT


def purposes(result: Result) -> dict[str, float]:
    """MiB at the peak of the steady state."""
    return {name: used / MIB for name, used in result.steady.purposes.items() if used >= MIB}


def test_without_recomputation_every_layer_keeps_its_own() -> None:
    result = replay_compute(FAST, dataclasses.replace(LOAD, recompute=False))
    # The most at the first backward: what all keep, the output, and that backward's own 48 MiB; then gradients, while
    # activations go faster than gradients come (128 MiB against 128 MiB a layer, and the first takes its own).
    assert purposes(result) == {"parameters": PARAMETERS, "gradients": WEIGHT, "activations": 6 * 128 + 16 + 48}


def test_with_recomputation_a_layer_keeps_what_it_was_given() -> None:
    result = replay_compute(FAST, LOAD)
    # The most at the last backward, the first layer's: all gradients but one, what that layer was given and keeps, and
    # the output that the caller still holds.
    use = purposes(result)
    assert use["parameters"] == PARAMETERS
    assert use["gradients"] == PARAMETERS - WEIGHT
    assert use["activations"] == 16 + 128 + 16 + 48


def test_an_update_at_step_needs_all_gradients() -> None:
    at_step = replay(FAST, LOAD, strategy="stream")
    assert purposes(at_step)["gradients"] >= PARAMETERS - WEIGHT
    assert at_step.first.allocated >= at_step.steady.purposes["parameters"] + PARAMETERS * MIB - WEIGHT * MIB


def test_the_first_step_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes states, beside the staging buffers, which are there from the start."""
    resets: list[int] = []
    reset = CachingAllocator.reset_peak
    monkeypatch.setattr(CachingAllocator, "reset_peak", lambda self: (resets.append(self.allocated), reset(self)))
    result = replay(FAST, LOAD, strategy="stream", update_in_backward=True)
    assert result.first.purposes["zeros_like"] > 0 and "zeros_like" not in result.steady.purposes
    assert result.first.purposes["empty_device"] == result.steady.purposes["empty_device"] > 0
    assert len(resets) == 2  # after the first step, and when the rhythm has settled


def test_the_loss_holds_logits_of_a_chunk_and_one_gradient_of_the_head() -> None:
    assert LOAD.activations is not None
    activations = dataclasses.replace(LOAD.activations, logits=8 << 20)  # 1 GiB a chunk
    result = replay_compute(FAST, dataclasses.replace(LOAD, edge=2**24, activations=activations))
    use = purposes(result)
    assert use["logits"] == 1024 and use["gradients"] == WEIGHT
    assert use["parameters"] == PARAMETERS + 2 * WEIGHT


def test_a_limit_is_kept_or_said_to_be_too_low() -> None:
    needed = replay_compute(FAST, LOAD).steady.reserved
    free = replay(FAST, LOAD, strategy="host")
    assert not free.out_of_memory and free.step < float("inf")
    enough = replay(FAST, LOAD, memory=free.first.reserved, strategy="host")
    assert not enough.out_of_memory and enough.first.reserved <= free.first.reserved
    short = replay(FAST, LOAD, memory=needed // 2, strategy="host")
    assert short.out_of_memory.startswith(("construction: ", "step 1: "))
    assert "Tried to allocate" in short.out_of_memory and short.step == float("inf")
    assert short.first.reserved <= needed // 2


def test_the_cpu_runs_ahead_by_a_queue_of_launches_and_no_further() -> None:
    """What it allocates is alive when the device gets there, some layers later."""

    def gradients(launches: int) -> float:
        slow = Machine("slow", flops=1e9, up=1e15, down=1e15, device=1e15, host=1e15, launch=1e-9)
        load = dataclasses.replace(LOAD, layers=24, launches=(1, launches))
        # With memory to spare, so that nothing but the queue holds the CPU back.
        result = replay(slow, load, strategy="stream", update_in_backward=True, in_flight_gib=64.0)
        return purposes(result)["gradients"]

    # Two layers fit into the queue, or a hundred.
    assert gradients(500) < gradients(10) / 2
    assert gradients(500) <= 8 * WEIGHT


def test_page_locking_after_construction_is_seen() -> None:
    assert replay_torchao(FAST, LOAD).pinned_late == 0
    assert replay_compute(FAST, LOAD).pinned_late == 0


def test_recomputation_takes_the_time_of_a_forward() -> None:
    machine = dataclasses.replace(FAST, flops=2.0 * 2**24 * 1024)  # a second for each tensor's forward
    assert replay_compute(machine, LOAD).step == pytest.approx(LAYERS * 2 * 4.0)
    assert replay_compute(machine, dataclasses.replace(LOAD, recompute=False)).step == pytest.approx(LAYERS * 2 * 3.0)


# ---- a Llama layer

BATCH, TOKENS, DIM, HEADS, KV_HEADS, HIDDEN = 2, 16, 64, 4, 2, 176


@pytest.fixture(scope="module")
def layer() -> Any:
    from offload import torchao_shim

    torchao_shim.install()
    from torchtune.models.llama3 import llama3

    sizes = dict(num_heads=HEADS, num_kv_heads=KV_HEADS, embed_dim=DIM, intermediate_dim=HIDDEN, max_seq_len=64)
    made = llama3(vocab_size=32, num_layers=1, **sizes).bfloat16().layers[0]
    made(torch.zeros(BATCH, TOKENS, DIM, dtype=torch.bfloat16))  # builds its table of rotations
    return made


def given() -> Tensor:
    return torch.randn(BATCH, TOKENS, DIM).bfloat16().requires_grad_()


def test_what_a_llama_layer_keeps(layer: Any) -> None:
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    known = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *layer.buffers())}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = layer(given())
    kept = [tensor for address, tensor in saved.items() if address not in known]
    rows = BATCH * TOKENS
    norms = [tensor for tensor in kept if tensor.dtype == torch.float32 and tensor.numel() in (rows, rows * DIM)]
    rest = [tensor for tensor in kept if all(tensor is not norm for norm in norms)]
    activations = llama_activations(DIM, HIDDEN, HEADS, 32)
    norm = activations.kept[0]
    assert norm == 4 * DIM and sum(tensor.numel() == rows * DIM for tensor in norms) >= 2  # in fp32, both norms'
    assert sum(tensor.untyped_storage().nbytes() for tensor in rest) == rows * (sum(activations.kept) - 2 * norm)
    assert result.nbytes == rows * activations.passing


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.launches = collections.Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if touched_by(func, args, kwargs or {}, result)[0] and not name.removeprefix("new_").startswith("empty"):
            self.launches[name] += 1
        return result


def test_how_many_kernels_a_llama_layer_launches(layer: Any) -> None:
    with Counting() as forward:
        result = layer(given())
    with Counting() as backward:
        result.backward(torch.ones_like(result))
    counted = (forward.launches.total(), backward.launches.total() - 1)  # without ones_like
    assert counted == pytest.approx(LLAMA2_7B.launches, rel=0.1)


def test_activations_have_a_number_for_each_tensor() -> None:
    activations = LLAMA2_7B.activations
    assert activations is not None
    assert len(activations.kept) == len(activations.gradients) == len(LLAMA2_7B.tensors)
    assert LLAMA2_7B.parameters == 6_738_411_520  # 6,738,415,616 with the last norm


# ---- the record


def test_logits_are_those_that_the_fused_loss_holds() -> None:
    """Of one chunk, beside the head's weight and its gradient: measured with a head so thin that little else counts."""
    vocabulary, dim, tokens = 8192, 64, 256
    with torch.device("meta"):
        head = torch.nn.Linear(dim, vocabulary, bias=False, dtype=torch.bfloat16)

    def step() -> Tensor:
        hidden = torch.zeros(1, tokens, dim, dtype=torch.bfloat16).requires_grad_()
        labels = torch.zeros(1, tokens, dtype=torch.long)
        return LinearCrossEntropyLoss(1)(hidden, labels, tokens, head, list(head.parameters()))

    measured = footprint(head, step, keeps_gradients=True).peak() - 2 * vocabulary * dim * 2
    assert llama_activations(dim, 4 * dim, 2, vocabulary).logits * tokens == pytest.approx(measured, rel=0.06)


def test_the_head_takes_a_product_forward_and_two_backward() -> None:
    machine = dataclasses.replace(FAST, flops=2.0 * 1024 * 2**24)  # a second for a tensor of a layer
    with_head = dataclasses.replace(LOAD, activations=None, recompute=False, edge=2**22)
    layers = LAYERS * 2 * 3.0
    assert replay_compute(machine, with_head).step == pytest.approx(layers + 0.25 + 0.5)
    assert replay_compute(machine, dataclasses.replace(with_head, head=2**23)).step == pytest.approx(layers + 1.5)


def test_a_whole_model_on_a_card() -> None:
    """Parameters, logits and a layer's activations at their real size, whatever the engine does."""
    load = dataclasses.replace(LLAMA2_7B, tokens=4096, layers=4)
    result = replay_compute(MACHINES["rtx4090"], load)
    use = purposes(result)
    assert use["parameters"] == pytest.approx(load.parameters * 2 / MIB, rel=0.001)
    kept = sum(load.activations.kept) * 4096 / MIB if load.activations else 0.0
    assert 600 < kept < use["activations"] < 1.7 * kept


def test_the_record_has_every_row() -> None:
    record = json.loads(peak_memory.RECORD.read_text())
    assert len(record["rows"]) == len(peak_memory.TOKENS) * len(peak_memory.SCHEDULES) * (1 + len(peak_memory.CARDS))
    assert record["cards_gib"] == peak_memory.CARDS
    assert peak_memory.table(record).count("\n") == 2 + len(peak_memory.SCHEDULES)
    for row in record["rows"]:
        limit = peak_memory.CARDS.get(row["card"], float("inf"))
        assert max(row["first"]["reserved_gib"], row["steady"]["reserved_gib"]) <= limit + 0.01, row
        assert row["first"]["purposes_gib"]["parameters"] == 12.56, row


def test_the_record_keeps_to_the_budget_of_the_readme() -> None:
    """Weights, what is in flight, one gradient more; activations come on top. In step 1 as later."""
    head = 32000 * 4096 * 2 / peak_memory.GIB
    rows = json.loads(peak_memory.RECORD.read_text())["rows"]
    for row in rows:
        assert row["pinned_late_gib"] == 0.0, row
        if "in backward" not in row["schedule"] or row["out_of_memory"]:
            continue
        budget = peak_memory.SCHEDULES[row["schedule"]].get("in_flight_gib", 1.0)
        for use in (row["first"]["purposes_gib"], row["steady"]["purposes_gib"]):
            staging = use.get("empty_device", 0.0)
            held = use.get("gradients", 0.0) + staging
            # A chunked loss adds one chunk's gradient of the head to the others': two, before the optimizer has any.
            assert held <= max(budget + head, staging + 2 * head) + 0.02, (row["schedule"], row["tokens"], held)
    default, small = "`stream`, in backward", "`stream`, in backward, `in_flight_gib=0.125`"
    fits = {(row["schedule"], row["tokens"], row["card"]): row for row in rows if not row["out_of_memory"]}
    for key in [(default, 1024, "24 GB"), (default, 4096, "24 GB"), (default, 1024, "16 GB"), (small, 4096, "16 GB")]:
        assert fits[key]["first"]["retries"] == fits[key]["steady"]["retries"] == 0, key


def test_the_table_has_every_row() -> None:
    record = {
        "rows": [
            {
                "tokens": tokens,
                "schedule": name,
                "card": card,
                "first": {"allocated_gib": 21.04, "retries": 1},
                "steady": {"allocated_gib": 17.96, "retries": 2},
                "out_of_memory": "step 1: too little" if card == "16 GB" else "",
            }
            for tokens in peak_memory.TOKENS
            for name in peak_memory.SCHEDULES
            for card in (None, *peak_memory.CARDS)
        ]
    }
    lines = peak_memory.table(record).splitlines()
    assert len(lines) == 2 + len(peak_memory.SCHEDULES)
    assert lines[2] == "| `stream`, in backward |" + " 21.0, 18.0 | fits, 3 retries | fails in step 1 |" * 2
