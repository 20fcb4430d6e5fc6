"""The packed optimizers as torch optimizers: the same arithmetic as torch's, every option, every refusal."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload.optim
from offload import OffloadOptimizer
from offload.optim import codes, formats

FORMATS = [(state, master) for state in formats.STATE_DTYPES for master in formats.MASTERS]

PACKED = [(state, master) for state, master in FORMATS if state != "fp32"]


def weights(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(dtype))


def gradients(count: int, *shape: int, dtype: torch.dtype = torch.bfloat16, decades: float = 3.0) -> list[Tensor]:
    """Gaussian, over elements whose scales span some decades."""
    generator = torch.Generator().manual_seed(1)
    scale = 10 ** (torch.rand(shape, generator=generator) * -decades)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for _ in range(count)]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: list[Tensor], **kwargs: Any) -> None:
    for gradient in steps:
        for param in params:
            param.grad = gradient.to(param.dtype, copy=True)
        optimizer.step(**kwargs)


def master_of(optimizer: Any, param: nn.Parameter) -> Tensor:
    """The parameter with all the precision that the optimizer keeps of it."""
    plain = offload.optim.to_plain(optimizer)["state"]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = plain[next(i for i, p in enumerate(params) if p is param)]
    return state.get("master", param.detach().float())


# What torch's own optimizers compute

EXACT = """
import sys, torch
sys.path.insert(0, {tests!r})
from test_adamw import compare_with_torch
compare_with_torch()
"""

OPTIONS: list[dict[str, Any]] = [
    {},
    {"betas": (0.3, 0.5)},
    {"maximize": True},
    {"weight_decay": 0.0},
    {"lr": 2e-3, "eps": 1e-4, "weight_decay": 0.3},
]


def compare_with_torch() -> None:
    """fp32 moments equal torch's fused loop bit for bit, where torch contracts no multiplication and addition."""
    for name in ("Adam", "AdamW"):
        for options in OPTIONS:
            options = {"weight_decay": 0.1, **options}
            plain, packed = weights(5001, dtype=torch.float32), weights(5001, dtype=torch.float32)
            split = weights(5001)
            wide = nn.Parameter(split.detach().float())
            steps = gradients(60, 5001, decades=8)
            expected = getattr(torch.optim, name)([plain], fused=True, **options)
            expected_wide = getattr(torch.optim, name)([wide], fused=True, **options)
            fp32 = getattr(offload.optim, name)([packed], state_dtype="fp32", **options)
            halves = getattr(offload.optim, name)([split], state_dtype="fp32", master="split", **options)
            for optimizer, param in ((expected, plain), (fp32, packed), (expected_wide, wide), (halves, split)):
                train(optimizer, [param], steps)
            for reference, ours, param, other in (
                (expected, fp32, plain, packed),
                (expected_wide, halves, wide, split),
            ):
                assert torch.equal(param, master_of(ours, other)), (name, options)
                for key in ("exp_avg", "exp_avg_sq", "step"):
                    assert torch.equal(reference.state[param][key], ours.state[other][key]), (name, options, key)
            assert torch.equal(split, formats.split_master(wide.detach())[0])


def test_fp32_moments_equal_torchs_adamw_to_the_last_bit() -> None:
    """In a process of its own: which kernels torch chooses is decided when it is imported."""
    code = EXACT.format(tests=os.path.dirname(__file__))
    # Where torch uses fused multiply-add, its results differ from its own scalar loops too.
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch fuses nothing here")
@pytest.mark.parametrize("options", [{"lr": 1e-3}, {"lr": 1e-5}, *OPTIONS[1:]])
def test_fp32_moments_against_a_torch_that_fuses_multiply_and_add(options: dict[str, Any]) -> None:
    """The stock wheel's AdamW after 50 steps, element by element: what README and the docstring say of it."""
    plain, packed = weights(5001, dtype=torch.float32), weights(5001, dtype=torch.float32)
    expected = torch.optim.AdamW([plain], fused=True, **{"weight_decay": 0.1, **options})
    ours = offload.optim.AdamW([packed], state_dtype="fp32", **{"weight_decay": 0.1, **options})
    steps = gradients(50, 5001, decades=8)
    for optimizer, param in ((expected, plain), (ours, packed)):
        train(optimizer, [param], steps)
    unit = 2.0**-23
    assert 0 < (packed - plain).abs().max() <= 2 * unit * plain.abs().max()
    for key in ("exp_avg", "exp_avg_sq"):
        theirs = expected.state[plain][key].double()
        difference = (ours.state[packed][key].double() - theirs).abs()
        assert difference.max() <= 2 * unit * theirs.abs().max()
        if key == "exp_avg_sq":  # sums of squares cancel nothing
            assert bool((difference <= 2 * unit * theirs).all())


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize(("state", "master"), PACKED)
def test_packed_moments_follow_torch(name: str, state: str, master: str) -> None:
    """With gradients of one size within a block; the bounds are the rounding of each format.

    A second moment's relative error is at most 1/256 (bf16) or 1/16 (8 bits) per rounding.
    """
    param = weights(4096)
    wide = nn.Parameter(param.detach().double())
    steps = gradients(40, 4096, decades=0.5)
    ours = getattr(offload.optim, name)([param], lr=1e-3, weight_decay=0.1, state_dtype=state, master=master)
    theirs = getattr(torch.optim, name)([wide], lr=1e-3, weight_decay=0.1)
    start = wide.detach().clone()
    train(ours, [param], steps)
    train(theirs, [wide], steps)
    moved, expected = master_of(ours, param).double() - start, wide.detach() - start
    error = ((moved - expected).norm() / expected.norm()).item()
    weight_error = {"none": 0.05, "stochastic": 0.12, "split": 0.0, "split24": 0.001}[master]
    assert error < weight_error + {"bf16": 0.01, "int8": 0.06}[state], error


