"""torchtune 0.6.1 on today's torchao: everything imports, NF4 works, the rest says why it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offload import torchao_shim

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def installed():
    torchao_shim.install()


def test_torchtune_imports_and_nothing_is_said_about_unused_kernels():
    program = (
        "from offload import torchao_shim; torchao_shim.install()\n"
        "import torchtune.training, torchtune.models, torchtune.modules.peft, torchtune.rlhf\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Failed to load" not in done.stderr and "cpp extensions" not in done.stderr


def test_nf4_rounds_to_the_nearest_of_sixteen_levels():
    from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4

    torch.manual_seed(0)
    weight = torch.randn(256, 64)
    stored = to_nf4(weight)
    assert isinstance(stored, NF4Tensor)
    back = stored.to(weight.dtype).reshape(-1, 64)  # one scale per block of 64
    blocks = weight.reshape(-1, 64)
    scale = blocks.abs().amax(dim=1, keepdim=True)
    # The widest gap between two levels is 0.304 of the scale; the scale itself is rounded to 8 bits of the
    # spread of the scales.
    assert (back - blocks).abs().le(0.17 * scale).all()
    assert len(torch.unique((back[0] / back[0].abs().max()).round(decimals=4))) <= 16


def test_a_qlora_model_trains():
    """Only the adapters get gradients, the frozen weights stay NF4, and the loss falls."""
    from torchao.dtypes.nf4tensor import NF4Tensor
    from torchtune.models.llama2 import lora_llama2
    from torchtune.modules.peft import get_adapter_params, set_trainable_params

    torch.manual_seed(0)
    # 256 * 64 is the least number of elements that NF4 with its default block sizes takes.
    model = lora_llama2(
        ["q_proj", "v_proj", "output_proj"],
        apply_lora_to_mlp=True,
        vocab_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        embed_dim=256,
        intermediate_dim=512,
        max_seq_len=16,
        lora_rank=4,
        lora_alpha=8,
        quantize_base=True,
    )
    adapters = get_adapter_params(model)
    set_trainable_params(model, adapters)
    frozen = {name: p for name, p in model.named_parameters() if isinstance(p, NF4Tensor)}
    assert len(frozen) == 7  # four matrices of the attention, three of the MLP
    before = {name: p.to(torch.float32).clone() for name, p in frozen.items()}

    tokens = torch.randint(0, 32, (4, 9))
    optimizer = torch.optim.AdamW(adapters.values(), lr=1e-2)
    losses = []
    for _ in range(20):
        logits = model(tokens[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        assert {name for name, p in model.named_parameters() if p.grad is not None} == set(adapters)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    for name, p in frozen.items():
        assert torch.equal(p.to(torch.float32), before[name])


def test_the_frozen_weight_multiplies_as_its_dequantized_value_does():
    from torchao.dtypes.nf4tensor import linear_nf4, to_nf4

    torch.manual_seed(0)
    weight = to_nf4(torch.randn(256, 64))
    x = torch.randn(3, 64, requires_grad=True)
    y = linear_nf4(x, weight)
    dense = weight.to(torch.float32)
    torch.testing.assert_close(y, x.detach() @ dense.T, rtol=0, atol=0)
    y.sum().backward()
    torch.testing.assert_close(x.grad, dense.sum(0).expand(3, 64), rtol=1e-5, atol=1e-4)


def test_a_removed_quantizer_says_so_when_it_is_used():
    from torchtune.training.quantization import Int4WeightOnlyQuantizer, Int8DynActInt4WeightQuantizer

    for quantizer in (Int4WeightOnlyQuantizer(), Int8DynActInt4WeightQuantizer()):
        with pytest.raises(NotImplementedError, match="does not exist in torchao"):
            quantizer.quantize(torch.nn.Linear(256, 256))


OLD_TORCHAO = {
    "torchao/__init__.py": "__version__ = '0.15.0'",
    "torchao/dtypes/__init__.py": "TensorCoreTiledLayout = NF4Tensor = to_nf4 = 'own'",
    "torchao/dtypes/nf4tensor.py": "NF4Tensor = to_nf4 = 'own'",
    "torchao/quantization/__init__.py": "int4_weight_only = int8_dynamic_activation_int4_weight = 'own'",
}
NF4 = "torchao/quantization/quantize_/workflows/nf4"
NEW_TORCHAO = {
    "torchao/__init__.py": "__version__ = '0.18.0'",
    "torchao/dtypes/__init__.py": "",
    "torchao/quantization/__init__.py": "",
    "torchao/quantization/quantize_/__init__.py": "",
    "torchao/quantization/quantize_/workflows/__init__.py": "",
    f"{NF4}/__init__.py": "",
    f"{NF4}/nf4_tensor.py": "NF4Tensor = to_nf4 = 'moved'",
}
REPORT = """
import torchao_shim
torchao_shim.install()
torchao_shim.install()
from torchao.dtypes.nf4tensor import to_nf4
from torchao.dtypes import TensorCoreTiledLayout, NF4Tensor
from torchao.quantization import int4_weight_only, int8_dynamic_activation_int4_weight
print(to_nf4, NF4Tensor, *(getattr(name, "__doc__", name) if not isinstance(name, str) else name
      for name in (TensorCoreTiledLayout, int4_weight_only, int8_dynamic_activation_int4_weight)), sep="|")
"""


def _report(folder: Path, torchao: dict[str, str]) -> str:
    for name, text in torchao.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (folder / "torchao_shim.py").write_text(Path(torchao_shim.__file__).read_text())
    done = subprocess.run([sys.executable, "-S", "-c", REPORT], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_complete_torchao_is_left_alone(tmp_path):
    assert _report(tmp_path, OLD_TORCHAO) == "own|own|own|own|own"


def test_a_torchao_that_moved_nf4_gets_its_names_back(tmp_path):
    assert _report(tmp_path, NEW_TORCHAO) == (
        "moved|moved|Stand-in for torchao.dtypes.TensorCoreTiledLayout.|"
        "Stand-in for torchao.quantization.int4_weight_only.|"
        "Stand-in for torchao.quantization.int8_dynamic_activation_int4_weight."
    )


def test_without_torchao_nothing_happens(tmp_path):
    (tmp_path / "torchao_shim.py").write_text(Path(torchao_shim.__file__).read_text())
    program = "import sys, torchao_shim; torchao_shim.install(); print('torchao' in sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-E", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
