"""offload.component: dotted paths, their errors, and signatures."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.component import LocalModuleError, installed_only, nearest, resolve, signature_of
from offload.errors import UserError


def error_of(path: Any, key: str | None = None) -> str:
    with pytest.raises(UserError) as caught:
        resolve(path, key=key)
    assert len(caught.value.lines) == 1
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder, not yet on sys.path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", None) or getattr(module, "__path__", "")):
            del sys.modules[name]


# nearest


@pytest.mark.parametrize(
    ("name", "expected"),
    [("batch_sise", "batch_size"), ("BATCH_SIZE", "batch_size"), ("lrr", "lr"), ("zzz", None)],
)
def test_nearest(name: str, expected: str | None) -> None:
    assert nearest(name, ["batch_size", "lr", "epochs"]) == expected


def test_nearest_of_nothing() -> None:
    assert nearest("lr", []) is None


# resolve


def test_resolve_finds_attributes_submodules_and_nested_attributes() -> None:
    import yaml

    assert resolve("yaml.loader.SafeLoader") is yaml.loader.SafeLoader
    assert resolve("yaml.loader.SafeLoader.get_data") is yaml.loader.SafeLoader.get_data
    assert resolve("torch.utils.viz._cycles").__name__ == "torch.utils.viz._cycles"


@pytest.mark.parametrize(
    "path",
    ["os.system", "builtins.exec", "subprocess.run", "shutil.rmtree", "posix.system", "torch.os.system", "this.s"]
    + ["torch.os.path.join", "offload.component.importlib.import_module", "offload.component.Any"],
)
def test_the_standard_library_is_refused_before_it_is_imported(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    assert "part of Python's standard library" in error_of(path, key="loss._component_")
    assert "this" not in sys.modules  # it prints when it is imported


def test_installed_only_imports_nothing_from_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "my_component_z.py").write_text("raise SystemExit('imported')")
    (folder / "colorsys_of_mine").mkdir()
    monkeypatch.syspath_prepend(str(folder))
    with installed_only() as skipped:
        assert resolve("yaml.SafeLoader").__name__ == "SafeLoader"
        for path in ("my_component_z.build", "colorsys_of_mine.x"):
            with pytest.raises(LocalModuleError):
                resolve(path)
        with pytest.raises(UserError, match="is not installed"):
            resolve("qqqzzzx.build")
        assert str(folder) not in sys.path
    assert skipped == ["my_component_z.build", "colorsys_of_mine.x"]
    assert str(folder) in sys.path
    assert "SystemExit: imported" in error_of("my_component_z.build")


def test_misspelt_attribute_names_the_nearest_and_the_key() -> None:
    message = error_of("yaml.loader.SafeLoaderr", key="optimizer._component_")
    assert message.startswith("optimizer._component_: ")
    assert "did you mean yaml.loader.SafeLoader?" in message


def test_misspelt_submodule_keeps_the_rest_of_the_path() -> None:
    assert "did you mean torch.optim.lr_scheduler.StepLR?" in error_of("torch.optim.lr_schedulr.StepLR")


def test_nearest_prefers_what_can_be_called_over_a_submodule(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.optim has the module `adam` and the class `Adam`, and other packages have closer submodules.
    package = types.ModuleType("fake_optim")
    package.adamw8 = types.ModuleType("fake_optim.adamw8")  # type: ignore[attr-defined]
    package.AdamW8bit = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_optim", package)
    assert "did you mean fake_optim.AdamW8bit?" in error_of("fake_optim.AdamW8b")
    assert "did you mean torch.optim.Adam?" in error_of("torch.optim.Adamm")
    assert "did you mean torch.optim.AdamW?" in error_of("torch.optim.AdamWW")


def test_misspelt_package_is_not_offered_for_installation() -> None:
    message = error_of("toch.loads")
    assert "did you mean torch.loads?" in message
    assert "pip install" not in message


def test_package_that_is_not_installed() -> None:
    message = error_of("qqqzzzx.optim.Thing", key="model._component_")
    assert message.startswith("model._component_: qqqzzzx is not installed: pip install qqqzzzx")


@pytest.mark.parametrize("path", ["", "AdamW", "a..b", ".a.b", "a.b.", "a.b-c", "a b.c", 3, None, ["a.b"]])
def test_malformed_paths(path: Any) -> None:
    assert "dotted path" in error_of(path)


def test_modules_of_the_current_folder_are_found(folder: Path) -> None:
    (folder / "my_component_a.py").write_text("def build(): return 7\n")
    assert resolve("my_component_a.build")() == 7


def test_installed_modules_win_over_the_current_folder(folder: Path) -> None:
    installed, here = folder / "site", folder / "here"
    for each in (installed, here):
        each.mkdir()
        (each / "my_component_i.py").write_text(f"def where(): return {each.name!r}\n")
    sys.path.append(str(installed))
    os.chdir(here)
    assert resolve("my_component_i.where")() == "site"


def test_error_inside_a_module_is_shown_with_its_place(folder: Path) -> None:
    (folder / "my_component_b.py").write_text("x = 1\ny = x / 0\n")
    message = error_of("my_component_b.build")
    assert "importing my_component_b failed: ZeroDivisionError" in message
    assert "my_component_b.py, line 2" in message
    assert "not installed" not in message


def test_syntax_error_inside_a_module(folder: Path) -> None:
    (folder / "my_component_c.py").write_text("def build(:\n")
    message = error_of("my_component_c.build")
    assert "SyntaxError" in message and "my_component_c.py, line 1" in message


def test_module_that_exits(folder: Path) -> None:
    (folder / "my_component_d.py").write_text("raise SystemExit(3)\n")
    assert "SystemExit: 3" in error_of("my_component_d.build")


def test_missing_dependency_of_a_module_is_the_one_to_install(folder: Path) -> None:
    (folder / "my_component_e.py").write_text("import qqqzzzy.sub\n")
    message = error_of("my_component_e.build")
    assert message.endswith("pip install qqqzzzy")
    assert "my_component_e is not installed" not in message


def test_submodule_that_fails_is_not_called_missing(folder: Path) -> None:
    (folder / "my_package_f").mkdir()
    (folder / "my_package_f" / "__init__.py").write_text("")
    (folder / "my_package_f" / "broken.py").write_text("import qqqzzzy\n")
    message = error_of("my_package_f.broken.build")
    assert "importing my_package_f.broken failed" in message and "pip install qqqzzzy" in message


def test_lazy_attribute_that_fails(folder: Path) -> None:
    (folder / "my_component_g.py").write_text(
        "def __getattr__(name):\n"
        "    if name == 'build': raise ImportError('needs a compiler')\n"
        "    raise AttributeError(name)\n"
    )
    assert "loading my_component_g.build failed: ImportError: needs a compiler" in error_of("my_component_g.build")
    assert "has no 'other'" in error_of("my_component_g.other")


def test_folder_without_code_is_not_a_package(folder: Path) -> None:
    (folder / "my_folder_h").mkdir()
    message = error_of("my_folder_h.Logger")
    assert "is only the folder" in message and "pip install my_folder_h" in message


# signature_of


def test_signature_of_a_class_has_no_self() -> None:
    class Thing:
        def __init__(self, size: int, name: str = "x") -> None: ...

    assert list(signature_of(Thing, {}).parameters) == ["size", "name"]


def test_string_annotations_are_evaluated_one_by_one() -> None:
    def build(size: int, other: NotImportedHere = None, rate: float | None = None) -> None:  # noqa: F821
        ...

    parameters = signature_of(build, {}).parameters
    assert parameters["size"].annotation is int
    assert parameters["rate"].annotation == float | None
    assert parameters["other"].annotation is inspect.Parameter.empty


def test_string_annotations_behind_partial_and_wraps() -> None:
    def build(size: int, name: str = "x") -> None: ...

    @functools.wraps(build)
    def wrapped(*args: Any, **kwargs: Any) -> None: ...

    for component in (functools.partial(build, name="y"), wrapped):
        signature = signature_of(component, {})
        assert signature.parameters["size"].annotation is int
        assert list(signature.parameters) == ["size", "name"]


def test_real_optimizer_signature() -> None:
    import torch

    parameters = signature_of(torch.optim.AdamW, {}).parameters
    assert float in parameters["lr"].annotation.__args__
    assert parameters["weight_decay"].annotation is float


def test_component_without_signature_accepts_everything() -> None:
    class Native:
        """Stands for a class written in C; which of those lack a signature differs between versions."""

        __signature__ = "none that inspect can read"

    with pytest.raises(TypeError):
        inspect.signature(Native)
    signature_of(Native, {}).bind(1, anything=2)


def test_config_signature_is_asked_with_the_arguments() -> None:
    class Wrapper:
        def __init__(self, what: str = "a", **rest: Any) -> None: ...

        @classmethod
        def config_signature(cls, kwargs: dict[str, Any]) -> inspect.Signature:
            def narrow(what: str = "a", depth: int = 0) -> None: ...

            def wide(what: str = "a", width: int = 0) -> None: ...

            return inspect.signature(wide if kwargs.get("what") == "w" else narrow)

    assert list(signature_of(Wrapper, {}).parameters) == ["what", "depth"]
    assert list(signature_of(Wrapper, {"what": "w"}).parameters) == ["what", "width"]


def test_config_signature_must_return_a_signature() -> None:
    class Wrapper:
        config_signature = staticmethod(lambda kwargs: None)

    with pytest.raises(TypeError, match="must return an inspect.Signature"):
        signature_of(Wrapper, {})


def builder(tokenizer: Any, *, source: str = "some/hub", **load_dataset_kwargs: Any) -> None: ...


def test_load_dataset_arguments_replace_the_forwarded_ones() -> None:
    pytest.importorskip("datasets")
    names = set(signature_of(builder, {"source": "json"}).parameters)
    assert {"tokenizer", "source", "split", "data_files", "streaming", "field"} <= names
    # `path` is `source`; a CSV reader's option means nothing to the JSON reader.
    assert not {"path", "load_dataset_kwargs", "delimiter", "data_filess"} & names


def test_load_dataset_arguments_for_a_hub_repository_cover_all_formats() -> None:
    pytest.importorskip("datasets")
    names = set(signature_of(builder, {}).parameters)
    assert {"field", "delimiter", "keep_linebreaks", "columns", "split"} <= names


def test_other_collecting_parameters_stay() -> None:
    def build(a: int, **kwargs: Any) -> None: ...

    assert list(signature_of(build, {}).parameters) == ["a", "kwargs"]


def test_is_a_leaf() -> None:
    code = (
        "import sys, offload.component, offload.errors; "
        "print([m for m in ('torch', 'omegaconf', 'torchtune', 'datasets') if m in sys.modules])"
    )
    root = Path(__file__).resolve().parents[1]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