@pytest.mark.parametrize(("state", "master"), FORMATS)
def test_fp32_parameters_are_their_own_master(state: str, master: str) -> None:
    """Beside them a bf16 parameter in the same group has its master; the arithmetic is the same."""
    wide, narrow = weights(512).float(), weights(512)
    wide = nn.Parameter(wide.detach().clone())
    optimizer = offload.optim.AdamW([wide, narrow], state_dtype=state, master=master)
    train(optimizer, [wide, narrow], gradients(20, 512))
    assert "remainder" not in optimizer.state[wide]
    assert ("remainder" in optimizer.state[narrow]) == (master in formats.REMAINDERS)
    if master == "split" and state == "fp32":  # the others' second moments round by their position
        assert torch.equal(wide, master_of(optimizer, narrow))


def test_split_keeps_what_bf16_cannot() -> None:
    """At lr=1e-6 a bf16 weight never moves; a split one follows fp32, a stochastic one on average."""
    moved = {}
    for master in formats.MASTERS:
        param = weights(65536)
        start = param.detach().float()
        optimizer = offload.optim.AdamW([param], lr=1e-6, weight_decay=0.0, state_dtype="fp32", master=master)
        train(optimizer, [param], [torch.ones(65536, dtype=torch.bfloat16)] * 50)
        moved[master] = master_of(optimizer, param) - start
    assert moved["none"].abs().median() == 0
    torch.testing.assert_close(moved["split"], torch.full((65536,), -50e-6), rtol=1e-3, atol=2e-7)
    # Weights of 0.02 have steps of 0.5e-6 in 24 bits: after 50 roundings they are some 3 steps off, and 4e-5 in bf16.
    assert math.isclose(moved["split24"].mean(), -50e-6, rel_tol=1e-3)
    assert moved["split24"].std() < 2e-6 < 1e-5 < moved["stochastic"].std()
    assert math.isclose(moved["stochastic"].mean(), -50e-6, rel_tol=0.1)
    assert moved["stochastic"].unique().numel() > 10


def test_bf16_second_moments_follow_gradients_that_fall() -> None:
    """Rounded to nearest, v would stay where it was: a step's decay of 1/1000 is less than half of 1/128."""
    param = weights(4096)
    optimizer = offload.optim.AdamW([param], state_dtype="bf16", betas=(0.9, 0.999))
    generator = torch.Generator().manual_seed(0)
    for size in [1.0] * 300 + [0.1] * 1500:
        param.grad = (torch.randn(4096, generator=generator) * size).bfloat16()
        optimizer.step()
    exact = 0.01 + (1 - 0.999**300 - 0.01) * 0.999**1500
    measured = optimizer.state[param]["exp_avg_sq"].float().mean().item()
    assert measured == pytest.approx(exact, rel=0.05)


