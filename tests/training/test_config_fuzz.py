"""Malformed configs and overrides by the hundred: each is taken or refused in one line, at once and without effects."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import string
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from offload import tiny
from offload.cli import registry
from offload.cli.validate import load_recipe
from offload.component import installed_only
from offload.config.loading import check_without_effects
from offload.config.yaml_files import dotted, walk
from offload.errors import UserError

BASE = registry.our_configs()["tiny_llama_offload"].read_text(encoding="utf-8")
TREE = yaml.safe_load(BASE)
KEYS = [dotted(at) for at, _ in walk(TREE)]

SECONDS = 5.0
"""Of the processor, for one input: what takes long is an alias or an interpolation that doubles."""

FEW, MANY = 200, 10_000

VALUES = [
    *(
        "0",
        "-1",
        "1",
        "3.7",
        "1e400",
        "-.inf",
        ".nan",
        "9" * 5000,
        "0x_",
        "2147483648",
        "00010",
        "true",
        "null",
        "~",
        "''",
    ),
    *(
        "[]",
        "{}",
        "[1, [2, [3]]]",
        "{a: 1}",
        "{_component_: 3}",
        "{_component_: os.system, command: id}",
        "[" * 200,
        "}",
    ),
    *(
        "!!set {a}",
        "!!timestamp 2020-01-01",
        "!!python/object/apply:os.system [id]",
        "!!int x",
        "!!binary aGk=",
        "*no",
        "&a [*a]",
    ),
    *(
        "text",
        "a: b",
        "'",
        '"',
        "\x00",
        "\ud800",
        "ü",
        "???",
        "%",
        "@x",
        "- x",
        "x" * 4000,
        "a\nb",
        "\t",
        "#",
        "|",
        "key=value",
    ),
    *(
        "${seed}",
        "${seed}${seed}",
        "${nope}",
        "${.}",
        "${..lr}",
        "${",
        "${}",
        "${a.${b}}",
        "${oc.env:HOME}",
        "${oc.env:}",
    ),
    *(
        "${oc.select:${seed}}",
        "${tiny_llama:train}",
        "${tiny_llama:nope}",
        "${nope:1}",
        "${optimizer}",
        "${model.${seed}}",
    ),
    *(
        "${output_dir}",
        "\\${seed}",
        "${oc.decode:'${seed}'}",
        "${oc.create:{a: 1}}",
        "${dataset}",
        "${loss.${optimizer.lr}}",
    ),
    *(
        "os.system",
        "torch.os.system",
        "subprocess.run",
        "builtins.exec",
        "this.s",
        "antigravity.fly",
        "shutil.rmtree",
        "torch",
    ),
    *(
        "torch.optim.AdamW",
        "torch.optim.LBFGS",
        "torch.optim.lr_scheduler.StepLR",
        "torch.nn.MSELoss",
        "torch.nn.NLLLoss",
    ),
    *(
        "torch.hub.load",
        "torch.nn.Linear",
        "torch.optim.",
        ".torch",
        "torch..optim",
        "local_module.f",
        "qqqzzz.f",
        "AdamW",
    ),
    *(
        "torchtune.models.llama2.llama2",
        "torchtune.models.mistral.mistral",
        "offload.OffloadOptimizer",
        "torch.float32",
    ),
    *(
        "torchtune.training.metric_logging.StdoutLogger",
        "offload.optim.AdamW",
        "__import__.x",
        "torch.__class__",
        "a.b c",
    ),
]
NAMES = [
    *(
        "seed",
        "lr",
        "optimizer",
        "optimizer.lr",
        "a",
        "",
        ".",
        "a..b",
        "dataset.0",
        "dataset[0].x",
        "model.",
        "_component_",
    ),
    *("optimizer._component_", "loss._component_", "tags", "x.y.z.w", "évaluation", "0", "-1", "~", "+", "batch_sise"),
    *("optimizer.betas.0", "optimizer.betas.9", "output_dir.x", "[", "a b", "lr_scheduler", "metric_logger", "None"),
]


def override(draw: random.Random) -> str:
    key = draw.choice(KEYS) if draw.random() < 0.8 else draw.choice(NAMES)
    if draw.random() < 0.1 and key:
        at = draw.randrange(len(key))
        key = key[:at] + draw.choice(string.printable) + key[at + draw.randrange(2) :]
    prefix = draw.choice([*[""] * 12, "+", "~", "--", "-", "++"])
    ending = "" if prefix == "~" and draw.random() < 0.8 or draw.random() < 0.03 else f"={draw.choice(VALUES)}"
    return f"{prefix}{key}{ending}"


def overrides(draw: random.Random) -> tuple[bytes, list[str]]:
    return BASE.encode(), [override(draw) for _ in range(draw.choice([1, 1, 1, 2, 4]))]


def config(draw: random.Random) -> tuple[bytes, list[str]]:
    """The tiny config with some lines changed, lost, moved, doubled; or its bytes."""
    lines = BASE.splitlines()
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        at = draw.randrange(len(lines))
        kind = draw.randrange(8)
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(draw.randrange(len(lines)), lines[at])
        elif kind == 2:
            lines[at] = " " * draw.randrange(5) + lines[at].lstrip()
        elif kind == 3:
            lines.insert(at, f"{draw.choice(NAMES)}: {draw.choice(VALUES)}")
        elif kind == 4:
            lines[at:] = lines[at : at + draw.randrange(3)]
        elif kind == 5 and lines[at]:
            where = draw.randrange(len(lines[at]))
            lines[at] = lines[at][:where] + draw.choice(string.printable) + lines[at][where + 1 :]
        else:
            lines[at] = f"{lines[at].partition(':')[0]}: {draw.choice(VALUES)}"
        lines = lines or [""]
    content = bytearray("\n".join(lines).encode("utf-8", "surrogatepass"))
    if draw.random() < 0.1 and content:
        content[draw.randrange(len(content))] = draw.randrange(256)
    return bytes(content), []


def document(draw: random.Random) -> tuple[bytes, list[str]]:
    """YAML that is no config: anchors, merges, nesting, interpolations of what comes later or of anything."""
    names = [f"k{n}" for n in range(draw.randint(1, 40))]
    style = draw.randrange(6)  # of most lines, so that chains grow long
    lines = []
    for position, name in enumerate(names):
        later = names[position + 1 :][:2] or ["end"]
        others = [draw.choice(later if draw.random() < 0.95 else names) for _ in range(draw.randint(2, 4))]
        anchored = ", ".join([f"*{other}" for other in names[max(0, position - 2) : position]] * 3)
        depth = draw.randrange(40)
        kinds = [
            draw.choice(VALUES),
            "".join(f"${{{other}}}" for other in others),
            f"{{x: '${{{others[0]}}}', y: '${{.x}}', z: '${{..{others[-1]}}}'}}",
            f"[{anchored}]",
            f"{{<<: [{anchored}]}}",
            "[" * depth + "x" + "]" * depth,
        ]
        lines.append(f"{name}: &{name} {kinds[style] if draw.random() < 0.97 else draw.choice(kinds)}")
    return "\n".join([*lines, "end: 1"]).encode("utf-8", "surrogatepass"), []


RUNS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect")
WRITES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate", "shutil.rmtree")


class Watch:
    """Notes what a check must not do, in its own thread or one that it starts.

    Threads that ran before are of other tests: a logger's that was given up, a library's. An audit hook stays until the
    process ends, so there is one, switched off.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._is_on = False
        self._others: frozenset[int] = frozenset()
        sys.addaudithook(self._hear)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        self.seen = []
        self._others = frozenset(sys._current_frames()) - {threading.get_ident()}
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on or threading.get_ident() in self._others:
            return
        if event in RUNS:
            self.seen.append(f"{event} {arguments!r:.200}")
        elif event in WRITES or (event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            self._note_write(event, arguments[0])

    def _note_write(self, event: str, path: Any) -> None:
        # An import writes its bytecode. What is written to the null device is nowhere: libraries are silenced with it.
        if "__pycache__" not in str(path) and str(path) != os.devnull:
            self.seen.append(f"{event} {path!r}")


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


def write(path: str) -> None:
    os.close(os.open(path, os.O_RDWR))


def test_the_watch_sees_the_check_and_its_threads_alone(watch: Watch, tmp_path: Path) -> None:
    file = str(tmp_path / "file")
    Path(file).touch()
    begins, ends = threading.Event(), threading.Event()

    def earlier() -> None:
        begins.wait()
        write(file)
        ends.set()

    other = threading.Thread(target=earlier)
    other.start()
    with watch.on():
        begins.set()
        assert ends.wait(10)
    other.join()
    assert watch.seen == []
    with watch.on():
        own = threading.Thread(target=write, args=(file,))
        own.start()
        own.join()
        write(file)
        write(os.devnull)
    write(file)
    assert watch.seen == [f"open {file!r}"] * 2


class TooLong(BaseException):
    """Not an Exception: nothing may take it for an error of the input."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def outcome(path: Path, words: list[str], recipe: Any) -> str:
    """``taken``, ``refused``, or what went wrong."""
    try:
        with limited():
            settings = check_without_effects(path, words, recipe.Settings, [])
            if settings is None:
                return "taken"
            # Some layers more are only slow: what is built here is what a run would build.
            model = OmegaConf.to_container(settings.model, resolve=False)
            sizes = [value for value in model.values() if isinstance(value, int)]
            if (
                all(abs(size) <= 100_000 for size in sizes)
                and "num_layers" in model
                and model["num_layers"] in range(10)
            ):
                recipe.check(settings, notes=[])
    except UserError as error:
        lines = error.lines
        is_told = bool(lines) and all(line.strip() for line in lines)
        return "refused" if is_told else f"refused in the words {str(error)!r}"
    except TooLong:
        return f"took more than {SECONDS:g} s"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


@pytest.mark.parametrize("generate", [overrides, config, document])
@pytest.mark.parametrize("number", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_every_input_is_taken_or_refused_without_effects(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    watch: Watch,
    capfd: pytest.CaptureFixture[str],
    number: int,
    generate: Callable[[random.Random], tuple[bytes, list[str]]],
) -> None:
    monkeypatch.setenv(tiny.HOME_VARIABLE, str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    (tmp_path / "here/local_module.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(tmp_path / "here")
    recipe = load_recipe(registry.our_recipes()["full_finetune_single_device"]).FullFinetuneRecipeSingleDevice
    path = tmp_path / "config.yaml"
    path.write_text(BASE)
    gc.collect()  # what earlier tests left closes, stops and deletes itself
    with installed_only(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert outcome(path, [], recipe) == "taken"  # and everything that it needs is imported
        draw = random.Random(20261122)
        found: dict[str, int] = {}
        wrong: list[str] = []
        for _ in range(number):
            content, words = generate(draw)
            path.write_bytes(content)
            with watch.on():
                result = outcome(path, words, recipe)
            if watch.seen or result not in ("taken", "refused"):
                wrong.append(f"{result} {watch.seen} for {words or content!r:.3000}")
            found[result] = found.get(result, 0) + 1
    assert wrong[:3] == [], f"{len(wrong)} of {number}"
    assert found["refused"] > number / 3
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["config.yaml", "here", "local_module.py"]
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err
