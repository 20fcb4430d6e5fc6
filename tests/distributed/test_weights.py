"""Each rank reads its own part of a model's files, and writes it; what is written is what one process writes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from offload.engine.fsdp import groups_of
from offload.engine.shards import local
from offload.errors import UserError
from offload.models import shares
from offload.models.huggingface import checkpoint as huggingface_checkpoint
from offload.models.huggingface.checkpoint import HuggingFaceFormat
from offload.models.huggingface.loading import from_pretrained
from offload.models.torchtune import checkpoint as torchtune_checkpoint
from offload.models.torchtune.building import build_as_the_base, load_weights
from tests.distributed import weights
from tests.distributed.ranks import Ranks
from tests.models.huggingface import families
from tests.models.torchtune.test_architecture import FAMILIES, write_checkpoint
from tests.recipes.test_async_checkpoints import assert_equal, state_of


def differing(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    assert got.keys() == want.keys()
    return [name for name in want if not torch.equal(got[name], want[name])]


def differing_files(got: Path, want: Path) -> list[str]:
    names = {path.relative_to(folder) for folder in (got, want) for path in folder.rglob("*") if path.is_file()}
    read = [
        {name: (folder / name).read_bytes() if (folder / name).exists() else None for name in names}
        for folder in (got, want)
    ]
    return [str(name) for name in sorted(names) if read[0][name] != read[1][name]]


DTYPES = (torch.float32, torch.bfloat16)


def test_torchtune(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every family: rotary dimensions in another order, fused projections, tied weights."""
    monkeypatch.setattr(torchtune_checkpoint, "SHARD_BYTES", weights.SHARD_BYTES)
    cases = []
    for number, (family, (model_type, path, _)) in enumerate(FAMILIES.items()):
        write_checkpoint(tmp_path / family, family)
        out, dtype = tmp_path / f"{family}_many", DTYPES[number % 2]
        cases.append((str(tmp_path / family), str(out), model_type, f"torchtune.models.{path}", dtype))
    results = ranks.run(3, weights.torchtune_there_and_back, cases)
    for number, (folder, many, model_type, path, dtype) in enumerate(cases):
        format = weights.torchtune_format(folder, model_type)
        format.prepare(tmp_path)
        section = OmegaConf.create({"_component_": path})
        alone = build_as_the_base(
            section, format.base, weights.Tokenizer(), device=weights.CPU, dtype=dtype, tell=lambda note: None
        )
        load_weights(alone, format.load_base(), source="")
        one = tmp_path / f"{Path(folder).name}_one"
        one.mkdir()
        format.write_model(one, alone.state_dict(), lambda file: None)
        want = weights.whole_of(alone)
        assert [differing(result[number], want) for result in results] == [[]] * 3, folder
        assert differing_files(Path(many), one) == [], folder


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(1)),
        (Replicate(), Shard(0)),
        (Shard(0), Replicate()),
        (Shard(1), Shard(2)),
        (Shard(0), Shard(0)),
    ],
    ids=str,
)
def test_a_part_is_told_as_ranges_of_the_whole(placements: tuple[Any, ...], ranks: Ranks) -> None:
    assert ranks.run(4, weights.runs_that_differ, placements) == [[]] * 4


def test_parameters_that_were_given_memory_are_those_that_fsdp_gathers(mesh_of_two: DeviceMesh) -> None:
    """The optimizer asks FSDP for them before it has gathered any, to know which updates a gather waits for."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))  # of three rows this rank has two
    fully_shard(model, mesh=mesh_of_two)
    shares.materialize(model, weights.CPU)
    (group,) = groups_of(model)
    assert {param.sharded_param for param in group.fsdp_params} == set(model.parameters())
    for param in group.fsdp_params:
        assert param._sharded_param_data.data_ptr() == local(param.sharded_param).data_ptr()


SAMPLED = ("qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "gemma3", "llama4_text", "falcon_h1")


def test_transformers(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied, of fused experts, with buffers that are saved, with towers that are not language."""
    monkeypatch.setattr(huggingface_checkpoint, "SHARD_BYTES", weights.SHARD_BYTES)
    cases = []
    for number, family in enumerate(SAMPLED):
        families.save(family, tmp_path / family)
        dtype = DTYPES[number % 2]
        cases.append((str(tmp_path / family), str(tmp_path / f"{family}_many"), dtype))
    results = ranks.run(3, weights.huggingface_there_and_back, cases)
    for number, (folder, many, dtype) in enumerate(cases):
        alone = from_pretrained(folder, device=weights.CPU, dtype=dtype)
        format = HuggingFaceFormat(Path(folder))
        format.model = alone
        one = tmp_path / f"{Path(folder).name}_one"
        format.write_model(one, alone.module.state_dict(), lambda file: None)
        want = weights.whole_of(alone.module)
        assert [differing(result[number], want) for result in results] == [[]] * 3, folder
        assert differing_files(Path(many), one) == [], folder