def test_blocks_that_span_decades_do_not_blow_up() -> None:
    """The smallest second moment of a block is far below its largest; decoded as zero it would leave eps alone."""
    param = weights(4096, dtype=torch.float32)
    optimizer = offload.optim.AdamW([param], lr=1e-3, weight_decay=0.0)
    for gradient in gradients(50, 4096, dtype=torch.float32, decades=8):
        before = param.detach().clone()
        param.grad = gradient
        optimizer.step()
        assert (param - before).abs().max() < 12e-3  # torch.optim.AdamW stays below 3e-3 here


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """The dtype that torch gives to tensors whose maker names none."""
    before = torch.get_default_dtype()
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.parametrize("has_kernel", [True, False], ids=["kernel", "reference"])
@pytest.mark.parametrize(("state", "master"), FORMATS)
def test_the_default_dtype_changes_no_bit(
    state: str, master: str, has_kernel: bool, default_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 counts to 256, and 256 + 1 is 256 again; a state that was loaded goes on counting too."""
    if not has_kernel:
        monkeypatch.setattr(offload.optim.cpu, "load", lambda: None)
    start, steps = [weights(300), weights(300, dtype=torch.float32)], gradients(4, 300)
    runs = []
    for dtype in (torch.float32, default_dtype):
        torch.set_default_dtype(dtype)
        params = [nn.Parameter(param.detach().clone()) for param in start]
        first = offload.optim.AdamW(params, state_dtype=state, master=master)
        train(first, params, steps[:1])
        saved = first.state_dict()
        for packed in saved["state"].values():
            assert packed["step"].dtype == torch.float32
            packed["step"].fill_(254)
        optimizer = offload.optim.AdamW(params, state_dtype=state, master=master)
        optimizer.load_state_dict(saved)
        train(optimizer, params, steps)
        runs.append((params, optimizer.state_dict()["state"]))
    (expected, expected_state), (params, state_dict) = runs
    assert state_dict[0]["step"].item() == 258 and state_dict[0]["step"].dtype == torch.float32
    for index, (param, other) in enumerate(zip(params, expected, strict=True)):
        assert torch.equal(param, other)
        for key, value in expected_state[index].items():
            assert torch.equal(state_dict[index][key], value), key


@pytest.mark.parametrize("has_kernel", [True, False], ids=["kernel", "reference"])
@pytest.mark.parametrize(("state", "master"), FORMATS)
def test_a_gradient_that_is_not_finite_spoils_its_own_weight_alone(
    state: str, master: str, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elementwise as in torch: the same weights are NaN then and ever after; that step changes no bit of the others.

    Afterwards codes of 8 bits of the others may be rounded differently, because scales are common to a block.
    """
    if not has_kernel:
        monkeypatch.setattr(offload.optim.cpu, "load", lambda: None)
    size = 5 * formats.BLOCK
    clean, spoiled = weights(size), weights(size)
    wide = nn.Parameter(clean.detach().float())
    optimizers = {id(p): offload.optim.AdamW([p], state_dtype=state, master=master) for p in (clean, spoiled)}
    theirs = torch.optim.AdamW([wide], fused=True)
    bad = {3: math.inf, 260: -math.inf, 520: math.nan}
    for step, gradient in enumerate(gradients(6, size, decades=1)):
        dirty = gradient.clone()
        for where, value in bad.items():
            gradient[where] = 0.0  # is no block's largest
            dirty[where] = value if step == 2 else 0.0
        train(optimizers[id(clean)], [clean], [gradient])
        train(optimizers[id(spoiled)], [spoiled], [dirty])
        train(theirs, [wide], [dirty])
        assert torch.equal(spoiled.isnan(), wide.isnan())
        good = ~wide.isnan()
        if step <= 2 or state in ("fp32", "bf16"):
            assert torch.equal(spoiled[good], clean[good])
        else:
            torch.testing.assert_close(
                master_of(optimizers[id(spoiled)], spoiled)[good].float(),
                master_of(optimizers[id(clean)], clean)[good].float(),
                rtol=2**-7,
                atol=3e-4,
            )
    assert wide.isnan().nonzero().flatten().tolist() == sorted(bad)


# The same bits in any division of work


@pytest.mark.parametrize(("state", "master"), FORMATS)
def test_ranges_of_a_tensor_and_threads_change_no_bit(state: str, master: str) -> None:
    whole, cut = weights(70_000), weights(70_000)
    together = offload.optim.AdamW([whole], state_dtype=state, master=master)
    apart = offload.optim.AdamW([cut], state_dtype=state, master=master)
    steps = gradients(3, 70_000)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        train(together, [whole], steps)
        torch.set_num_threads(1)
        ranges: list[nn.Parameter] = []
        for start, stop in ((0, 256), (256, 66_048), (66_048, 70_000)):
            part = nn.Parameter(cut.detach()[start:stop])
            part.offload_range = (0, start)  # type: ignore[attr-defined]
            ranges.append(part)
        apart.param_groups[0]["params"] = ranges
        for step in steps:
            for part in ranges:
                start = part.offload_range[1]  # type: ignore[attr-defined]
                part.grad = step[start : start + part.numel()]
            apart.step()
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(whole, cut)
    for key, value in together.state[whole].items():
        if key != "step":
            assert torch.equal(value, torch.cat([apart.state[part][key] for part in ranges])), key


@pytest.mark.parametrize(("state", "master"), [each for each in FORMATS if each[0] in ("fp32", "bf16")])
@pytest.mark.parametrize("shape", [(1000,), (10, 100)])
def test_ranges_may_begin_anywhere_where_there_are_no_blocks(state: str, master: str, shape: tuple[int, ...]) -> None:
    """As shards of a vector do, or of a matrix with short rows."""
    whole, cut = weights(*shape), weights(*shape)
    together = offload.optim.AdamW([whole], state_dtype=state, master=master)
    apart = offload.optim.AdamW([cut], state_dtype=state, master=master)
    steps = gradients(3, *shape)
    train(together, [whole], steps)
    ranges = []
    for start, stop in ((0, 301), (301, 302), (302, 556), (556, 556), (556, 1000)):
        part = nn.Parameter(cut.detach().view(-1)[start:stop])
        part.offload_range = (0, start)  # type: ignore[attr-defined]
        ranges.append((start, stop, part))
    apart.param_groups[0]["params"] = [part for _, _, part in ranges]
    for step in steps:
        kept = step.clone()
        for start, stop, part in ranges:
            part.grad = step.view(-1)[start:stop]
        apart.step()
        assert torch.equal(step, kept)
    assert torch.equal(whole, cut)
    for key, value in together.state[whole].items():
        if key != "step":
            assert torch.equal(value.view(-1), torch.cat([apart.state[part][key] for _, _, part in ranges])), key


def test_random_bits_are_uniform_and_belong_to_one_place() -> None:
    """Other bits for each element, step, parameter and purpose; not a shift of those of another."""
    device = torch.device("cpu")
    keys = [
        formats.tensor_key(formats.random_key(seed, step, purpose), position)
        for seed in (0, 1)
        for step in (1, 2)
        for purpose in (0, 1)
        for position in (0, 1)
    ]
    assert len(set(keys)) == len(keys)
    count = 1 << 16
    streams = torch.stack([formats.random_bits(0, count, key, device) for key in keys]).double()
    assert streams.min() == 0 and streams.max() == 65535
    assert (streams.mean(dim=1) - 32767.5).abs().max() < 5 * 65536 / math.sqrt(12 * count)
    correlation = torch.corrcoef(torch.cat([streams, streams.roll(1, dims=1), streams.roll(2, dims=1)]))
    assert (correlation - torch.eye(len(correlation))).abs().max() < 6 / math.sqrt(count)
    ahead = formats.random_bits(1024, 512, keys[0], device)
    assert torch.equal(ahead, formats.random_bits(0, 2048, keys[0], device)[1024:1536])


def test_a_run_is_a_function_of_its_seed() -> None:
    runs = []
    for seed in (0, 0, 1):
        param = weights(4096)
        optimizer = offload.optim.AdamW([param], state_dtype="bf16", master="stochastic", seed=seed)
        train(optimizer, [param], gradients(5, 4096))
        runs.append(param.detach())
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_layouts_of_memory() -> None:
    """Transposed and strided parameters and gradients are updated like contiguous ones."""
    plain = weights(48, 64)
    transposed = nn.Parameter(plain.detach().clone().t().contiguous().t())
    room = torch.zeros(48, 128, dtype=torch.bfloat16)
    strided = nn.Parameter(room[:, ::2])
    with torch.no_grad():
        strided.copy_(plain)
    params = [plain, transposed, strided]
    optimizers = [offload.optim.AdamW([p], state_dtype="fp32") for p in params]
    for gradient in gradients(4, 48, 64):
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(plain, transposed)
    assert torch.equal(plain, strided)
    assert torch.equal(room[:, 1::2], torch.zeros(48, 64, dtype=torch.bfloat16))


# Options


def test_groups_have_their_own_hyperparameters_and_formats() -> None:
    params = [weights(512, seed=i) for i in range(3)]
    groups = [
        {"params": [params[0]], "lr": 1e-2},
        {"params": [params[1]], "state_dtype": "fp32", "master": "none", "betas": (0.8, 0.9)},
        {"params": [params[2]], "state_dtype": "bf16", "master": "stochastic", "weight_decay": 0.5},
    ]
    together = offload.optim.AdamW(groups)
    steps = gradients(5, 512)
    train(together, params, steps)
    # Alone, each at its position: random bits depend on it.
    for position, group in enumerate(groups):
        alone = [weights(512, seed=i) for i in range(3)]
        optimizer = offload.optim.AdamW(alone)
        optimizer.param_groups[0].update({k: v for k, v in group.items() if k != "params"})
        for gradient in steps:
            alone[position].grad = gradient
            optimizer.step()
        assert torch.equal(alone[position], params[position])


@pytest.mark.parametrize(("state", "master"), [("fp32", "split"), ("int8", "split"), ("bf16", "stochastic")])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_gradient_scale_is_that_of_the_gradients(name: str, state: str, master: str) -> None:
    """A factor that is a power of two is exact wherever it is applied."""
    runs = []
    for scale in (None, torch.tensor(0.25)):
        param = weights(4096)
        optimizer = getattr(offload.optim, name)([param], weight_decay=0.1, state_dtype=state, master=master)
        optimizer.gradient_scale = scale
        train(optimizer, [param], [g if scale is None else g * 4 for g in gradients(5, 4096)])
        runs.append((param.detach(), optimizer.state[param]["exp_avg_sq"]))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


def test_a_grad_scaler_hands_its_scale_over_and_skips_infinities() -> None:
    runs = []
    for use_scaler in (False, True):
        param = weights(512, dtype=torch.float32)
        optimizer = offload.optim.AdamW([param])
        scaler = torch.amp.GradScaler("cpu", enabled=use_scaler, init_scale=2.0**10, growth_interval=2)
        steps = gradients(5, 512, dtype=torch.float32)
        if use_scaler:
            steps.insert(2, torch.full((512,), torch.inf))
        for gradient in steps:
            optimizer.zero_grad()
            scaler.scale((param * gradient).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.state[param]["step"].item() == 5
        runs.append(param.detach())
    assert torch.equal(*runs)


def test_schedulers_and_closures() -> None:
    param = weights(512)
    optimizer = offload.optim.AdamW([param], lr=torch.tensor(1e-2))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    before = param.detach().clone()
    assert optimizer.step(closure).item() == pytest.approx((before.float() ** 2).sum().item(), rel=0.02)
    moved = param.detach().clone()
    assert not torch.equal(moved, before)
    scheduler.step()
    optimizer.step(closure)
    assert torch.equal(param, moved)


def test_parameters_without_gradients_stay_as_they_are() -> None:
    trained, frozen = weights(512), weights(512)
    optimizer = offload.optim.AdamW([frozen, trained])
    train(optimizer, [trained], gradients(1, 512))
    assert frozen not in optimizer.state
    assert torch.equal(frozen, weights(512))
    optimizer.zero_grad()
    optimizer.step()  # nothing to do
    empty = nn.Parameter(torch.zeros(0, dtype=torch.bfloat16))
    empty.grad = torch.zeros_like(empty)
    offload.optim.AdamW([empty]).step()


REFUSALS = [
    ({"amsgrad": True}, "amsgrad=True: AdamW keeps no third moment; set amsgrad=False or use torch.optim.AdamW"),
    ({"state_dtype": "int4"}, "state_dtype='int4': expected one of fp32, bf16, int8; did you mean int8?"),
    ({"state_dtype": "fp8"}, "state_dtype='fp8': expected one of fp32, bf16, int8"),
    ({"master": "splitt"}, "master='splitt': expected one of none, stochastic, split, split24; did you mean split?"),
    ({"lr": -1.0}, "lr=-1.0: expected at least 0"),
    ({"betas": (0.9, 1.0)}, r"betas\[1\]=1.0: expected at least 0 and less than 1.0"),
    ({"eps": -1e-8}, "eps=-1e-08: expected at least 0"),
    ({"weight_decay": math.nan}, "weight_decay=nan: expected at least 0"),
]


@pytest.mark.parametrize(("options", "message"), REFUSALS)
def test_what_is_not_supported_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        offload.optim.AdamW([weights(4)], **options)
    optimizer = offload.optim.AdamW([weights(4)])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [weights(4)], **options})
    assert len(optimizer.param_groups) == 1


