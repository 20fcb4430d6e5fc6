"""Makes this package reachable whichever distribution's files won the installation.

``tune_offload.pth`` loads this module at every Python start, so it imports ``sys`` and nothing else and
only puts one finder in front of ``sys.meta_path``. The finder acts on the first import of ``torchtune``:

* Ordinarily it lets the import go on, with torchao's missing names restored just before
  (``offload/torchao_shim.py``), so that torchtune 0.6.1 works with torchao 0.16 to 0.18 whoever
  imports it.
* When the importer is torchtune's own launcher script ``tune`` (it shares its name with ours; pip leaves
  ours, uv may leave theirs), the launcher is given our ``main`` instead, before any of torchtune is loaded.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # `typing` would cost more than the rest of this module; type checkers know this name
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

# What torchtune's launcher imports: `from torchtune._cli.tune import main`.
_LAUNCHER_IMPORTS = ("torchtune", "torchtune._cli", "torchtune._cli.tune")


def _running_tune_script() -> bool:
    """Whether this process was started as the script ``tune`` of this interpreter's environment."""
    program = sys.argv[0] if getattr(sys, "argv", None) else ""
    if program.replace("\\", "/").rpartition("/")[2].lower() not in ("tune", "tune.exe", "tune-script.py"):
        return False
    import os
    import sysconfig

    schemes = (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user"))
    folders = [os.path.dirname(sys.executable), *(sysconfig.get_path("scripts", s) for s in schemes)]
    ours = {os.path.realpath(folder) for folder in folders if folder}
    # A link to the script (as pipx makes) counts; so does a scripts folder that is itself reached by a link.
    return any(
        folder in ours
        for folder in (os.path.realpath(os.path.dirname(program)), os.path.dirname(os.path.realpath(program)))
    )


class _LauncherLoader:
    """Loads the three modules torchtune's launcher names as empty ones whose ``main`` is ours."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.main = _main  # type: ignore[attr-defined]


def _main() -> None:
    """Runs our command, with the stand-ins gone so that it can hand on to the real torchtune."""
    disarm()
    from offload.cli.main import script

    script()


class _TorchtuneFinder:
    """Watches for the first import of torchtune; transparent to every other import."""

    launcher = True  # whether an import by torchtune's launcher script is still to be answered by us

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("torchtune"):
            return None
        if self.launcher and name in _LAUNCHER_IMPORTS and _running_tune_script():
            from importlib.machinery import ModuleSpec

            return ModuleSpec(name, _LauncherLoader(), is_package=True)  # type: ignore[arg-type]
        if name != "torchtune":
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec(name, path, target) if find_spec is not None and finder is not self else None
            if spec is not None:
                _restore_torchao_before(spec)
                return spec
        return None


def _restore_torchao_before(spec: ModuleSpec) -> None:
    """Makes ``spec``'s loader mend torchao first. Finding torchtune stays free; only executing it pays."""
    loader = spec.loader
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module: ModuleType) -> None:
        loader.exec_module = execute  # type: ignore[union-attr, method-assign]
        _torchao_shim().install()
        execute(module)

    loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]


def _torchao_shim() -> ModuleType:
    """The module beside this one: ``offload`` may name something else on this process's path."""
    import os
    from importlib.util import module_from_spec, spec_from_file_location

    name = "offload.torchao_shim"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, os.path.join(os.path.dirname(__file__), "torchao_shim.py"))
    assert spec is not None and spec.loader is not None
    shim = module_from_spec(spec)
    spec.loader.exec_module(shim)
    return shim


_finder = _TorchtuneFinder()


def disarm() -> None:
    """Ends the watch for torchtune's launcher: from here on an import of torchtune gets torchtune."""
    _finder.launcher = False
    for name in _LAUNCHER_IMPORTS:
        module = sys.modules.get(name)
        if module is not None and isinstance(getattr(module.__spec__, "loader", None), _LauncherLoader):
            del sys.modules[name]


def install() -> None:
    """Puts the finder in front; a second call does nothing."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


install()
