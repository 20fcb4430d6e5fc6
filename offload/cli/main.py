"""The ``tune`` command: ``tune run | ls | cp | cat | validate | download | push | compare | doctor |
plan``.

It answers for our recipes and configs and for torchtune's. What belongs to torchtune is handed on to its own
command, imported at that moment and not before.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import offload
from offload import _startup, streams
from offload.cli import registry
from offload.errors import UserError
from offload.paths import expanded

_DESCRIPTION = "Fine-tunes language models on one GPU or several, with the optimizer offloaded to host memory."

_EPILOG = """\
examples:
  tune run full_finetune_single_device --config tiny_llama_offload
  tune run full_finetune_single_device --config llama2_7b_offload optimizer.lr=1e-5
  tune ls                                   every recipe and config, torchtune's included
  tune cp llama2_7b_offload ./mine.yaml     a config of your own to edit
  tune validate ./mine.yaml batch_size=4    is it well-formed? loads no weights
  tune plan --config llama2_7b_offload --gpu "RTX 4090"     will it fit? downloads nothing
  tune compare outputs/a outputs/b          two runs beside each other: speed, memory, loss
  tune doctor                               what this machine gives, and what hinders training on it

`tune COMMAND --help` tells more. `tune-offload` and `python -m offload` are the same command.
"""

_RUN_HELP = """\
usage: tune run RECIPE --config CONFIG [key=value ...]
       tune run [torchrun options] RECIPE --config CONFIG [key=value ...]    (recipes named *_distributed)

Runs a recipe.

  RECIPE            a name from `tune ls`, or the path of a Python file. A name that torchtune has too
                    means ours, unless CONFIG is one of torchtune's; torchtune/NAME always means torchtune's.
  --config CONFIG   a name from `tune ls`, or the path of a YAML file
  --dry-run         tells the memory that the run would take and whether it fits, as `tune plan` does, and ends

overrides (our recipes):
  key=value         sets a key: optimizer.lr=1e-5   output_dir=/data/run1   tags=[a,b]
  section=path      swaps a component: optimizer=torch.optim.AdamW
                    (arguments in the config that the new one does not take are dropped, and a line says so)
  section=null      leaves a section out: lr_scheduler=null
  ~key              removes a key from the config
  +key=value        adds a key that the config does not have

`tune run RECIPE --help` lists the recipe's keys. Every key, value and component is checked before any weight is loaded.

examples:
  tune run full_finetune_single_device --config tiny_llama_offload max_steps_per_epoch=20
  tune run lora_finetune_single_device --config ./mine.yaml
  tune run --nproc_per_node 2 full_finetune_distributed --config tiny_llama_offload_distributed