def test_other_dtypes_and_sparse_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match="parameter 1 of group 0 is torch.float16: AdamW takes torch.float32 and"):
        offload.optim.AdamW([weights(4), weights(4, dtype=torch.float16)])
    before, embedding = weights(4), nn.Embedding(8, 4, sparse=True)
    before.grad = torch.ones_like(before)
    optimizer = offload.optim.Adam([before, *embedding.parameters()])
    optimizer.step()
    weight = before.detach().clone()
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients; build the embedding with sparse=False"):
        optimizer.step()
    assert optimizer.state[before]["step"] == 1 and torch.equal(before, weight), "nothing has been updated"


# States


BYTES = {"fp32": 8.0, "bf16": 4.0, "int8": 2 + 8 / 256}


@pytest.mark.parametrize(("state", "master"), FORMATS)
def test_bytes_of_state(state: str, master: str) -> None:
    param = weights(1024, 256)
    optimizer = offload.optim.AdamW([param], state_dtype=state, master=master)
    train(optimizer, [param], gradients(1, 1024, 256))
    held = sum(v.nbytes for k, v in optimizer.state[param].items() if k != "step")
    assert held / param.numel() == BYTES[state] + {"split": 2, "split24": 1}.get(master, 0)


@pytest.mark.parametrize(("state", "master"), FORMATS)
def test_a_saved_state_goes_on_bit_for_bit(state: str, master: str, tmp_path: Any) -> None:
    steps = gradients(8, 1000)
    whole, first = weights(1000), weights(1000)
    uninterrupted = offload.optim.AdamW([whole], state_dtype=state, master=master)
    train(uninterrupted, [whole], steps)
    before = offload.optim.AdamW([first], state_dtype=state, master=master, lr=1e-3)
    train(before, [first], steps[:4])
    torch.save(before.state_dict(), tmp_path / "state.pt")
    second = nn.Parameter(first.detach().clone())
    after = offload.optim.AdamW([second], state_dtype=state, master=master, lr=5.0)
    after.load_state_dict(torch.load(tmp_path / "state.pt"))
    train(after, [second], steps[4:])
    assert torch.equal(second, whole)
    train(before, [first], steps[4:])  # what was loaded is the other optimizer's own
    assert torch.equal(first, whole)


