from __future__ import annotations
from pathlib import Path
from typing import Any
import pytest
LORA = "lora_finetune_single_device"

@pytest.mark.parametrize("extra", [(), ("model.use_dora=True",), ("enable_activation_checkpointing=True",), ("save_adapter_weights_only=True",), ("model.quantize_base=True",), ("model=torchtune.models.llama2.llama2",),
  ("compile=True",), ("model.lora_attn_modules=[]","model.apply_lora_to_mlp=False")])
def test_x(workspace: Any, tmp_path: Path, extra: tuple[str, ...]) -> None:
    import time
    t = time.time()
    r = workspace.run(tmp_path / "run", *extra, recipe=LORA)
    print(r.status, r.err[-1500:], r.out[-600:], time.time() - t)
    print(sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")))