"""


_ELSEWHERE = {
    **dict.fromkeys(("train", "finetune", "sft", "launch"), "tune run RECIPE --config CONFIG trains"),
    **dict.fromkeys(
        ("generate", "chat", "inference"),
        "tune run generate --config hf_generate model.path=outputs/RUN asks a model",
    ),
    **dict.fromkeys(("eval", "evaluate"), "docs/runs.md tells how lm_eval reads a checkpoint"),
    **dict.fromkeys(("merge", "export"), "a LoRA run leaves the merged model in step_<n> beside its adapter/"),
}
"""Commands of other trainers, and what does it here."""

_COMMANDS = ("run", "ls", "cp", "cat", "validate", "download", "push", "compare", "doctor", "plan")


class _Parser(argparse.ArgumentParser):
    """argparse with this command's one-line errors."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with the arguments ``argv`` (default: the process's) and returns its exit status.

    A mistake of the user's is printed as ``error: ...``, one line per problem, and gives status 2. A recipe's
    own ``SystemExit`` is passed through.
    """
    _startup.disarm()
    streams.open_missing()
    streams.write_anything()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()  # here, where an error has a handler, and not at Python's end
        return status
    except UserError as error:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # `tune cat NAME | head`: the reader has enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if arguments[:1] == ["run"]:
            raise
        print(f"error: cannot write the answer: {error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except KeyboardInterrupt:
        return 130


def script() -> NoReturn:
    """What the installed scripts call."""
    status = main()
    gc.freeze()  # or Python would search what a plan imported and built for garbage at its end, for a second
    sys.exit(status)


def _dispatch(arguments: list[str]) -> int:
    # `run` passes most of its words on, to the recipe or to torchrun: argparse must not interpret them.
    if arguments[:1] == ["run"]:
        return _run(arguments[1:])
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if arguments[:1] in (["validate"], ["plan"]):
        from offload.training.launch import as_override

        arguments = [as_override(word) for word in arguments]
        if arguments[0] == "validate":  # as the others take it
            arguments = [word.removeprefix("--config=") for word in arguments if word != "--config"]
    if arguments and not arguments[0].startswith("-") and arguments[0] not in _COMMANDS:
        from offload.component import nearest

        near = nearest(arguments[0], _COMMANDS)
        usual = f"did you mean {near}?" if near else f"choose from {', '.join(_COMMANDS)}"
        raise UserError(f"no command {arguments[0]!r}: {_ELSEWHERE.get(arguments[0], usual)}")
    parser = _parser()
    args, extra = parser.parse_known_args(arguments)
    if args.command in ("validate", "plan"):
        # argparse gives up on positional words that come after an option.
        args.overrides += [word for word in extra if not word.startswith("-")]
        extra = [word for word in extra if word.startswith("-")]
    if extra and args.command in ("validate", "plan"):
        from offload.training.launch import as_settings

        told = "\n".join(as_settings(arguments, extra))
        raise UserError(f"{told}; `tune {args.command} --help` lists its options")
    if extra:
        raise UserError(f"unknown argument {extra[0]}; see `tune {args.command or ''}".rstrip() + " --help`")
    if args.command is None:
        parser.print_help()
        return 0
    status: int = args.execute(args)
    return status


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="tune", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"tune-offload {offload.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")

    commands.add_parser("run", help="run a recipe with a config", add_help=False)

    ls = commands.add_parser("ls", help="list recipes and configs", description="Lists recipes and their configs.")
    ls.add_argument("pattern", nargs="?", help="only what has this in its recipe's or config's name")
    ls.set_defaults(execute=_ls)

    cp = commands.add_parser(
        "cp",
        help="copy a recipe or config to edit",
        description="Copies a recipe or config to a file of your own.",
        epilog="example: tune cp llama2_7b_offload ./mine.yaml",
    )
    cp.add_argument("file", help="a recipe or config from `tune ls`")
    cp.add_argument("destination", help="a file, or a folder to put it into; the suffix may be left out")
    existing = cp.add_mutually_exclusive_group()
    existing.add_argument("-f", "--force", action="store_true", help="replace an existing destination")
    existing.add_argument("-n", "--no-clobber", action="store_true", help="leave it as it is, without an error")
    cp.add_argument("--make-parents", action="store_true", help="make the destination's missing folders")
    cp.set_defaults(execute=_cp)

    cat = commands.add_parser("cat", help="print a config or recipe", description="Prints a config or recipe.")
    cat.add_argument("name", help="a config or recipe from `tune ls`, or a path")
    cat.add_argument("--sort", action="store_true", help="a config's keys in alphabetical order, without comments")
    cat.set_defaults(execute=_cat)

    validate = commands.add_parser(
        "validate",
        help="check a config",
        description="Checks a config's keys, values and components' arguments, without loading weights. "
        "Exit status 0 where all is well, 2 where not.",
        epilog="example: tune validate llama2_7b_offload optimizer.lr=1e-5",
    )
    validate.add_argument("config", help="a config from `tune ls`, or a path")
    validate.add_argument("overrides", nargs="*", default=[], metavar="override", help="as for `tune run`")
    validate.add_argument("--recipe", help="the recipe to check against (default: the one it is for)")
    validate.set_defaults(execute=_validate)

    from offload.cli import compare, doctor, download, plan, push

    download.add_parser(commands)
    push.add_parser(commands)
    compare.add_parser(commands)
    doctor.add_parser(commands)
    plan.add_parser(commands)
    return parser


def _ls(args: argparse.Namespace) -> int:
    lines = [f"{'RECIPE':<48} CONFIG"]
    names = []
    for recipe, configs in registry.listing():
        names += [recipe, *configs]
        if args.pattern and args.pattern not in recipe:
            configs = [config for config in configs if args.pattern in config]
            if not configs:
                continue
        for position, config in enumerate(configs or ["<>"]):
            lines.append(f"{recipe if position == 0 else '':<48} {config}")
    if len(lines) == 1:
        from offload.component import nearest

        near = nearest(args.pattern, {part for name in names for part in re.split(r"[/_]", name)})
        hint = f"did you mean {near}?" if near else "`tune ls` lists all of them"
        raise UserError(f"no recipe or config has {args.pattern!r} in its name; {hint}")
    print("\n".join(lines))
    return 0


def _cp(args: argparse.Namespace) -> int:
    source, is_config = registry.find_any(args.file)
    suffix = source.suffix
    destination = expanded(args.destination, "the destination")
    if destination.is_dir() or args.destination.endswith(("/", os.sep)):
        destination = destination / source.name
    elif destination.suffix not in {suffix, *((".yml",) if is_config else ())}:
        destination = Path(f"{destination}{suffix}")
    if args.no_clobber and destination.exists():
        print(f"{destination} exists already: left as it is")
        return 0
    try:
        if args.make_parents:
            destination.parent.mkdir(parents=True, exist_ok=True)
        if destination.exists() and destination.samefile(source):
            raise UserError(f"{destination} is the file itself: give another destination")
        # Not asked beforehand: a file that appears in between must not be lost either.
        with open(source, "rb") as original, open(destination, "wb" if args.force else "xb") as copy:
            shutil.copyfileobj(original, copy)
    except FileExistsError:
        raise UserError(f"{destination} exists already: give another destination, or --force to replace it") from None
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not destination.parent.exists():
            raise UserError(f"{destination.parent} does not exist: make it, or add --make-parents") from None
        way = "read" if error.filename == str(source) else "write"
        raise UserError(f"cannot {way} {source if way == 'read' else destination}: {error.strerror}") from None
    print(f"Copied to {destination}")
    return 0


def _cat(args: argparse.Namespace) -> int:
    source, is_config = registry.find_any(args.name)
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {source}: {error}") from None
    if args.sort:
        if not is_config:
            raise UserError(f"--sort is for configs; {args.name} is a recipe")
        import yaml

        try:
            text = yaml.safe_dump(yaml.safe_load(text), sort_keys=True, allow_unicode=True)
        except yaml.YAMLError as error:
            raise UserError(f"{source} is not YAML: {' '.join(str(error).split())}") from None
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()
    return 0


def _validate(args: argparse.Namespace) -> int:
    from offload.cli import validate

    return validate.validate(args.config, args.overrides, recipe=args.recipe)


class RunArguments(NamedTuple):
    torchrun: list[str]
    recipe: str
    config: str
    rest: list[str]


def split_run(arguments: list[str]) -> RunArguments:
    """Takes a ``tune run`` line apart."""
    words = list(arguments)
    config = None
    for index, word in enumerate(words):
        if word in ("--config", "-c"):
            if index + 1 == len(words):
                raise UserError("--config needs the name or path of a config; `tune ls` lists them")
            config = words[index + 1]
            del words[index : index + 2]
            break
        if word.startswith("--config="):
            config = word.removeprefix("--config=")
            del words[index]
            break
    at = _recipe_position(words)
    if at is None:
        example = "tune run full_finetune_single_device --config tiny_llama_offload"
        raise UserError(f"which recipe? For example: {example}; `tune ls` lists all of them")
    if config is None:
        raise UserError(_which_config(words, at))
    return RunArguments(words[:at], words[at], config, words[at + 1 :])


def _which_config(words: list[str], at: int) -> str:
    """What is said where no word is ``--config``."""
    from offload.component import nearest

    for word in words:
        if word.startswith("--") and nearest(word.lstrip("-").partition("=")[0], ["config"]):
            return f"unknown option {word}: did you mean --config?"
    for index, word in enumerate(words[at:], at):
        with contextlib.suppress(UserError):
            found = registry.find_config(word)
            recipe = words[at] if index > at else registry.recipe_of_config(found.name if found.shipped else "")
            return f"{word} is a config: tune run {recipe} --config {word}"
    return f"which config? For example: tune run {words[at]} --config NAME; `tune ls` lists the configs of each recipe"


def _recipe_position(words: list[str]) -> int | None:
    """Where the recipe stands: first, or, after torchrun's options, the first word that names one."""
    if not words:
        return None
    if not words[0].startswith("-"):
        return 0
    recipes = {name for name, _ in registry.listing()} | set(registry.torchtune_recipes())
    for index, word in enumerate(words):
        if word in recipes or word.removesuffix(".py") in recipes or word.endswith(".py"):
            return index
    # An option's value may stand alone, so the last word without a dash or an equals sign is the best guess
    # at a misspelt recipe; finding it fails and names the nearest one.
    candidates = [i for i, word in enumerate(words) if not word.startswith("-") and "=" not in word]
    return candidates[-1] if candidates else None


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_RUN_HELP, end="")
        return 0
    from offload.cli.handover import check_works, torchtune

    if "-h" in arguments or "--help" in arguments:
        at = _recipe_position(arguments)
        recipe = registry.find_recipe(arguments[at]) if at is not None else None
        if recipe is None:
            print(_RUN_HELP, end="")
            return 0
        if not recipe.ours:
            return torchtune(["run", recipe.name, "--help"])
        from offload.cli import recipe_help

        print(recipe_help.text(recipe))
        return 0
    is_dry = "--dry-run" in arguments
    run = split_run([word for word in arguments if word != "--dry-run"])
    config = registry.find_config(run.config)
    recipe = registry.find_recipe(run.recipe, config=config)
    if recipe.ours:
        _check_goes_together(recipe, config)
        _check_options(run)
    if is_dry:
        return _plan(run)
    if not recipe.ours:
        check_works(recipe.name)
        if run.torchrun and not recipe.distributed:
            raise UserError(registry.single_device(recipe.name, run.torchrun))
        return torchtune(["run", *run.torchrun, recipe.name, "--config", str(config.path), *run.rest])
    if run.torchrun:
        if recipe.path.parent == registry.recipes_dir() and not recipe.distributed:
            raise UserError(registry.single_device(recipe.name, run.torchrun))
        from offload.cli import torchrun

        _settle_openmp()
        return torchrun.launch(run.torchrun, recipe, config.path, run.rest)
    return execute(recipe.path, ["--config", str(config.path), *run.rest])


