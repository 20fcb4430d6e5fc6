"""offload.config.loading: YAML, strict overrides, checks against a schema, instantiation."""

from __future__ import annotations

import inspect
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union

import pytest
from omegaconf import DictConfig, OmegaConf

from offload.config.loading import (
    Above,
    AtLeast,
    Component,
    DottedPath,
    Makes,
    Passes,
    check_config,
    instantiate,
    load_and_check,
    load_config,
    to_settings,
)
from offload.errors import UserError


@dataclass(kw_only=True)
class Evaluation:
    dataset: Annotated[Component | list[Component], Passes("tokenizer")]
    every_n_steps: int
    batch_size: int | None = None


@dataclass(kw_only=True)
class Settings:
    output_dir: str
    seed: int | None = None
    dtype: Literal["fp32", "bf16"] = "bf16"
    batch_size: Annotated[int, AtLeast(1)] = 1
    epochs: int = 1
    prompt: str = ""
    compile: bool = False
    clip_grad_norm: Annotated[float, Above(0)] | None = None
    tags: list[str] = field(default_factory=list)
    window: tuple[int, float] = (1, 2.0)
    collate_fn: Annotated[str, DottedPath()] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    optimizer: Annotated[Component, Passes("params")]
    lr_scheduler: Annotated[Component, Passes("optimizer", keywords=("num_training_steps",))] | None = None
    dataset: Annotated[Component | list[Component], Passes("tokenizer")]
    metric_logger: Annotated[Component, Passes(optional_keywords=("log_dir",))] | None = None
    evaluation: Evaluation | None = None


def register_resolver(name: str, resolver: Any) -> None:
    with warnings.catch_warnings():
        # omegaconf 2.4 deprecates the only name that 2.3 has for this.
        warnings.simplefilter("ignore")
        OmegaConf.register_new_resolver(name, resolver, replace=True)


# Components for the tests, importable as fake_parts.<name>.


class Part:
    """Keeps what it was built with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


def dataset(
    tokenizer: Any,
    split: str = "train",
    packed: bool = False,
    column_map: Optional[dict[str, str]] = None,  # noqa: UP045
    transform: Any = None,
) -> Part:
    return Part(tokenizer, split=split, packed=packed, column_map=column_map, transform=transform)


def transform(modules: list[Literal["q_proj", "v_proj"]] = ["q_proj"], scale: float = 1.0) -> Part:  # noqa: B006
    return Part(modules=modules, scale=scale)


def schedule(optimizer: Any, warmup: int, num_training_steps: int, minimum: float = 0.0) -> Part:
    return Part(optimizer, warmup=warmup, num_training_steps=num_training_steps, minimum=minimum)


def anything(*args: Any, **kwargs: Any) -> Part:
    return Part(*args, **kwargs)


def logger(project: Union[str, None] = None, log_dir: Union[str, None] = None) -> Part:  # noqa: UP007
    return Part(project=project, log_dir=log_dir)


def by_name(*, num_training_steps: int) -> Part:
    return Part(num_training_steps)


def plain_logger(project: str = "p") -> Part:
    return Part(project=project)


def pair(rates: tuple[float, ...] = None, sizes=(1, 2), names: list = None, scale: float = 1.0) -> Part:
    return Part(sizes=sizes, rates=rates, names=names, scale=scale)


def fails(how: str) -> None:
    if how == "file":
        open("/nowhere/at/all")  # noqa: SIM115
    elif how == "value":
        raise ValueError("sizes must\nbe even")
    elif how == "user":
        raise UserError("how: try something else\nwidth is odd: make it even")
    elif how == "bug":
        raise RuntimeError("a bug")
    len(3)  # type: ignore[arg-type]


def narrow(params: Any, depth: int = 1) -> Part:
    return Part(depth=depth)


def wide(params: Any, width: int = 1, *, name: str = "x") -> Part:
    return Part(width=width, name=name)


class Wrapper:
    """Takes its own arguments and those of what it wraps."""

    def __init__(self, params: Any, inner: str = "fake_parts.narrow", **rest: Any) -> None:
        self.rest = rest

    @classmethod
    def config_signature(cls, kwargs: Any) -> inspect.Signature:
        from offload.component import resolve

        own = [p for p in inspect.signature(cls).parameters.values() if p.kind is not p.VAR_KEYWORD]
        inner = inspect.signature(resolve(kwargs.get("inner", "fake_parts.narrow"), key="inner"))
        more = [p.replace(kind=p.KEYWORD_ONLY) for p in inner.parameters.values() if p.name != "params"]
        return inspect.Signature([*own, *more])


CONFIG = """\
output_dir: /tmp/out
seed: 42
batch_size: 2
optimizer:
  _component_: torch.optim.AdamW
  lr: 1e-5
  betas: [0.9, 0.95]
  weight_decay: 0.1
