"""The embedded default: a tiny Llama-2-architecture checkpoint, its tokenizer and an instruction data set.

Nothing is downloaded. All of it is made on this machine, on first use, from the Python standard library's own
documentation strings, and kept in ``${TUNE_OFFLOAD_HOME:-~/.cache/tune-offload}/tiny_llama-<key>``::

    checkpoint/   a Hugging Face format checkpoint: config.json, generation_config.json, model.safetensors,
                  tokenizer.model (SentencePiece BPE with byte fallback), tokenizer_config.json,
                  special_tokens_map.json. The weights are random: training starts from nothing.
    data/         train.jsonl and heldout.jsonl, one {"input": question, "output": answer} per line

Configs reach it through an OmegaConf resolver, ``${tiny_llama:checkpoint}``, ``${tiny_llama:tokenizer}``,
``${tiny_llama:train}`` and ``${tiny_llama:heldout}``; reading such a value prepares the files when they are
not there yet. What checks or prints a config must therefore leave such values unresolved.

The same interpreter and package versions give the same bytes: sources are read in sorted order, pairs are
split by a hash of their text, the tokenizer is trained on one thread and the weights come from a seeded
generator. The key names everything that the result depends on, so a cache never has to be cleared by hand.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import functools
import hashlib
import importlib
import inspect
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from offload.errors import UserError

HOME_VARIABLE = "TUNE_OFFLOAD_HOME"

# Raised whenever a change to this file changes what is written.
_FORMAT = 1

# 0.9 M parameters: small enough for two cores to see all of the data in about twenty seconds. The tiny
# configs name the same shape, since a recipe builds the model from its config.
MODEL: dict[str, Any] = {
    "vocab_size": 2048,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "embed_dim": 128,
    "intermediate_dim": 352,
    "max_seq_len": 256,
    "norm_eps": 1e-5,
}
_INIT_SEED = 0
_HEAD_STD = 0.02

# Longer first paragraphs are dropped: whole answers then fit into max_seq_len and none is cut mid-sentence.
_ANSWER_CHARACTERS = (12, 400)
_HELDOUT_PER_THOUSAND = 50
# Fewer pairs than this means a Python without sources or with docstrings stripped.
_FEWEST_PAIRS = 1000

# The documented pure-Python part of the standard library. Packages stand for everything below them. Left
# out: tests, IDLE, lib2to3, site-packages and modules that only some platforms have. A name that this Python
# version does not have (any more) is skipped.
_MODULE_NAMES = """
abc aifc argparse ast asynchat asyncio asyncore base64 bdb binhex bisect bz2 cProfile calendar cgi cgitb
chunk cmd code codecs codeop collections colorsys compileall concurrent configparser contextlib contextvars
copy copyreg crypt csv ctypes dataclasses datetime dbm difflib dis doctest email encodings enum filecmp
fileinput fnmatch formatter fractions ftplib functools genericpath getopt getpass gettext glob graphlib gzip
hashlib heapq hmac html http imaplib imghdr imp importlib inspect io ipaddress json keyword linecache locale
logging lzma mailbox mailcap mimetypes modulefinder multiprocessing netrc nntplib ntpath numbers opcode
operator optparse os pathlib pdb pickle pickletools pipes pkgutil platform plistlib poplib posixpath pprint
profile pstats pty py_compile pyclbr pydoc queue quopri random re reprlib rlcompleter runpy sched secrets
selectors shelve shlex shutil signal site smtpd smtplib sndhdr socket socketserver sqlite3 ssl stat
statistics string stringprep struct subprocess sunau symtable sysconfig tabnanny tarfile telnetlib tempfile
textwrap threading timeit tkinter token tokenize tomllib trace traceback tracemalloc tty turtle types typing
unittest urllib uu uuid venv warnings wave weakref webbrowser wsgiref xdrlib xml xmlrpc zipapp zipfile
zipimport zoneinfo
"""
_MODULES = _MODULE_NAMES.split()

# Python twins of C modules, under the name by which people know them.
_TWINS = {
    "_collections_abc": "collections.abc",
    "_pydatetime": "datetime",
    "_pydecimal": "decimal",
    "_pyio": "io",
    "_weakrefset": "weakref",
}

# Modules written in C: importing them only defines names, and their docstrings are read from the objects.
_C_MODULES = ("array", "binascii", "builtins", "cmath", "itertools", "marshal", "math", "sys", "time", "zlib")

_FILES = {
    "checkpoint": (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ),
    "data": ("heldout.jsonl", "train.jsonl"),
}

# What `${tiny_llama:NAME}` stands for, relative to the prepared folder.
_NAMES = {
    "checkpoint": "checkpoint",
    "tokenizer": "checkpoint/tokenizer.model",
    "train": "data/train.jsonl",
    "heldout": "data/heldout.jsonl",
}


class Pair(NamedTuple):
    """One question about the standard library and the answer its documentation gives."""

    question: str
    answer: str


# ---- front door --------------------------------------------------------------------------------------------


def register_resolvers() -> None:
    """Make ``${tiny_llama:...}`` known to OmegaConf. Cheap, and harmless when called again."""
    from omegaconf import OmegaConf

    # OmegaConf 2.4 renamed it; earlier versions have an unrelated `register_resolver` or none.
    register = getattr(OmegaConf, "register_resolver", None)
    if register is None or "replace" not in inspect.signature(register).parameters:
        register = OmegaConf.register_new_resolver
    register("tiny_llama", _resolve, replace=True)


def location() -> Path:
    """Return the folder that holds, or will hold, the prepared files. Nothing is written."""
    return _home() / f"tiny_llama-{_key()}"


def prepare() -> Path:
    """Return the folder with checkpoint, tokenizer and data, making it first when it is not there yet.

    Safe in several processes at once: one makes the files in a temporary folder next to the final one and
    renames it, the others wait. A folder from which a file is missing is made anew.

    Returns:
        The absolute path of ``tiny_llama-<key>``.

    Raises:
        UserError: the cache folder cannot be written, or this Python's library has no documentation strings.
    """
    final = location()
    if _complete(final):
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _lock(final.parent / ".tiny_llama.lock"):
            if not _complete(final):
                _build(final)
    except OSError as error:
        reason = error.strerror
        if error.errno == errno.ENOSPC:
            reason = f"no space left for about {_size_estimate() >> 20} MiB"
        raise UserError(
            f"{HOME_VARIABLE}: the tiny default model cannot be prepared in {final.parent} ({reason}): "
            f"set {HOME_VARIABLE} to a folder that can be written"
        ) from error
    return final


def _resolve(name: str) -> str:
    if name not in _NAMES:
        known = ", ".join(f"${{tiny_llama:{known}}}" for known in _NAMES)
        raise UserError(f"${{tiny_llama:{name}}}: nothing of that name, expected one of {known}")
    return str(prepare() / _NAMES[name])


# ---- the cache folder --------------------------------------------------------------------------------------


def _home() -> Path:
    """The cache root. An empty variable counts as unset, as it does for XDG_CACHE_HOME."""
    try:
        return Path(os.environ.get(HOME_VARIABLE) or "~/.cache/tune-offload").expanduser().resolve()
    except RuntimeError as error:  # no home directory is known for this user
        raise UserError(f"{HOME_VARIABLE}: {error}: set {HOME_VARIABLE} to a folder that can be written") from error


@functools.lru_cache(maxsize=1)
def _key() -> str:
    """Hash of everything that the prepared bytes depend on."""
    from importlib.metadata import version

    recipe = {
        "format": _FORMAT,
        "python": [sys.implementation.name, *sys.version_info[:3]],
        "packages": {name: version(name) for name in ("sentencepiece", "torch")},
        "model": MODEL,
        "init": [_INIT_SEED, _HEAD_STD],
        "pairs": [_ANSWER_CHARACTERS, _HELDOUT_PER_THOUSAND, _C_MODULES],
        # A distribution may leave modules out or patch them: name and size tell such libraries apart.
        "sources": [[name, path.stat().st_size] for name, path in _sources()],
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]


def _complete(folder: Path) -> bool:
    return all((folder / sub / name).is_file() for sub, names in _FILES.items() for name in names)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive advisory lock on ``path``; the kernel drops it when the holder dies."""
    import fcntl

    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(final: Path) -> None:
    """Make every file in a temporary folder and rename it to ``final``. The caller holds the lock."""
    # Of processes that were killed: while the lock is held, nobody else builds.
    for leftover in final.parent.glob(".tiny_llama-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    print(f"tiny_llama: preparing model, tokenizer and data in {final} (once, some seconds) ...", flush=True)
    started = time.monotonic()
    temporary = Path(tempfile.mkdtemp(prefix=".tiny_llama-", suffix=".tmp", dir=final.parent))
    try:
        for sub in _FILES:
            (temporary / sub).mkdir()
        pairs = read_pairs()
        if len(pairs) < _FEWEST_PAIRS:
            raise UserError(
                f"tiny_llama: only {len(pairs)} documented names in the standard library at {_stdlib()}, "
                f"expected at least {_FEWEST_PAIRS}: use a Python that comes with its sources"
            )
        train, heldout = _split(pairs)
        _write_jsonl(temporary / "data" / "train.jsonl", train)
        _write_jsonl(temporary / "data" / "heldout.jsonl", heldout)
        # The tokenizer sees the training pairs only, so that held-out text stays unseen by every part.
        _train_tokenizer(train, temporary / "checkpoint" / "tokenizer.model")
        parameters = _write_checkpoint(temporary / "checkpoint")
        temporary.chmod(0o755)  # mkdtemp's 0700 would lock other users out of a shared cache
        if final.exists():
            final.rename(temporary / "incomplete")
        temporary.rename(final)
        shutil.rmtree(final / "incomplete", ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    print(
        f"tiny_llama: {parameters / 1e6:.1f} M parameters, {len(train)} training and {len(heldout)} held-out "
        f"pairs, ready in {time.monotonic() - started:.0f} s",
        flush=True,
    )


def _size_estimate() -> int:
    """Bytes of the prepared folder: fp32 weights and about 2 MiB of text."""
    return 4 * sum(_numel(shape) for _, shape in _weight_shapes()) + (2 << 20)


# ---- question and answer pairs -----------------------------------------------------------------------------


def _stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib"))


@functools.lru_cache(maxsize=1)
def _sources() -> tuple[tuple[str, Path], ...]:
    """The (dotted module name, source file) pairs to read, sorted by name."""
    root = _stdlib()
    found: dict[str, Path] = {}
    for name in (*_MODULES, *_TWINS):
        if (root / f"{name}.py").is_file():
            found[_TWINS.get(name, name)] = root / f"{name}.py"
            continue
        for path in (root / name).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            # Private modules and bundled test suites document no public name.
            if not any(part.startswith("_") or part in ("test", "tests", "idle_test") for part in parts):
                found[".".join(parts)] = path
    return tuple(sorted(found.items()))


def read_pairs() -> list[Pair]:
    """Read question and answer pairs from the standard library's documentation strings.

    Python sources are parsed, never imported. The answer is the docstring's first paragraph on one line. Of
    pairs with the same answer only the first stays: otherwise held-out answers would be seen in training.

    Returns:
        Pairs in a fixed order: by module, and by position in its source.
    """
    documented: list[tuple[str, str]] = []
    for module, path in _sources():
        # Bytes, because a source may declare its encoding.
        tree = ast.parse(path.read_bytes())
        documented += _documented_nodes(module, tree)
    for module in _C_MODULES:
        documented += _documented_objects(module)
    pairs, answers = [], set()
    for question, docstring in documented:
        answer = _first_paragraph(docstring)
        if answer is None or answer.lower() in answers:
            continue
        answers.add(answer.lower())
        pairs.append(Pair(question, answer))
    return pairs


def _documented_nodes(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (question, docstring) for a module and every public name that it documents."""
    if docstring := ast.get_docstring(tree):
        yield f"What is the module {module} for?", docstring

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.If, ast.Try)):  # definitions that depend on the platform
                yield from walk(child, prefix)
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            if child.name.startswith("_"):
                continue
            name = f"{prefix}.{child.name}"
            is_class = isinstance(child, ast.ClassDef)
            if docstring := ast.get_docstring(child):
                yield _question(name, is_class), docstring
            if is_class:
                yield from walk(child, name)

    yield from walk(tree, module)


def _documented_objects(module: str) -> Iterator[tuple[str, str]]:
    """The same for a module without Python source, from its live objects."""
    try:
        members = sorted(vars(importlib.import_module(module)).items())
    except ImportError:  # a build without, say, zlib
        return
    prefix = "" if module == "builtins" else f"{module}."
    for name, member in members:
        if name.startswith("_") or not isinstance(member.__doc__, str) or not callable(member):
            continue
        yield _question(prefix + name, isinstance(member, type)), inspect.cleandoc(member.__doc__)
        if isinstance(member, type) and not issubclass(member, BaseException):
            for attribute, value in sorted(vars(member).items()):
                if not attribute.startswith("_") and callable(value) and isinstance(value.__doc__, str):
                    yield _question(f"{prefix}{name}.{attribute}", False), inspect.cleandoc(value.__doc__)


def _question(name: str, is_class: bool) -> str:
    return f"What is {name}?" if is_class else f"What does {name} do?"


# A first line that only repeats the signature: "dis(x=None, *, file=None)" or "copy(x) -> y".
_SIGNATURE = re.compile(r"^[\w.]+\(.*\)(\s*(->|=|:|--?)\s*[^.]{0,40})?$")


def _first_paragraph(docstring: str) -> str | None:
    """Return the first prose paragraph on one line, ended by a full stop; None if it is no fit answer."""
    for paragraph in re.split(r"\n\s*\n", docstring.strip()):
        lines = [line.strip() for line in paragraph.splitlines()]
        while lines and _SIGNATURE.match(lines[0]):
            lines.pop(0)
        text = re.sub(r"\s+", " ", " ".join(lines)).strip()
        if text:
            break
    else:
        return None
    text = text.rstrip(":-,; ")
    if not text.endswith((".", "!", "?")):
        text += "."
    shortest, longest = _ANSWER_CHARACTERS
    # Doctest prompts and tables are not prose.
    if not shortest <= len(text) <= longest or ">>>" in text or not text[0].isalpha():
        return None
    return text if sum(character.isalpha() for character in text) > 0.6 * len(text) else None


def _split(pairs: Iterable[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Split by a hash of the answer: a pair stays on its side when others come or go."""
    train: list[Pair] = []
    heldout: list[Pair] = []
    for pair in pairs:
        bucket = int.from_bytes(hashlib.sha256(pair.answer.encode()).digest()[:4], "big") % 1000
        (heldout if bucket < _HELDOUT_PER_THOUSAND else train).append(pair)
    return train, heldout


def _write_jsonl(path: Path, pairs: Iterable[Pair]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for pair in pairs:
            file.write(json.dumps({"input": pair.question, "output": pair.answer}, ensure_ascii=False) + "\n")


# ---- tokenizer ---------------------------------------------------------------------------------------------


def _train_tokenizer(pairs: Iterable[Pair], path: Path) -> None:
    """Train a SentencePiece BPE model of Llama-2's kind on one thread.

    As in Llama-2: unk 0, bos 1, eos 2, no pad, bytes for unknown characters, digits one by one, whitespace
    kept. Questions are seen in Llama-2's chat format, so that "[INST]" takes few tokens.
    """
    import sentencepiece

    texts = [text for pair in pairs for text in (f"[INST] {pair.question} [/INST]", pair.answer)]
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=file,
            model_type="bpe",
            vocab_size=MODEL["vocab_size"],
            byte_fallback=True,
            split_digits=True,
            character_coverage=0.99995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=True,
            allow_whitespace_only_pieces=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=1,  # the order in which threads finish must not decide between equal merges
            minloglevel=2,
        )


# ---- checkpoint --------------------------------------------------------------------------------------------


def _weight_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (Hugging Face parameter name, shape) in the model's own order. Linear weights are [out, in]."""
    dim, hidden, vocab = MODEL["embed_dim"], MODEL["intermediate_dim"], MODEL["vocab_size"]
    head_dim = dim // MODEL["num_heads"]
    kv_dim = head_dim * MODEL["num_kv_heads"]
    yield "model.embed_tokens.weight", (vocab, dim)
    for index in range(MODEL["num_layers"]):
        layer = f"model.layers.{index}."
        yield layer + "input_layernorm.weight", (dim,)
        yield layer + "self_attn.q_proj.weight", (dim, dim)
        yield layer + "self_attn.k_proj.weight", (kv_dim, dim)
        yield layer + "self_attn.v_proj.weight", (kv_dim, dim)
        yield layer + "self_attn.o_proj.weight", (dim, dim)
        yield layer + "post_attention_layernorm.weight", (dim,)
        yield layer + "mlp.gate_proj.weight", (hidden, dim)
        yield layer + "mlp.up_proj.weight", (hidden, dim)
        yield layer + "mlp.down_proj.weight", (dim, hidden)
    yield "model.norm.weight", (dim,)
    yield "lm_head.weight", (vocab, dim)


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _write_checkpoint(folder: Path) -> int:
    """Write config, tokenizer settings and random fp32 weights into ``folder``; return how many weights.

    They are chosen for learning much in few steps. Embeddings are standard normal, as in torch.nn.Embedding:
    with a standard deviation of 0.02 each step of Adam, about as large as the learning rate, would change a
    good part of them. Projections have 1/sqrt(inputs), which keeps the scale of what passes through; the two
    that write into the residual stream 1/sqrt(2 * layers) of that, so that its variance does not grow with
    depth (GPT-2, section 2.3 of "Language Models are Unsupervised Multitask Learners"). The head is small, so
    that training begins near the loss of guessing, ln(vocabulary).
    """
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(_INIT_SEED)
    weights = {}
    for name, shape in _weight_shapes():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
        else:
            weights[name] = torch.empty(shape).normal_(std=_std(name, shape), generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # some versions of safetensors write 0600: see _build

    token_ids = {"bos_token_id": 1, "eos_token_id": 2}
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **token_ids,
            "pad_token_id": None,
            "vocab_size": MODEL["vocab_size"],
            "hidden_size": MODEL["embed_dim"],
            "intermediate_size": MODEL["intermediate_dim"],
            "num_hidden_layers": MODEL["num_layers"],
            "num_attention_heads": MODEL["num_heads"],
            "num_key_value_heads": MODEL["num_kv_heads"],
            "head_dim": MODEL["embed_dim"] // MODEL["num_heads"],
            "max_position_embeddings": MODEL["max_seq_len"],
            "hidden_act": "silu",
            "rms_norm_eps": MODEL["norm_eps"],
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "pretraining_tp": 1,
            "torch_dtype": "float32",
            "use_cache": True,
        },
    )
    _write_json(folder / "generation_config.json", {"do_sample": False, **token_ids})
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "pad_token": None,
            "clean_up_tokenization_spaces": False,
            "legacy": False,
            "model_max_length": MODEL["max_seq_len"],
        },
    )
    _write_json(folder / "special_tokens_map.json", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    return sum(weight.numel() for weight in weights.values())


def _std(name: str, shape: tuple[int, ...]) -> float:
    if "embed_tokens" in name:
        return 1.0
    if "lm_head" in name:
        return _HEAD_STD
    std = shape[1] ** -0.5
    return std / (2 * MODEL["num_layers"]) ** 0.5 if "o_proj" in name or "down_proj" in name else std


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