@pytest.mark.parametrize(("state", "master"), FORMATS)
def test_a_run_moves_to_plain_adamw_and_back(state: str, master: str) -> None:
    """fp32 moments and masters arrive to the last bit; what a format cannot hold is rounded once."""
    steps = gradients(6, 1000, decades=0.5)
    param = weights(1000)
    packed = offload.optim.AdamW([param], state_dtype=state, master=master)
    train(packed, [param], steps[:3])
    plain_state = offload.optim.to_plain(packed)
    saved = plain_state["state"][0]
    assert {k: v.dtype for k, v in saved.items()} == dict.fromkeys(saved, torch.float32)
    assert ("master" in saved) == (master in formats.REMAINDERS)

    wide = nn.Parameter(saved.get("master", param.detach().float()).clone())
    plain = torch.optim.AdamW([wide], lr=1.0)
    plain.load_state_dict(plain_state)
    assert plain.param_groups[0]["lr"] == 1e-3
    train(plain, [wide], steps[3:])

    back = nn.Parameter(formats.split_master(wide.detach())[0])
    again = offload.optim.AdamW([back], state_dtype=state, master=master)
    again.load_state_dict(offload.optim.from_plain(plain.state_dict(), [wide]))
    assert again.param_groups[0]["state_dtype"] == state and again.param_groups[0]["master"] == master
    exact = wide.detach() if master in formats.REMAINDERS else back.detach().float()
    if master == "split24":
        assert ((master_of(again, back) - exact).abs() <= 2.0**-15 * exact.abs()).all()
    else:
        assert torch.equal(master_of(again, back), exact)
    tolerance = {"fp32": 0.0, "bf16": 1 / 256, "int8": 1 / 8}[state]
    moments = offload.optim.to_plain(again)["state"][0]
    largest = plain.state[wide]["exp_avg"].abs().max().item()
    torch.testing.assert_close(
        moments["exp_avg"], plain.state[wide]["exp_avg"], rtol=tolerance, atol=largest / 64 if tolerance else 0.0
    )
    torch.testing.assert_close(moments["exp_avg_sq"], plain.state[wide]["exp_avg_sq"], rtol=tolerance, atol=0.0)
    train(again, [back], steps[3:])


@pytest.mark.parametrize(("state", "master"), FORMATS)
def test_states_load_into_every_other_format(state: str, master: str) -> None:
    steps = gradients(3, 1000, decades=0.5)
    param = weights(1000)
    source = offload.optim.AdamW([param], state_dtype=state, master=master)
    train(source, [param], steps)
    expected = offload.optim.to_plain(source)["state"][0]
    for other_state, other_master in FORMATS:
        copy = nn.Parameter(param.detach().clone())
        target = offload.optim.AdamW([copy], state_dtype=other_state, master=other_master)
        target.load_state_dict(source.state_dict())
        now = offload.optim.to_plain(target)["state"][0]
        assert now["step"].item() == 3
        tolerance = {"fp32": 0.0, "bf16": 1 / 256, "int8": 1 / 8}[other_state]
        torch.testing.assert_close(now["exp_avg_sq"], expected["exp_avg_sq"], rtol=tolerance, atol=0.0)
        if master == other_master or (master, other_master) == ("split24", "split"):
            assert torch.equal(now.get("master", copy), expected.get("master", param))
        elif (master, other_master) == ("split", "split24"):
            assert ((now["master"] - expected["master"]).abs() <= 2.0**-15 * expected["master"].abs()).all()
        train(target, [copy], steps)