lr_scheduler:
  _component_: fake_parts.schedule
  warmup: 10
dataset:
  _component_: fake_parts.dataset
  split: train
evaluation:
  every_n_steps: 3
  dataset:
    _component_: fake_parts.dataset
    packed: true
"""


@pytest.fixture(autouse=True)
def fake_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    module = types.ModuleType("fake_parts")
    for part in (dataset, transform, schedule, anything, logger, by_name, plain_logger, pair, fails):
        setattr(module, part.__name__, part)
    for part in (narrow, wide, Wrapper, Part):
        setattr(module, part.__name__, part)
    monkeypatch.setitem(sys.modules, "fake_parts", module)
    yield module


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def load(config: Path, *overrides: str, notes: list[str] | None = None) -> tuple[DictConfig, Settings]:
    return load_and_check(config, overrides, Settings, [] if notes is None else notes)


def errors_of(config: Path, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(config, *overrides)
    return caught.value.lines


def error_of(config: Path, *overrides: str) -> str:
    (line,) = errors_of(config, *overrides)
    return line


def test_config_without_overrides(config: Path) -> None:
    notes: list[str] = []
    cfg, settings = load(config, notes=notes)
    assert notes == []
    assert settings.output_dir == "/tmp/out"
    assert settings.batch_size == 2
    assert settings.dtype == "bf16"
    assert isinstance(settings.evaluation, Evaluation)
    assert settings.evaluation.every_n_steps == 3
    assert settings.evaluation.dataset.packed is True
    assert settings.optimizer is cfg.optimizer
    assert settings.optimizer.lr == 1e-5


# Overrides


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("batch_size=8", 8),
        ("seed=null", None),
        ("seed=None", None),
        ("prompt=a=b", "a=b"),
        ("prompt=a==b=", "a==b="),
        ("prompt=Hello: world", "Hello: world"),
        ("prompt={curly", "{curly"),
        ("prompt=2024", "2024"),
        ("prompt=true", "true"),
        ("prompt=", ""),
        ("prompt='quoted'", "quoted"),
        ("prompt=\\${plain}", "${plain}"),
        ("output_dir=${seed}/x", "42/x"),
        ("clip_grad_norm=1", 1.0),
        ("clip_grad_norm=1e-2", 0.01),
        ("compile=true", True),
        ("+tags=[a,b]", ["a", "b"]),
        ("tags=[]", []),
        ("window=[3,4]", (3, 4.0)),
        ("lr_scheduler=null", None),
        ("evaluation=null", None),
        ("collate_fn=fake_parts.anything", "fake_parts.anything"),
        ("extra={a: {b: 1}}", {"a": {"b": 1}}),
        ("+extra.a.b=1", {"a": {"b": 1}}),
    ],
)
def test_override_of_a_setting(config: Path, override: str, expected: Any) -> None:
    _, settings = load(config, override)
    value = getattr(settings, override.lstrip("+").partition("=")[0].partition(".")[0])
    assert value == expected
    assert type(value) is type(expected)


def test_overrides_inside_sections(config: Path) -> None:
    cfg, settings = load(
        config,
        "optimizer.lr=1e-3",
        "optimizer.eps=1e-6",  # not in the file, but the optimizer takes it
        "evaluation.dataset.split=heldout",
        "evaluation.batch_size=4",
        "~optimizer.weight_decay",
    )
    assert cfg.optimizer.lr == 1e-3 and isinstance(cfg.optimizer.lr, float)
    assert cfg.optimizer.eps == 1e-6
    assert "weight_decay" not in cfg.optimizer
    assert settings.evaluation is not None
    assert settings.evaluation.batch_size == 4
    assert settings.evaluation.dataset.split == "heldout"


def test_overrides_apply_in_order(config: Path) -> None:
    assert load(config, "batch_size=3", "batch_size=4")[1].batch_size == 4
    assert load(config, "batch_size=3", "~batch_size")[1].batch_size == 1
    assert load(config, "~batch_size", "batch_size=3")[1].batch_size == 3


def test_file_names_with_leading_zeros_stay_text(config: Path) -> None:
    _, settings = load(config, "+extra.max_filename=00010")
    assert settings.extra == {"max_filename": "00010"}


@pytest.mark.parametrize("key", ["dataset.1.split", "dataset[1].split"])
def test_overrides_inside_a_list_of_components(config: Path, key: str) -> None:
    two = "dataset=[{_component_: fake_parts.dataset}, {_component_: fake_parts.dataset, split: b}]"
    _, settings = load(config, two, f"{key}=c")
    assert [each.get("split") for each in settings.dataset] == [None, "c"]
    assert "list of 2" in error_of(config, two, "dataset.2.split=c")
    assert error_of(config, two, "dataset.1.splitt=c").endswith("did you mean dataset.1.split?")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("batch_sise=8", ["batch_sise: ", "did you mean batch_size?"]),
        ("+batch_sise=8", ["batch_sise: ", "did you mean batch_size?"]),
        ("lr=3", ["lr: nothing reads this key; did you mean optimizer.lr?"]),
        ("eps=3", ["eps: nothing reads this key; did you mean optimizer.eps?"]),  # which the file does not have
        ("packed=True", ["did you mean evaluation.dataset.packed?"]),
        ("zzz=8", ["zzz: ", "remove it", "batch_size"]),
        ("optimizer.lrr=1", ["optimizer.lrr: ", "torch.optim.AdamW", "did you mean optimizer.lr?"]),
        ("+optimizer.lrr=1", ["optimizer.lrr: ", "did you mean optimizer.lr?"]),
        ("evaluation.every_step=3", ["evaluation.every_step: ", "did you mean evaluation.every_n_steps?"]),
        (
            "evaluation.dataset.pack=true",
            ["evaluation.dataset.pack: ", "did you mean evaluation.dataset.packed?"],
        ),
        (
            "optimizer._component_=torch.optim.AdamWW",
            ["optimizer._component_: ", "did you mean torch.optim.AdamW?"],
        ),
        ("optimizer=torch.optim.AdamWW", ["optimizer._component_: ", "did you mean torch.optim.AdamW?"]),
        ("optimizer=torch.optim", ["optimizer._component_: ", "is a module"]),
        ("optimizer=AdamW", ["optimizer: ", "did you mean optimizer=torch.optim.AdamW?"]),
        ("optimizer=Adamant", ["optimizer._component_: ", "full dotted path"]),
        ("collate_fn=fake_parts.anythin", ["collate_fn: ", "did you mean fake_parts.anything?"]),
        ("optimizer.lr=abc", ["optimizer.lr: ", "expected float", "'abc'"]),
        ("optimizer.betas=0.9", ["optimizer.betas: ", "a list of 2", "0.9"]),
        ("optimizer.betas=[0.9]", ["optimizer.betas: ", "a list of 2", "[0.9]"]),
        ("optimizer.amsgrad=1", ["optimizer.amsgrad: ", "true or false", "got 1"]),
        ("epochs=1.5", ["epochs: ", "expected int", "1.5"]),
        ("epochs=true", ["epochs: ", "expected int", "true"]),
        ("epochs=null", ["epochs: ", "expected int", "null"]),
        ("epochs='3'", ["epochs: ", "expected int", "remove the quotes"]),
        ("dtype=fp17", ["dtype: ", "fp32 or bf16", "'fp17'"]),
        ("dtype=BF16", ["dtype: ", "did you mean bf16?"]),
        ("batch_size=0", ["batch_size: ", "at least 1", "got 0"]),
        ("clip_grad_norm=0", ["clip_grad_norm: ", "more than 0"]),
        ("clip_grad_norm=nan", ["clip_grad_norm: ", "expected float or null"]),
        ("clip_grad_norm=.nan", ["clip_grad_norm: ", "more than 0"]),
        ("prompt=null", ["prompt: ", "expected text", "null"]),
        ("tags=[a,3]", ["tags: ", "a list of text"]),
        ("evaluation=5", ["evaluation: ", "a section or null"]),
        ("optimizer.params=[1]", ["optimizer.params: ", "the recipe sets this itself", "remove it"]),
        ("lr_scheduler.num_training_steps=9", ["lr_scheduler.num_training_steps: ", "remove it"]),
        ("~lr_scheduler.warmup", ["lr_scheduler.warmup: ", "requires it", "set lr_scheduler.warmup"]),
        ("~output_dir", ["output_dir: required", "set output_dir"]),
        ("~optimizer", ["optimizer: required", "optimizer._component_"]),
        ("output_dir=???", ["output_dir: required"]),
        ("optimizer.lr=???", ["optimizer.lr: required"]),
        ("~evaluation.dataset", ["evaluation.dataset: required"]),
        ("~nosuch", ["~nosuch", "no key nosuch", "drop this override"]),
        ("~batch_sise", ["~batch_sise", "did you mean ~batch_size?"]),
        ("~optimizer.lrr", ["~optimizer.lrr", "did you mean ~optimizer.lr?"]),
        ("~seed=42", ["~seed", "takes no value"]),
        ("+seed=1", ["+seed=1", "already", "write seed=1"]),
        ("--batch_size=8", ["--batch_size=8", "without dashes", "batch_size=8"]),
        ("batch_size", ["batch_size", "expected key=value"]),
        ("=3", ["=3", "expected key=value"]),
        ("a..b=3", ["a..b=3", "expected key=value"]),
        ("batch_size.x=3", ["batch_size.x=3", "batch_size is 2", "'x'"]),
        ("epochs=[1", ["epochs=[1", "not YAML"]),
        ("dataset=[]", ["dataset: ", "at least one component"]),
        ("dataset={split: train}", ["dataset: ", "expected _component_", "set dataset._component_"]),
        ("dataset={_componant_: a.b}", ["dataset: ", "_componant_"]),
        ("lr_scheduler=fake_parts.by_name", ["lr_scheduler._component_: ", "by position", "choose"]),
        ("extra.a=1", ["extra.a: ", "write +extra.a=1"]),
        ("dataset.column_map.x=y", ["dataset.column_map.x: ", "write +dataset.column_map.x=y"]),
        ("optimizer=fake_parts.anything", []),
        ("output_dir=${nosuch}", ["output_dir: ", "'nosuch'", "override output_dir=${nosuch}"]),
        ("output_dir=${seeed}", ["output_dir: ", "did you mean ${seed}?"]),
        ("output_dir=${", ["output_dir: ", "not a valid interpolation", "\\${"]),
        ("output_dir=${output_dir}", ["output_dir: ", "Recursive"]),
        ("output_dir=${oc.env:QQQ_NOT_SET}", ["output_dir: ", "QQQ_NOT_SET"]),
        ("output_dir=${tiny_lama:x}", ["output_dir: ", "did you mean ${tiny_llama:...}?"]),
    ],
)
def test_mistakes_give_one_line(config: Path, override: str, parts: list[str]) -> None:
    if not parts:
        load(config, override)  # **kwargs: nothing is known to be wrong
        return
    line = error_of(config, override)
    for part in parts:
        assert part in line


def test_all_problems_are_told_at_once(config: Path) -> None:
    lines = errors_of(config, "batch_sise=8", "epochs=1.5", "optimizer.lrr=1", "evaluation.every_step=2")
    assert [line.partition(":")[0] for line in lines] == [
        "batch_sise",
        "epochs",
        "optimizer.lrr",
        "evaluation.every_step",
    ]


def test_all_malformed_overrides_are_told_at_once(config: Path) -> None:
    assert len(errors_of(config, "--a", "b", "~nosuch")) == 3


def test_keyword_catching_component_wants_a_plus_for_new_keys(config: Path) -> None:
    swap = "optimizer=fake_parts.anything"
    assert "write +optimizer.whatever=1" in error_of(config, swap, "optimizer.whatever=1")
    cfg, _ = load(config, swap, "+optimizer.whatever=1")
    assert cfg.optimizer.whatever == 1


def test_section_left_out_of_the_file_can_be_given(config: Path) -> None:
    config.write_text(CONFIG[: CONFIG.index("evaluation:")])
    _, settings = load(config, "evaluation.every_n_steps=5", "evaluation.dataset=fake_parts.dataset")
    assert settings.evaluation is not None and settings.evaluation.every_n_steps == 5
    assert settings.evaluation.dataset == {"_component_": "fake_parts.dataset"}


# Swaps


def test_swap_drops_what_the_new_component_does_not_take(config: Path) -> None:
    notes: list[str] = []
    cfg, _ = load(config, "optimizer=torch.optim.SGD", notes=notes)
    assert cfg.optimizer == {"_component_": "torch.optim.SGD", "lr": 1e-5, "weight_decay": 0.1}
    assert len(notes) == 1
    assert notes[0].startswith("optimizer: torch.optim.SGD does not take betas=[0.9, 0.95] ")


@pytest.mark.parametrize("order", [1, -1])
def test_swap_keeps_what_was_typed(config: Path, order: int) -> None:
    overrides = ["optimizer._component_=torch.optim.SGD", "optimizer.betas=[0.8,0.9]"][::order]
    line = error_of(config, *overrides)
    assert line.startswith("optimizer.betas: torch.optim.SGD does not take 'betas'")
    cfg, _ = load(config, *["optimizer=torch.optim.SGD", "optimizer.momentum=0.9"][::order])
    assert cfg.optimizer.momentum == 0.9


def test_swap_to_the_same_component_changes_nothing(config: Path) -> None:
    notes: list[str] = []
    cfg, _ = load(config, "optimizer=torch.optim.AdamW", notes=notes)
    assert notes == [] and "betas" in cfg.optimizer


def test_swap_does_not_hide_a_typo_of_the_file(config: Path) -> None:
    config.write_text(CONFIG.replace("  weight_decay:", "  weigth_decay:"))
    assert "did you mean optimizer.weight_decay?" in error_of(config, "optimizer=torch.optim.SGD")


def test_swap_away_from_a_component_that_is_not_installed(config: Path) -> None:
    config.write_text(CONFIG.replace("torch.optim.AdamW", "qqqzzzx.optim.PagedAdamW"))
    assert "pip install qqqzzzx" in error_of(config)
    notes: list[str] = []
    cfg, _ = load(config, "optimizer=torch.optim.SGD", notes=notes)
    assert "betas" not in cfg.optimizer and len(notes) == 1


def test_swap_of_a_null_component_and_back(config: Path) -> None:
    config.write_text(CONFIG + "metric_logger: null\n")
    _, settings = load(config, "metric_logger=fake_parts.logger", "metric_logger.project=12")
    assert settings.metric_logger == {"_component_": "fake_parts.logger", "project": "12"}
    _, settings = load(config, "metric_logger.project=x", "metric_logger=fake_parts.logger")
    assert settings.metric_logger == {"_component_": "fake_parts.logger", "project": "x"}


def test_swap_by_a_section_replaces_it(config: Path) -> None:
    notes: list[str] = []
    cfg, _ = load(config, "optimizer={_component_: torch.optim.SGD, lr: 0.5}", notes=notes)
    assert cfg.optimizer == {"_component_": "torch.optim.SGD", "lr": 0.5} and notes == []


def test_swap_of_what_a_wrapper_wraps(config: Path) -> None:
    config.write_text(
        CONFIG.replace(
            "torch.optim.AdamW\n  lr: 1e-5\n  betas: [0.9, 0.95]\n  weight_decay: 0.1",
            "fake_parts.Wrapper\n  inner: fake_parts.narrow\n  depth: 3",
        )
    )
    cfg, _ = load(config, "optimizer.depth=4")
    assert cfg.optimizer.depth == 4
    notes: list[str] = []
    cfg, _ = load(config, "optimizer.inner=fake_parts.wide", "optimizer.width=2", notes=notes)
    assert cfg.optimizer == {"_component_": "fake_parts.Wrapper", "inner": "fake_parts.wide", "width": 2}
    assert len(notes) == 1 and "inner=fake_parts.wide" in notes[0] and "depth=3" in notes[0]
    line = error_of(config, "optimizer.inner=fake_parts.wid")
    assert line == "optimizer.inner: fake_parts has no 'wid'; did you mean fake_parts.wide?"
    assert error_of(config, "optimizer.dept=1").endswith("did you mean optimizer.depth?")
    assert "expected int" in error_of(config, "optimizer.depth=x")


def test_offload_optimizer(config: Path) -> None:
    config.write_text(
        CONFIG.replace(
            "_component_: torch.optim.AdamW",
            "_component_: offload.OffloadOptimizer\n  optimizer_class: torch.optim.AdamW",
        )
    )
    load(config)
    assert error_of(config, "optimizer.lrr=1").endswith("did you mean optimizer.lr?")
    line = error_of(config, "optimizer.optimizer_class=torch.optim.Adamm")
    assert line.startswith("optimizer.optimizer_class: ") and "did you mean torch.optim.Adam?" in line
    notes: list[str] = []
    cfg, _ = load(config, "optimizer.optimizer_class=torch.optim.SGD", notes=notes)
    assert "betas" not in cfg.optimizer and "betas=[0.9, 0.95]" in notes[0]


# Components in the check


def test_nested_components_are_checked(config: Path) -> None:
    base = "dataset.transform={_component_: fake_parts.transform, modules: [q_proj]}"
    load(config, base)
    assert "did you mean dataset.transform.scale?" in error_of(config, base, "dataset.transform.scal=1")
    assert "did you mean fake_parts.transform?" in error_of(
        config, "dataset.transform={_component_: fake_parts.transfor}"
    )
    line = error_of(config, base, "dataset.transform.modules=[q_proj, q_prj]")
    assert line.startswith("dataset.transform.modules: ") and line.endswith("did you mean q_proj?")


def test_keyword_that_the_recipe_passes_must_be_taken(config: Path) -> None:
    line = error_of(config, "lr_scheduler=fake_parts.narrow")
    assert "lr_scheduler._component_" in line and "num_training_steps" in line


def test_optional_keyword_of_the_recipe_may_be_taken_or_set(config: Path) -> None:
    load(config, "metric_logger=fake_parts.logger")
    load(config, "metric_logger=fake_parts.plain_logger")
    load(config, "metric_logger=fake_parts.logger", "metric_logger.log_dir=/tmp/x")


def test_component_given_as_text_in_the_file(config: Path) -> None:
    config.write_text(CONFIG + "metric_logger: fake_parts.logger\n")
    line = error_of(config)
    assert line.startswith("metric_logger: ") and "write _component_: fake_parts.logger" in line


def test_torchtune_data_set_builder_takes_load_dataset_arguments(config: Path) -> None:
    swap = "dataset=torchtune.datasets.instruct_dataset"
    load(config, swap, "dataset.source=json", "dataset.data_files=x.json", "dataset.field=rows")
    assert error_of(config, swap, "dataset.source=json", "dataset.data_filess=x").endswith(
        "did you mean dataset.data_files?"
    )
    assert "does not take 'delimiter'" in error_of(config, swap, "dataset.source=json", "dataset.delimiter=;")
    assert "dataset.source" in error_of(config, swap)  # required


# Interpolations and resolvers


def test_key_that_only_an_interpolation_reads_is_no_mistake(config: Path) -> None:
    config.write_text("base: /data\nunused: 1\n" + CONFIG.replace("/tmp/out", "${base}/out"))
    assert error_of(config).startswith("unused: nothing reads this key")
    _, settings = load(config, "~unused")
    assert settings.output_dir == "/data/out"
    _, settings = load(config, "~unused", "base=/other")
    assert settings.output_dir == "/other/out"


@pytest.mark.parametrize("text", ["${oc.select:base}", "${base}${seed}", "${.base}", "${ base }"])
def test_interpolation_forms_that_read_a_key(config: Path, text: str) -> None:
    config.write_text("base: /data\n" + CONFIG.replace("/tmp/out", text))
    load(config)


def test_relative_interpolation_in_a_section(config: Path) -> None:
    config.write_text(CONFIG.replace("every_n_steps: 3", "every_n_steps: ${..seed}"))
    _, settings = load(config)
    assert settings.evaluation is not None and settings.evaluation.every_n_steps == 42


def test_custom_resolvers_are_not_called_by_the_check(config: Path) -> None:
    calls = []

    def costly(name: str) -> str:
        calls.append(name)
        return f"/prepared/{name}"

    register_resolver("test_config_costly", costly)
    try:
        config.write_text(
            CONFIG.replace("split: train", "split: ${test_config_costly:a}/x").replace(
                "output_dir: /tmp/out", "output_dir: ${dataset.split}"
            )
        )
        cfg = load_config(config, [], notes=[], schema=Settings)
        check_config(cfg, Settings)
        assert calls == []
        assert to_settings(cfg, Settings).output_dir == "/prepared/a/x"
        assert instantiate(cfg.dataset, None).kwargs["split"] == "/prepared/a/x"
        assert calls
    finally:
        OmegaConf.clear_resolver("test_config_costly")


def test_error_of_a_resolver(config: Path) -> None:
    def refuse() -> str:
        raise UserError("the disk is full: free 3 MiB")

    register_resolver("test_config_refuse", refuse)
    try:
        config.write_text(CONFIG.replace("split: train", "split: ${test_config_refuse:}"))
        cfg, _ = load(config)
        with pytest.raises(UserError, match="^the disk is full: free 3 MiB$"):
            instantiate(cfg.dataset, None)
        assert error_of(config, "output_dir=${dataset.split}") == "the disk is full: free 3 MiB"
    finally:
        OmegaConf.clear_resolver("test_config_refuse")


def test_resolved_value_is_checked_when_it_is_known(config: Path) -> None:
    register_resolver("test_config_text", lambda: "abc")
    try:
        assert "epochs: expected int, got 'abc'" in error_of(config, "epochs=${test_config_text:}")
    finally:
        OmegaConf.clear_resolver("test_config_text")


# Files


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["got nothing"]),
        ("- a\n- b\n", ["got a list"]),
        ("just text\n", ["got 'just text'"]),
        ("a: 1\nb: 2\na: 3\n", ["line 3", "a is given twice", "line 1"]),
        ("a:\n  x: 1\n  x: 2\n", ["line 3", "x is given twice", "line 2"]),
        ("a:\n\tx: 1\n", ["line 2", "tab", "spaces"]),
        ("a: b: c\n", ["line 1", "quote the value"]),
        ("a: [1, 2\n", ["line"]),
        ("a: 1\n  b: 2\n", ["line 2"]),
        ("a: *nothing\n", ["line 1", "nothing"]),
        ("a: !!python/name:os.system x\n", ["line 1", "python/name:os.system"]),
        ("a: 1\n---\nb: 2\n", ["line 2"]),
        ("on: 1\n", ["True", "quotes"]),
        ("a: &a\n  b: *a\n", ["contains a reference to itself"]),
        ("a: 1\nb: ${nosuch}\n", ["b: ", "'nosuch'", "line 2"]),
        ("a: 1\nb:\n  c: ${\n", ["b.c: ", "line 3"]),
        ("a: \x07\n", ["not YAML"]),
    ],
)
def test_malformed_files_give_one_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(path, [], notes=[])
    (line,) = caught.value.lines
    assert str(path) in line
    for part in parts:
        assert part in line


def test_missing_file_names_the_nearest(config: Path) -> None:
    with pytest.raises(UserError, match="does not exist; did you mean .*config.yaml"):
        load_config(config.with_name("confg.yaml"), [], notes=[])
    with pytest.raises(UserError, match="tune ls"):
        load_config(config.parent / "nowhere" / "x.yaml", [], notes=[])


def test_file_that_is_a_folder_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        load_config(tmp_path, [], notes=[])
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"a: \xff\n")
    with pytest.raises(UserError, match="not UTF-8"):
        load_config(path, [], notes=[])


def test_key_with_a_dot_in_the_file(config: Path) -> None:
    config.write_text(CONFIG + "optimizer.lr: 3\n")
    assert "write `lr:` indented below `optimizer:`" in error_of(config)


def test_anchors_and_merges_work(config: Path) -> None:
    config.write_text(
        CONFIG.replace("dataset:\n  _comp", "dataset: &data\n  _comp", 1).replace(
            "    _component_: fake_parts.dataset\n    packed", "    <<: *data\n    packed"
        )
    )
    _, settings = load(config)
    assert settings.evaluation is not None
    assert settings.evaluation.dataset.split == "train" and settings.evaluation.dataset.packed is True


def test_merge_of_a_merge_is_no_duplicate(tmp_path: Path) -> None:
    path = tmp_path / "merges.yaml"
    path.write_text(
        "base: &base {x: 1, y: 2}\ndeep:\n  deeper:\n    one: &one {<<: *base, x: 3}\ntwo: {<<: *one, y: 4}\n"
    )
    cfg = load_config(path, [], notes=[])
    assert cfg.two == {"x": 3, "y": 4} and cfg.deep.deeper.one == {"x": 3, "y": 2}


# Without a schema; settings; post-init


def test_load_config_without_a_schema_leaves_names_to_the_check(config: Path) -> None:
    cfg = load_config(config, ["batch_sise=8", "optimizer=torch.optim.SGD"], notes=[])
    assert cfg.batch_sise == 8 and "betas" not in cfg.optimizer
    with pytest.raises(UserError, match="did you mean batch_size"):
        check_config(cfg, Settings)


def test_post_init_judges_in_the_check(config: Path) -> None:
    @dataclass(kw_only=True)
    class Strict(Settings):
        def __post_init__(self) -> None:
            if self.batch_size > self.epochs:
                raise UserError("batch_size: expected at most epochs")

    cfg = load_config(config, [], notes=[], schema=Settings)
    with pytest.raises(UserError, match="at most epochs"):
        check_config(cfg, Strict)
    check_config(load_config(config, ["epochs=2"], notes=[], schema=Settings), Strict)


# Instantiation


def node(**values: Any) -> DictConfig:
    cfg = OmegaConf.create({"top": "T", "part": values})
    return cfg.part


def test_instantiate_passes_arguments() -> None:
    part = instantiate(
        node(_component_="fake_parts.dataset", split="${top}", column_map={"a": "b"}), "tok", packed=True
    )
    assert part.args == ("tok",)
    assert part.kwargs == {"split": "T", "packed": True, "column_map": {"a": "b"}, "transform": None}
    assert type(part.kwargs["column_map"]) is dict


def test_instantiate_null() -> None:
    assert instantiate(None, 1, x=2) is None


def test_keywords_of_the_call_win() -> None:
    assert instantiate(node(_component_="fake_parts.dataset", split="a"), 0, split="b").kwargs["split"] == "b"


def test_instantiate_builds_nested_components_first() -> None:
    part = instantiate(
        node(
            _component_="fake_parts.anything",
            one={"_component_": "fake_parts.transform", "scale": 2},
            many=[{"_component_": "fake_parts.transform"}, {"deep": {"_component_": "fake_parts.pair"}}],
        )
    )
    assert isinstance(part.kwargs["one"], Part) and part.kwargs["one"].kwargs["scale"] == 2
    assert isinstance(part.kwargs["many"][0], Part)
    assert isinstance(part.kwargs["many"][1]["deep"], Part)


def test_lists_become_tuples_where_tuples_are_wanted() -> None:
    part = instantiate(node(_component_="fake_parts.pair", sizes=[3, 4], rates=[1, 0.5], names=["a"], scale=2))
    assert repr(part.kwargs) == "{'sizes': (3, 4), 'rates': (1.0, 0.5), 'names': ['a'], 'scale': 2.0}"


def test_optional_keywords_go_where_they_are_taken() -> None:
    optional = {"log_dir": "/runs"}
    assert instantiate(node(_component_="fake_parts.logger"), _optional_=optional).kwargs["log_dir"] == "/runs"
    own = node(_component_="fake_parts.logger", log_dir="/mine")
    assert instantiate(own, _optional_=optional).kwargs["log_dir"] == "/mine"
    assert instantiate(node(_component_="fake_parts.plain_logger"), _optional_=optional).kwargs == {"project": "p"}


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"_component_": "fake_parts.dataset", "nosuch": 1}, ["part: ", "fake_parts.dataset", "'nosuch'"]),
        ({"_component_": "fake_parts.datasett"}, ["part._component_: ", "did you mean fake_parts.dataset?"]),
        ({"split": "a"}, ["part: ", "expected _component_"]),
        ({"_component_": "fake_parts.dataset", "split": "${nosuch}"}, ["part", "nosuch"]),
        ({"_component_": "fake_parts.dataset", "split": "???"}, ["part.split"]),
        (
            {
                "_component_": "fake_parts.dataset",
                "transform": {"_component_": "fake_parts.transform", "x": 1},
            },
            ["part.transform: ", "'x'"],
        ),
    ],
)
def test_instantiate_names_the_section(values: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        instantiate(node(**values), "tokenizer")
    (line,) = caught.value.lines
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("how", "lines"),
    [
        ("file", ["part: fake_parts.fails: No such file or directory: /nowhere/at/all"]),
        ("value", ["part: fake_parts.fails refused its arguments: ValueError: sizes must be even"]),
        ("user", ["part.how: try something else", "part: width is odd: make it even"]),
    ],
)
def test_errors_while_building_name_the_section(how: str, lines: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        instantiate(node(_component_="fake_parts.fails", how=how))
    assert caught.value.lines == lines
    assert caught.value.__cause__ is not None


def test_bugs_while_building_keep_their_traceback() -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        instantiate(node(_component_="fake_parts.fails", how="bug"))


def test_the_home_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    section = {"_component_": "fake_parts.anything", "path": "~/models/x", "more": ["~/a", "b~/"], "rest": "~"}
    assert instantiate(section).kwargs == {"path": "/home/me/models/x", "more": ["/home/me/a", "b~/"], "rest": "~"}


class Vase:
    """No loss."""


def paints(color: str = "red") -> Vase:
    return Vase()


@dataclass(kw_only=True)
class Meant:
    optimizer: Annotated[Component, Passes("params"), Makes("an optimizer", "torch.optim.Optimizer")] | None = None
    loss: Annotated[Component, Makes("a loss", "torch.nn.Module", or_has="__call__")] | None = None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer=torch.nn.Linear", "optimizer._component_: torch.nn.Linear is not an optimizer"),
        ("loss=torch.optim.AdamW", "loss._component_: torch.optim.AdamW is not a loss"),
        ("loss=fake_parts.paints", "loss._component_: fake_parts.paints returns Vase, which is not a loss"),
        ("loss=os.system", "loss._component_: os.system is part of Python's standard library"),
        ("loss=torch.nn.CrossEntropyLoss", None),
        ("loss=fake_parts.anything", None),  # a function that does not say
        ("optimizer=torch.optim.AdamW", None),
    ],
)
def test_a_component_is_what_its_key_wants(
    tmp_path: Path, fake_parts: Any, monkeypatch: pytest.MonkeyPatch, override: str, said: str | None
) -> None:
    monkeypatch.setattr(fake_parts, "paints", paints, raising=False)
    monkeypatch.setattr(fake_parts, "anything", lambda: None)
    path = tmp_path / "config.yaml"
    path.write_text("loss: null\n")
    if said is None:
        load_and_check(path, [override], Meant, [])
        return
    with pytest.raises(UserError) as caught:
        load_and_check(path, [override], Meant, [])
    assert caught.value.lines[0].startswith(said)
