"""A frozen model in torchtune's NF4, divided among processes beside its adapter."""

from __future__ import annotations

import torch

from tests.distributed.ranks import Ranks


def _train(divided: bool) -> dict[str, torch.Tensor]:
    """The adapter's gradients, and the merged weights, of one batch."""
    from offload import torchao_shim

    torchao_shim.install()
    from torchtune.models.llama2 import lora_llama2

    from offload.distributed.sharding import find_mesh, shard
    from offload.distributed.world import current
    from offload.models.tensors import whole
    from offload.models.torchtune import AdaptedTorchtuneModel
    from offload.models.torchtune.lora import prepare_adapter

    torch.manual_seed(0)
    module = lora_llama2(
        ["q_proj", "v_proj"], vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=4, embed_dim=256,
        intermediate_dim=512, max_seq_len=32, apply_lora_to_mlp=True, lora_rank=4, lora_alpha=8, quantize_base=True,
    )  # fmt: skip
    for name, param in module.named_parameters():
        if name.endswith("lora_b.weight"):
            torch.nn.init.normal_(param, std=0.02)
    prepare_adapter(module)
    model = AdaptedTorchtuneModel(module)
    if divided:
        shard(module, model.blocks(), find_mesh(current(), torch.device("cpu")))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(64, (2, 16), generator=generator)
    mine = tokens[torch.distributed.get_rank() :][:1] if divided else tokens
    model.logits({"tokens": mine}).float().pow(2).sum().backward()
    found = {f"gradient of {n}": whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}
    return found | {f"merged {name}": weight.clone() for name, weight in model.merged_weights().items()}


def test_nf4_beside_an_adapter(ranks: Ranks) -> None:
    want = _train(False)
    for got in ranks.run(2, _train, True):
        assert got.keys() == want.keys() and any("lora" in name for name in got)
        for name, tensor in want.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-4 * float(tensor.abs().max()), msg=name)
