"""accelerate's FSDP2, and Trainer and SFTTrainer over it, train with OffloadOptimizer as with the plain optimizer.

They shard the model after the optimizer was built, and put the shards into its groups.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from offload import OffloadOptimizer
from tests.distributed.ranks import Ranks
from tests.distributed.training import Case, Llama, device, differing, loss_of, made, parts, states_of

FUSED = (("fused", True),)

accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")


@contextmanager
def accelerate_on_ranks() -> Iterator[pytest.MonkeyPatch]:
    """Inside, accelerate finds the ranks of the process group, and shards on the CPU too.

    It reads its FSDP plugin on GPUs and their like only (``AcceleratorState.__init__`` asks for MULTI_GPU and others,
    and leaves MULTI_CPU out); all else of it runs on the CPU as it is.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    init = AcceleratorState.__init__

    def init_with_plugin(state: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}.items():
            patch.setenv(name, str(value))
        for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION"):  # set by the plugin
            patch.setenv(name, "false")
            patch.delenv(name)
        patch.setattr(AcceleratorState, "__init__", init_with_plugin)
        try:
            yield patch
        finally:
            for state in (AcceleratorState, GradientState, PartialState):
                state._reset_state()


# accelerate's own loop

CASES = [
    Case("resident", options=FUSED),
    Case("stream", options=FUSED),
    Case("host", attached=False, options=FUSED),
    Case("stream", in_backward=True, clip=None, options=FUSED),
    Case("host", offload_gradients=True, options=FUSED),
]


def with_accelerate(case: Case | None, kind: str, *, first: bool = False, config: str = "") -> list[Tensor]:
    """What training gives.

    Args:
        first: the optimizer is made before the Accelerator, and cannot know what is to come.
        config: of ``accelerate launch``, a file; empty: settings are given to the Accelerator.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    with accelerate_on_ranks() as patch, device(kind):
        for name, value in launched(config).items() if config else ():
            patch.setenv(name, value)
        plugin = None if config else FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Layer"],
        )  # fmt: skip
        accelerator = None if first else Accelerator(fsdp_plugin=plugin, cpu=True, gradient_accumulation_steps=2)
        model = made(lambda: Llama(layers=2))
        optimizer: Any
        if case is None:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        else:
            optimizer = OffloadOptimizer(
                model.named_parameters(), strategy=case.strategy, update_in_backward=case.in_backward,
                offload_gradients=case.offload_gradients, model=model if case.attached else None, lr=1e-2, fused=True,
            )  # type: ignore[arg-type]  # fmt: skip
        before = pinned(optimizer)
        whole = [weakref.ref(param) for param in model.parameters()]
        accelerator = accelerator or Accelerator(fsdp_plugin=plugin, cpu=True, gradient_accumulation_steps=2)
        model, wrapped = accelerator.prepare(model, optimizer)
        assert all(isinstance(param, DTensor) for param in model.parameters())
        gc.collect()
        assert not any(param() is not None for param in whole), "whole parameters are kept"
        if kind == "threaded" and case is not None and case.strategy != "resident":
            # Per rank, half of it: page-locked once the shards are there, or again.
            assert (before > 1.7 * pinned(optimizer) > 0) if first else (before == 0 < pinned(optimizer))
        scheduler = torch.optim.lr_scheduler.LambdaLR(wrapped, lambda step: 1 / (1 + step))
        for step in range(6):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, step))
                if accelerator.sync_gradients and not (case and (case.in_backward or case.offload_gradients)):
                    accelerator.clip_grad_norm_(model.parameters(), 100.0)
                wrapped.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                wrapped.zero_grad()
        if case is not None:
            optimizer.synchronize()
        return [*parts(model.parameters()), *states_of(optimizer)]


def pinned(optimizer: Any) -> int:
    """Bytes of host memory that are page-locked."""
    report = optimizer.memory_report() if isinstance(optimizer, OffloadOptimizer) else {}
    return sum(report.get("pinned_host", {}).values())


CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: 'no'
num_machines: 1
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Layer
  fsdp_reshard_after_forward: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""
"""As `accelerate config` writes it. With it `accelerate launch` starts processes on GPUs only: `--cpu` excludes
`--use_fsdp`. What it tells them is in the environment."""


def launched(config: str) -> dict[str, str]:
    """The environment that ``accelerate launch`` makes for its processes."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    args = launch_command_parser().parse_args(["--config_file", config, "--main_process_port", "0", "train.py"])
    environment = prepare_multi_gpu_env(_validate_launch_command(args)[0])
    return {name: value for name, value in environment.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


def compare_accelerate(kind: str, first: bool, config: str = "") -> list[str]:
    want = with_accelerate(None, "cpu", config=config)
    found = []
    for case in CASES[:2] if config else CASES:
        got = with_accelerate(case, kind, first=first, config=config)
        if problem := differing(got, want):
            found.append(f"{case}: {problem}")
    return found


@pytest.mark.parametrize(
    ("kind", "first"), [("threaded", False), ("threaded", True), pytest.param("cpu", False, marks=pytest.mark.slow)]
)
def test_accelerate_trains_as_with_the_plain_optimizer(ranks: Ranks, kind: str, first: bool) -> None:
    for found in ranks.run(2, compare_accelerate, kind, first):
        assert found == []


def test_what_accelerate_launch_configures(ranks: Ranks, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    for found in ranks.run(2, compare_accelerate, "threaded", False, str(config)):
        assert found == []


# Trainer and SFTTrainer

OFFLOADED: dict[str, Any] = {"strategy": "stream"}


def with_trainer(
    folder: str, name: str, settings: dict[str, Any] | None, *, state: str = "FULL_STATE_DICT", resume: bool = False
) -> tuple[list[Tensor], list[tuple[float, float]]]:
    """Parameters and states, and losses and norms, by Trainer: it refuses ``optimizers=`` with FSDP, of any class.

    Args:
        name: ``Trainer`` and ``SFTTrainer`` are unmodified and build the optimizer themselves; ``OurTrainer`` has the
            mixin, and builds one that knows the model.
        settings: of OffloadOptimizer; None: AdamW.
        state: how accelerate saves.
        resume: from the checkpoint after three steps that lies in the folder.
    """
    import transformers

    from tests import test_trainers

    optimizer_class = torch.optim.AdamW if settings is None else OffloadOptimizer
    common: dict[str, Any] = dict(
        output_dir=folder, per_device_train_batch_size=1, gradient_accumulation_steps=2, max_grad_norm=0.5, max_steps=6,
        num_train_epochs=0, logging_steps=1, report_to=[], use_cpu=True, seed=0, disable_tqdm=True, save_steps=3,
        save_strategy="steps", fsdp=True, fsdp_config={"fsdp_version": 2, "state_dict_type": state},
    )  # fmt: skip
    data: dict[str, Any] = {"train_dataset": test_trainers.rows(), "data_collator": test_trainers.collate}
    built = {"optimizer_cls_and_kwargs": (optimizer_class, {**test_trainers.ADAMW, **(settings or {})})}
    base, args_class = transformers.Trainer, transformers.TrainingArguments
    if name == "SFTTrainer":
        import datasets
        import trl

        texts = [" ".join(f"w{token % 25}" for token in row["input_ids"]) for row in test_trainers.rows()]
        words = {"train_dataset": datasets.Dataset.from_dict({"text": texts})}
        data = {**words, "processing_class": test_trainers.word_tokenizer()}
        base, args_class = trl.SFTTrainer, trl.SFTConfig
    if name == "OurTrainer":
        built = {}
        base = building_trainer(settings)
    with accelerate_on_ranks():
        args = args_class(**common)
        trainer = base(model=test_trainers.make_model(), args=args, **built, **data)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if resume else None)
        assert all(isinstance(param, DTensor) for param in trainer.model.parameters())
        optimizer = trainer.optimizer.optimizer
        assert isinstance(optimizer, optimizer_class)
        logs = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log]
        return [*parts(trainer.model.parameters()), *states_of(optimizer)], logs