def _check_goes_together(recipe: registry.RecipeRef, config: registry.ConfigRef) -> None:
    """Refuses one of our configs under a recipe of another kind, all of whose keys would be strange to it."""
    if not (config.ours and config.shipped) or recipe.name not in registry.our_recipes():
        return
    for_recipe = registry.recipe_of_config(config.name)
    if (for_recipe == "generate") != (recipe.name == "generate"):
        raise UserError(
            f"{config.name} is a config of the recipe {for_recipe}: tune run {for_recipe} --config {config.name}"
        )
    if for_recipe.partition("_")[0] != recipe.name.partition("_")[0]:
        print(f"note: {config.name} is a config of the recipe {for_recipe}", file=sys.stderr)


def _check_options(run: RunArguments) -> None:
    """Refuses options behind the recipe's name that stand before it, or are misspelt."""
    from offload.component import nearest

    for word in run.rest:
        name = word.partition("=")[0]
        if not name.startswith("--"):
            continue
        if name in ("--gpu", "--vram", "--ram", "--ram-bandwidth"):
            raise UserError(f"{name} is an option of tune plan: tune plan --config {run.config} {name} …")
        if nearest(name.replace("_", "-"), ["--dry-run"]):
            raise UserError(f"unknown option {name}: did you mean --dry-run?")
        if name.lstrip("-").replace("-", "_") in ("nproc_per_node", "nnodes", "max_restarts") or name.startswith(
            "--rdzv"
        ):
            raise UserError(
                f"{name} is an option of torchrun: it stands before the recipe's name (tune run {name} … {run.recipe} "
                f"--config {run.config})"
            )