TIED_ACROSS_LAYERS = ("zamba", "zamba2")


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in families.FAMILIES if name not in families.REFUSED])
def test_every_family_of_transformers(family: str, ranks: Ranks, tmp_path: Path) -> None:
    families.save(family, tmp_path / "base")
    try:
        alone = from_pretrained(tmp_path / "base", device=weights.CPU, dtype=torch.float32)
    except UserError as error:
        pytest.skip(str(error))
    case = (str(tmp_path / "base"), str(tmp_path / "many"), torch.float32)
    if family in TIED_ACROSS_LAYERS:
        with pytest.raises(RuntimeError, match="is tied to a weight of another layer"):
            ranks.run(2, weights.huggingface_there_and_back, [case])
        return
    (result,) = ranks.run(2, weights.huggingface_there_and_back, [case])[0]
    assert differing(result, weights.whole_of(alone.module)) == []
    format = HuggingFaceFormat(tmp_path / "base")
    format.model = alone
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_checkpoint, "SHARD_BYTES", weights.SHARD_BYTES)
        format.write_model(tmp_path / "one", alone.module.state_dict(), lambda file: None)
    assert differing_files(tmp_path / "many", tmp_path / "one") == []


def adapter_cases(tmp_path: Path) -> tuple[tuple[Any, Any, Any], ...]:
    """(model, checkpointer, adapter) of torchtune and of transformers."""
    write_checkpoint(tmp_path / "llama", "llama3")
    families.save("qwen3", tmp_path / "qwen")
    torchtune = {"_component_": "torchtune.models.llama3.lora_llama3", "lora_attn_modules": ["q_proj", "v_proj"]}
    checkpointer = {"_component_": "torchtune.training.FullModelHFCheckpointer", "model_type": "LLAMA3"}
    peft = {"_component_": "peft.LoraConfig", "target_modules": "all-linear", "init_lora_weights": "gaussian"}
    checkpointer["checkpoint_dir"] = str(tmp_path / "llama")
    return (
        ({**torchtune, "lora_rank": 4, "lora_alpha": 8}, checkpointer, None),
        ({"_component_": "offload.models.huggingface.from_pretrained", "path": str(tmp_path / "qwen")}, None, peft),
    )


def test_adapters(ranks: Ranks, tmp_path: Path) -> None:
    """They begin as on one device, beside a base that each rank has a part of, and are merged and saved the same."""
    for number, case in enumerate(adapter_cases(tmp_path)):
        one, many = tmp_path / f"one{number}", tmp_path / f"many{number}"
        want = weights.adapted(*case, str(one))
        for got in ranks.run(2, weights.adapted, *case, str(many)):
            assert differing(got, want) == []
        # peft writes a set in any order.
        others = ("recipe_state.pt", "checkpoint.json", "adapter_config.json")
        assert [name for name in differing_files(many, one) if not name.endswith(others)] == []


def test_adapters_are_merged_beside_training_as_at_once(ranks: Ranks, tmp_path: Path) -> None:
    """While layers have their gathered weights, and the adapter and its optimizer's states are of a later step."""
    for number, case in enumerate(adapter_cases(tmp_path)):
        at_once, beside = tmp_path / f"at_once{number}", tmp_path / f"beside{number}"
        ranks.run(2, functools.partial(weights.adapted, trained=True), *case, str(at_once))
        ranks.run(2, functools.partial(weights.adapted, trained=True, beside=True), *case, str(beside))
        others = ("recipe_state.pt", "checkpoint.json", "adapter_config.json", ".distcp", ".metadata")
        assert [name for name in differing_files(beside, at_once) if not name.endswith(others)] == []
        assert_equal(state_of(beside / "step_1"), state_of(at_once / "step_1"))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_weight_that_one_rank_cannot_merge_ends_all(failing: int, ranks: Ranks, tmp_path: Path) -> None:
    for case in adapter_cases(tmp_path):
        raised = ranks.run(2, weights.merged_without_room, *case, str(tmp_path / "run"), failing)
        assert (raised[failing], raised[1 - failing]) == ("MemoryError", "PeerError")
        assert list((tmp_path / "run").iterdir()) == []