def building_trainer(settings: dict[str, Any] | None) -> Any:
    import transformers

    from offload import OffloadTrainerMixin
    from tests import test_trainers

    class OurTrainer(OffloadTrainerMixin, transformers.Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                named = self.model.named_parameters()
                if settings is None:
                    self.optimizer = torch.optim.AdamW(named, **test_trainers.ADAMW)
                else:
                    self.optimizer = OffloadOptimizer(named, model=self.model, **settings, **test_trainers.ADAMW)
            return self.optimizer

    return OurTrainer


def compare_trainers(folder: str, name: str, settings: dict[str, Any]) -> list[str]:
    want, wanted_logs = with_trainer(f"{folder}/plain", name, None)
    got, logs = with_trainer(f"{folder}/ours", name, settings)
    found = [differing(got, want)]
    found += [f"{log}, not {wanted}" for log, wanted in zip(logs, wanted_logs, strict=True) if not same(log, wanted)]
    return [problem for problem in found if problem]


def same(log: tuple[float, float], wanted: tuple[float, float]) -> bool:
    return log[0] == wanted[0] and log[1] == pytest.approx(wanted[1], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Trainer", OFFLOADED),
        ("SFTTrainer", {"strategy": "host"}),
        ("OurTrainer", {"strategy": "host", "offload_gradients": True}),
    ],
)
def test_trainers_train_as_with_the_plain_optimizer(
    ranks: Ranks, tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    pytest.importorskip("trl", reason="pip install trl")
    for found in ranks.run(2, compare_trainers, str(tmp_path), name, settings):
        assert found == []


def resumed(folder: str, state: str) -> list[str]:
    """Of what AdamW saved with Trainer, ours goes on as AdamW did; and of what it saved itself."""
    found = []
    for saver in (None, OFFLOADED):
        at = f"{folder}/{saver}"
        want, _ = with_trainer(at, "Trainer", saver, state=state)
        got, _ = with_trainer(at, "Trainer", OFFLOADED, state=state, resume=True)
        found.append(differing(got, want))
    return [problem for problem in found if problem]


@pytest.mark.parametrize("state", ["FULL_STATE_DICT", pytest.param("SHARDED_STATE_DICT", marks=pytest.mark.slow)])
def test_trainer_resumes(ranks: Ranks, tmp_path: Path, state: str) -> None:
    for found in ranks.run(2, resumed, str(tmp_path), state):
        assert found == []