def _plan(run: RunArguments) -> int:
    """What `tune run … --dry-run` does in place of running."""
    from offload.cli import plan, torchrun
    from offload.training.launch import as_override

    local, hosts = torchrun.processes(run.torchrun)
    here = argparse.Namespace(gpu=None, vram=None, ram=None, ram_bandwidth=None, nproc_per_node=local, nnodes=hosts,
                              network=None, write=None)  # fmt: skip
    return plan.plan(run.config, [as_override(word) for word in run.rest], here, recipe=run.recipe)


def execute(recipe: Path, arguments: list[str]) -> int:
    """Runs a recipe file as the main program, in this process."""
    import runpy

    _settle_openmp()
    sys.argv = [str(recipe), *arguments]
    # For modules of the user's beside the recipe or in the current folder.
    for folder in (os.getcwd(), str(recipe.parent)) if recipe.parent != registry.recipes_dir() else ():
        if folder not in sys.path:
            sys.path.append(folder)
    runpy.run_path(str(recipe), run_name="__main__")
    return 0


def _settle_openmp() -> None:
    # Threads that wait for each other spin for some ten microseconds, then sleep. GNU's OpenMP spins for milliseconds,
    # and on shared cores that takes the core which the awaited thread needs; sleeping at once costs small models speed
    # on an idle machine (scripts/results/omp_waiting.json). OpenMP reads this when torch loads it.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
