"""``tune download``: a model's files from the Hugging Face Hub, or, through torchtune, from Kaggle.

The options are torchtune's. Its own command for the Hub takes seconds to start and answers an unreachable
network with a traceback, so the Hub's part is done here.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from offload.errors import UserError, one_line
from offload.paths import expanded

# torchtune's checkpointer looks here for the name of the base model when it writes an adapter's config.
_REPO_ID_FILE = "original_repo_id.json"


def add_parser(commands: Any) -> None:
    """Adds ``download`` to the sub-commands of an argparse parser."""
    parser = commands.add_parser(
        "download",
        help="download a model from the Hugging Face Hub or Kaggle",
        description="Downloads a model's files.",
        epilog="example: tune download meta-llama/Llama-2-7b-hf --output-dir /data/Llama-2-7b-hf "
        "--ignore-patterns '*.bin'",
    )
    parser.add_argument("repo_id", help="such as meta-llama/Llama-2-7b-hf; for Kaggle, a model handle")
    parser.add_argument("--output-dir", type=Path, help="where to put the files (default: ~/models/<model name>)")
    parser.add_argument(
        "--hf-token",
        help="for gated models on Hugging Face (better: $HF_TOKEN or `hf auth login`, which no other user sees)",
    )
    parser.add_argument(
        "--ignore-patterns",
        action="append",
        metavar="PATTERN",
        help="leave out files that match, such as '*.bin'; may be given more than once (Hugging Face only)",
    )
    parser.add_argument("--source", choices=["huggingface", "kaggle"], default="huggingface", help="which hub")
    parser.add_argument("--kaggle-username", help="for private or gated models on Kaggle")
    parser.add_argument("--kaggle-api-key", help="for private or gated models on Kaggle")
    parser.set_defaults(execute=_download)


def _download(args: argparse.Namespace) -> int:
    if args.source == "kaggle":
        if args.output_dir or args.ignore_patterns:
            raise UserError("Kaggle's client takes no --output-dir and no --ignore-patterns: leave them out")
        from offload.cli.handover import torchtune

        credentials = []
        for option, value in (
            ("--kaggle-username", args.kaggle_username),
            ("--kaggle-api-key", args.kaggle_api_key),
        ):
            credentials += [option, value] if value else []
        return torchtune(["download", args.repo_id, "--source", "kaggle", *credentials])

    folder = args.output_dir or Path("~/models") / args.repo_id.rstrip("/").rpartition("/")[2]
    folder = expanded(folder, "--output-dir")
    print(f"Downloading {args.repo_id} to {folder}", flush=True)
    _fetch(args.repo_id, folder, args.ignore_patterns, args.hf_token or os.environ.get("HF_TOKEN"))
    (folder / _REPO_ID_FILE).write_text(json.dumps({"repo_id": args.repo_id}, indent=4), encoding="utf-8")
    print("Downloaded:", *sorted(str(path) for path in folder.iterdir() if path.is_file()), sep="\n  ")
    return 0


def _fetch(repo_id: str, folder: Path, ignore: list[str] | None, token: str | None) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    page = f"https://huggingface.co/{repo_id}"
    try:
        huggingface_hub.snapshot_download(repo_id, local_dir=folder, ignore_patterns=ignore, token=token)
    except errors.GatedRepoError:
        way_out = "ask for access there" if token else "ask for access there, then export HF_TOKEN=..."
        raise UserError(f"{repo_id} is gated: {page}: {way_out}") from None
    except errors.RepositoryNotFoundError:
        hint = "check the spelling" if token else "check the spelling; a private one needs HF_TOKEN"
        raise UserError(f"no model {repo_id} at {page}: {hint}") from None
    except errors.HFValidationError as error:
        raise UserError(f"repo_id: {one_line(error)}") from None
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"download of {repo_id} failed: {one_line(error)}; the same command goes on where it stopped"
        ) from None