def test_a_state_with_codes_of_earlier_versions_is_converted() -> None:
    """Of groups without the option ``codes``; what they stand for is written here once more."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randint(1, 256, (700,), generator=generator).to(torch.uint8)
    m = torch.randint(-127, 128, (700,), generator=generator).to(torch.int8)
    m_scale, v_scale = torch.rand(2, 3, generator=generator) + 0.5
    param = weights(700)
    for state in ("fp32", "int8"):
        optimizer = offload.optim.AdamW([param], state_dtype=state, master="none")
        train(optimizer, [param], gradients(1, 700))
        saved = optimizer.state_dict()
        saved["state"][0] = {
            "step": torch.tensor(3.0),
            "exp_avg": m,
            "exp_avg_sq": v,
            "exp_avg_scale": m_scale,
            "exp_avg_sq_scale": v_scale,
        }
        saved["param_groups"][0]["state_dtype"] = "int8"
        del saved["param_groups"][0]["codes"]
        optimizer.load_state_dict(saved)
        block = torch.arange(700) // formats.BLOCK
        octave, step = v.double().div(32, rounding_mode="floor"), v.double() % 32
        root = ((1 + step / 32) * 2 ** (octave - 8) - 2**-8) / (63 / 64 - 2**-8) * v_scale[block]
        eps = 1e-8 * math.sqrt(1 - 0.999**3)
        ratio = m.double() / 127 * m_scale[block]
        loaded = offload.optim.to_plain(optimizer)["state"][0]
        rtol, atol = (2e-6, 0.0) if state == "fp32" else (0.07, 0.015)
        torch.testing.assert_close(loaded["exp_avg_sq"].double(), root.square(), rtol=rtol, atol=0.0)
        torch.testing.assert_close(loaded["exp_avg"].double(), ratio * (root + eps), rtol=rtol, atol=atol)
        assert optimizer.state_dict()["param_groups"][0]["codes"] == "ratios"


def test_a_state_with_moments_of_8_bits_is_converted() -> None:
    """Of groups whose ``codes`` are "moments", where beta2 was below 0.5; what they stand for is written once more."""
    generator = torch.Generator().manual_seed(0)
    m, v = (torch.randint(0, 256, (700,), generator=generator) for _ in range(2))
    m[m == 128] = 0  # there is no -128
    m_scale = torch.rand(3, generator=generator) + 0.5
    width = torch.tensor([3, 40, 120])
    m_scale = (m_scale.view(torch.int32) & -256 | width.int()).view(torch.float32)
    v_scale = torch.tensor([0.3, 7e-3, 2e-4])
    param = weights(700)
    optimizer = offload.optim.AdamW([param], state_dtype="fp32", betas=(0.9, 0.2), master="none")
    train(optimizer, [param], gradients(1, 700))
    saved = optimizer.state_dict()
    saved["state"][0] = {
        "step": torch.tensor(3.0),
        "exp_avg": m.to(torch.uint8).view(torch.int8),
        "exp_avg_sq": v.to(torch.uint8),
        "exp_avg_scale": m_scale,
        "exp_avg_sq_scale": v_scale,
    }
    saved["param_groups"][0].update(state_dtype="int8", codes="moments")
    block = torch.arange(700) // formats.BLOCK
    bits = v_scale.view(torch.int32)[block] - (254 - v) * (width[block] << 12)
    root = torch.where(v == 0, 0.0, bits.to(torch.int32).view(torch.float32))
    signed = m.double() - 256 * (m > 127)
    share = (signed / 127) ** 2 * signed.sign()
    for target, rtol, atol in (("fp32", 3e-6, 0.0), ("int8", 0.1, 0.015)):
        again = offload.optim.AdamW([param], state_dtype=target, betas=(0.9, 0.2), master="none")
        again.load_state_dict(saved)
        loaded = offload.optim.to_plain(again)["state"][0]
        torch.testing.assert_close(loaded["exp_avg_sq"].double(), root.double().square(), rtol=2 * rtol, atol=0.0)
        torch.testing.assert_close(loaded["exp_avg"].double(), share * m_scale[block].double(), rtol=rtol, atol=atol)
        assert again.param_groups[0]["codes"] == "moments of 9 bits"
        train(again, [param], gradients(1, 700))


@pytest.mark.parametrize("kind", [None, "moments", "ratios", "moments of 9 bits"])
@pytest.mark.parametrize("load", ["load_state_dict", "unpacked"])
def test_a_state_in_fp8_is_refused(kind: str | None, load: str) -> None:
    """Earlier versions had such a format, of the same tensors as int8: its codes would be taken for other numbers."""
    param = weights(700)
    optimizer = offload.optim.AdamW([param])
    train(optimizer, [param], gradients(1, 700))
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(state_dtype="fp8", codes=kind)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"state_dtype='fp8'.*state_dtype='int8' with the version that wrote it.*anew"):
        if load == "unpacked":
            offload.optim.unpacked(saved, [param])
        else:
            optimizer.load_state_dict(saved)
    for key, value in before["state"][0].items():
        assert torch.equal(optimizer.state_dict()["state"][0][key], value)
    assert optimizer.param_groups[0]["state_dtype"] == "int8"


def test_codes_stay_what_they_are_when_betas_change() -> None:
    """And a loaded state has those that are best for its betas."""
    params = [weights(1000), weights(1000)]
    for param, betas in zip(params, ((0.9, 0.999), (0.9, 0.1)), strict=True):
        optimizer = offload.optim.AdamW([param], betas=betas, lr=0.0)
        train(optimizer, [param], gradients(3, 1000, decades=1))
        other = (0.9, 0.1) if betas[1] > 0.5 else (0.9, 0.999)
        before = offload.optim.to_plain(optimizer)["state"][0]["exp_avg"]
        optimizer.param_groups[0]["betas"] = other
        train(optimizer, [param], [torch.zeros(1000, dtype=torch.bfloat16)])
        after = offload.optim.to_plain(optimizer)["state"][0]["exp_avg"]
        torch.testing.assert_close(after, 0.9 * before, rtol=0.05, atol=before.abs().max().item() / 64)
        again = offload.optim.AdamW([nn.Parameter(param.detach().clone())], betas=betas)
        again.load_state_dict(optimizer.state_dict())
        assert again.param_groups[0]["codes"] != optimizer.param_groups[0]["codes"]
        moved = offload.optim.to_plain(again)["state"][0]["exp_avg"]
        torch.testing.assert_close(moved, after, rtol=0.05, atol=after.abs().max().item() / 64)


@pytest.mark.parametrize("state", formats.STATE_DTYPES)
def test_optimizers_that_know_no_packed_state_get_moments(state: str) -> None:
    param, copy = weights(1000), weights(1000)
    source = offload.optim.AdamW([param], state_dtype=state)
    train(source, [param], gradients(3, 1000))
    expected = offload.optim.to_plain(source)["state"][0]
    for target in (torch.optim.AdamW([copy]), OffloadOptimizer([copy], "torch.optim.AdamW", strategy="host")):
        saved = source.state_dict()
        if not isinstance(target, OffloadOptimizer):  # which does it itself
            saved = offload.optim.unpacked(saved, [copy])
        target.load_state_dict(saved)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(target.state[copy][key], expected[key].bfloat16())
        train(target, [copy], gradients(1, 1000))
    plain = target.state_dict()
    assert offload.optim.unpacked(plain, [copy]) is plain


def test_masters_that_do_not_belong_to_the_parameters_are_refused() -> None:
    wide = weights(300, dtype=torch.float32)
    plain = torch.optim.AdamW([wide])
    train(plain, [wide], gradients(1, 300))
    state = offload.optim.from_plain(plain.state_dict(), [wide])
    other = weights(300, seed=5)
    optimizer = offload.optim.AdamW([other])
    with pytest.raises(
        ValueError, match="parameter 0 of group 0: the parameter is not its fp32 master rounded to bf16"
    ):
        optimizer.load_state_dict(state)
    rounded_to_even = nn.Parameter(wide.detach().bfloat16())
    offload.optim.AdamW([rounded_to_even]).load_state_dict(state)


def test_a_tie_that_was_rounded_to_even_is_one_unit_off() -> None:
    bits = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000], dtype=torch.int32)  # of each, half of a bf16 step
    master = bits.view(torch.float32)
    param = master.bfloat16()
    joined = formats.join_master(param, formats.remainder_of(master, param))
    assert (joined.view(torch.int32) - bits).abs().max() <= 1
    hi, lo = formats.split_master(master)
    assert torch.equal(formats.join_master(hi, lo), master)


@pytest.mark.parametrize("change", ["groups", "shape", "keys"])
def test_states_that_do_not_fit_are_refused(change: str) -> None:
    param, other = weights(8, 4), weights(8, 4)
    source = offload.optim.AdamW([param])
    train(source, [param], gradients(1, 8, 4))
    saved = source.state_dict()
    if change == "groups":
        target, message = offload.optim.AdamW([other, weights(3)]), r"groups of sizes \[1\], this optimizer has 1 of"
    elif change == "shape":
        target, message = offload.optim.AdamW([weights(4, 8)]), r"parameter 0 of group 0: .* shape \(8, 4\), expected"
    else:
        saved["state"][0] = {"momentum_buffer": torch.zeros(8, 4)}
        target, message = offload.optim.AdamW([other]), "expected a state of Adam .* got momentum_buffer"
    with pytest.raises(ValueError, match=message):
        target.load_state_dict(saved)
    assert not target.state


def test_masters_of_24_bits_are_rounded_up_as_often_as_they_lie_above() -> None:
    """Over all exponents and signs: the two nearest numbers of 24 bits, whose mean is the master; and back exactly."""
    bits = torch.arange(-(1 << 31), 1 << 31, 65_521, dtype=torch.int64).to(torch.int32)
    masters = bits.view(torch.float32)
    masters = masters[masters.isfinite() & (masters.abs() < 3e38)]
    units = masters.view(torch.int32)
    mean = torch.zeros(len(masters), dtype=torch.float64)
    for drawn in range(128, 1 << 16, 256):
        param, remainder = formats.split_master24(masters, torch.full_like(units, drawn))
        joined = formats.join_master(param, remainder)
        off = joined.view(torch.int32).long() - units
        assert (joined.view(torch.int32) & 0xFF == 0).all() and (off.abs() < 256).all()
        again, rest = formats.split_master24(joined, torch.full_like(units, drawn))
        assert torch.equal(again, param) and torch.equal(rest, remainder)
        assert torch.equal(param, formats.split_master(joined)[0])
        mean += off / 256
    assert mean.abs().max() == 0
    infinite = torch.tensor([math.inf, -math.inf, math.nan])
    assert torch.equal(
        formats.join_master(*formats.split_master24(infinite, torch.full((3,), 65535, dtype=torch.int32)))[:2],
        infinite[:2],
    )


@pytest.mark.parametrize("has_ratios", [True, False])
def test_a_block_of_what_counts_as_zero_has_no_steps_and_decodes_to_zero(has_ratios: bool) -> None:
    """Of a row that no gradient reached yet; its neighbours keep theirs."""
    root = torch.tensor([0.0, 2.0**-125, 1.0]).repeat_interleave(formats.BLOCK)
    step, top = codes.steps(root, torch.zeros(3), has_ratios)
    assert (step > 0).tolist() == [False, False, True]
    assert torch.equal(top.view(torch.float32), torch.tensor([0.0, 2.0**-125, 1.0]))
    first = torch.zeros(len(root), dtype=torch.int8), torch.zeros(3)
    stored = torch.zeros(len(root), dtype=torch.uint8), torch.zeros(3)
    up = codes.thresholds(0, len(root), 0, root.device)
    codes.encode(torch.zeros_like(root), root, up, *first, *stored, 0.0, has_ratios)
    m, v = codes.decode(*first, *stored, 0.0, has_ratios)
    assert not m.any() and torch.equal(v, torch.tensor([0.0, 0.0, 1.0]).repeat_interleave(formats.BLOCK))


@pytest.mark.parametrize("has_ratios", [True, False])
def test_roots_are_the_nearest_two_steps_and_zero_alone_is_zero(has_ratios: bool) -> None:
    """Of every width, element by element: a code is a step away at most, as far up as down on average.

    254 steps beside ratios, 126 beside moments.
    """
    grain, largest = codes.grain(has_ratios), codes.largest_root(has_ratios)
    assert largest == (254 if has_ratios else 2 * 126)
    generator = torch.Generator().manual_seed(0)
    octaves = torch.linspace(0, 20.5, 400)[:, None]
    root = 2 ** (5 - octaves * torch.rand(400, formats.BLOCK, generator=generator))
    root[:, 7] = 0.0
    root = root.view(-1)
    block = torch.arange(len(root)) // formats.BLOCK
    width = codes.steps(root, torch.zeros(400), has_ratios)[0] >> codes.WIDTH_SHIFT
    assert width.min() == 1 and width.max() == codes.WIDEST and len(width.unique()) > 100
    units = root.view(torch.int32)
    off = torch.zeros(len(root), dtype=torch.float64)
    drawn = range(0, 1 << 16, 1 << 10)
    for threshold in drawn:
        first = torch.zeros(len(root), dtype=torch.int8), torch.zeros(400)
        stored = torch.zeros(len(root), dtype=torch.uint8), torch.zeros(400)
        up = torch.full_like(units, threshold)
        codes.encode(torch.zeros_like(root), root, up, *first, *stored, 0.0, has_ratios)
        assert torch.equal(stored[0] == 0, root == 0)
        v = codes.decode(*first, *stored, 0.0, has_ratios)[1]
        step = (v.sqrt().view(torch.int32) - units).double() / (width[block] * grain << codes.WIDTH_SHIFT)
        is_in_reach = (root > 0) & (
            units >= stored[1].view(torch.int32)[block] - (largest - grain) * (width[block] << 12)
        )
        assert step[is_in_reach].abs().max() < 1.01
        off += step
    assert is_in_reach[root > 0].double().mean() > 0.99
    assert (off[is_in_reach] / len(drawn)).abs().max() < 0.03


@pytest.mark.parametrize("has_ratios", [True, False])
def test_no_width_of_steps_rounds_a_step_to_zero_or_past_8_bits(has_ratios: bool) -> None:
    grain, largest = codes.grain(has_ratios), codes.largest_root(has_ratios)
    for width in range(1, codes.WIDEST + 1):
        step = torch.tensor([width << codes.WIDTH_SHIFT], dtype=torch.int32)
        inverse = 1 / step.float() * codes.STEP
        one, most = ((n * step).float() * inverse for n in (grain, largest))
        assert one.to(torch.int32) >> 16 == grain and most.to(torch.int32) + 0xFFFF * grain >> 16 <= 255


@pytest.mark.parametrize("betas", [(0.0, 0.999), (0.5, 0.95), (0.9, 0.999), (0.99, 0.9), (0.9, 0.3)])
def test_what_rounding_takes_from_a_ratio_reaches_the_parameter(betas: tuple[float, float]) -> None:
    """Of what is missing in the steps to come, beta1 + beta1^2 + ..., the share that the docstring states.

    Of moments nothing does, which are stored where beta2 is small.
    """
    beta1, beta2 = betas
    lr, eps, count = 0.1, 1e-8, 4
    param = weights(1000, dtype=torch.float32)
    optimizer = offload.optim.AdamW([param], lr=lr, betas=betas, eps=eps, weight_decay=0.0)
    *first, last = gradients(count, 1000, decades=1)
    train(optimizer, [param], first)
    before = offload.optim.to_plain(optimizer)["state"][0]
    start = param.detach().double()
    train(optimizer, [param], [last])
    after = offload.optim.to_plain(optimizer)["state"][0]
    correction = math.sqrt(1 - beta2**count)
    wide = last.double()
    root = (beta2 * before["exp_avg_sq"].double() + (1 - beta2) * wide.square()).sqrt() + eps * correction
    ratio = (beta1 * before["exp_avg"].double() + (1 - beta1) * wide) / root
    stored = after["exp_avg"].double() / (after["exp_avg_sq"].double().sqrt() + eps * correction)
    to_come = sum(beta1**k for k in range(1, 5000))
    share = 1 / (1 + 1 / (20 * (1 - beta1))) if beta2 > 0.7 else 0.0
    expected = start - lr * correction * (ratio / (1 - beta1**count) + to_come * share * (ratio - stored))
    torch.testing.assert_close(param.detach().double(), expected, rtol=1e-6, atol=2e-6)
    if beta1 and share:
        assert (lr * correction * to_come * share * (ratio - stored)).abs().max() > 1e-5


def test_ratios_that_grow_when_gradients_fall_silent_are_not_stored() -> None:
    """Heavy tails over six decades: with ratios at beta2 of 0.5 or 0.6, weights strayed by 10^10 times their way."""
    generator = torch.Generator().manual_seed(0)
    scale = 10 ** (-6 * torch.rand(2048, generator=generator))
    for beta2 in (0.5, 0.6):
        param = nn.Parameter(torch.zeros(2048))
        wide = nn.Parameter(torch.zeros(2048, dtype=torch.float64))
        optimizer = offload.optim.AdamW([param], lr=1e-4, betas=(0.9, beta2), weight_decay=0.0)
        exact = torch.optim.AdamW([wide], lr=1e-4, betas=(0.9, beta2), weight_decay=0.0)
        for _ in range(400):
            noise = torch.randn(6, 2048, generator=generator)
            gradient = scale * noise[0] * (5 / noise[1:].square().sum(dim=0)).sqrt()
            train(optimizer, [param], [gradient])
            train(exact, [wide], [gradient.double()])
        assert (param.detach() - wide.detach()).norm() < 10 * wide.detach().norm(), beta2


def test_every_master_survives_being_split() -> None:
    """Over all exponents and signs, the halves of rounding and the largest values included."""
    bits = torch.arange(-(1 << 31), 1 << 31, 65_521, dtype=torch.int64).to(torch.int32)
    edges = torch.tensor([0, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x7F7FFFFF, 0x7F800000], dtype=torch.int32)
    values = torch.cat([bits, edges, edges | -(1 << 31)]).view(torch.float32)
    values = values[~values.isnan()]
    param, remainder = formats.split_master(values)
    assert torch.equal(formats.join_master(param, remainder), values)
    nearest = values.bfloat16()
    is_tie = values.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(param[~is_tie], nearest[~is_tie])
