"""``tune push``: a checkpoint of a run to the Hugging Face Hub."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from offload.errors import UserError, one_line

# What resuming needs and nobody else: the optimizer's states, twice the size of the model and more; the configuration.
RUN_FILES = ("recipe_state.pt", "checkpoint.json")
RUN_FOLDER = "optimizer"
"""Where a run of several processes keeps its states."""


def add_parser(commands: Any) -> None:
    """Adds ``push`` to the sub-commands of an argparse parser."""
    parser = commands.add_parser(
        "push",
        help="upload a checkpoint to the Hugging Face Hub",
        description="Uploads a checkpoint (or its adapter folder) to a model repository on the Hugging Face Hub, which "
        "is made if need be, without what only resuming needs. Log in with `hf auth login`, or set HF_TOKEN.",
        epilog="example: tune push outputs/quickstart/step_224 me/tiny-llama --private",
    )
    parser.add_argument("folder", type=Path, help="such as outputs/quickstart/step_224 or .../step_224/adapter")
    parser.add_argument("repo_id", help="such as me/tiny-llama")
    parser.add_argument("--private", action="store_true", help="where the repository is made, only you can see it")
    parser.add_argument("--revision", help="branch to upload to, made if need be (default: main)")
    parser.add_argument("--message", help="of the commit (default: names the folder)")
    parser.set_defaults(execute=_push)


def _push(args: argparse.Namespace) -> int:
    folder = Path(os.path.expanduser(args.folder))
    _check(folder)
    print(f"Uploading {folder} to {args.repo_id}", flush=True)
    message = args.message or f"Upload {folder.resolve().name}"
    print(_upload(folder, args.repo_id, private=args.private, revision=args.revision, message=message))
    return 0


def _check(folder: Path) -> None:
    """UserError where the folder is no checkpoint, or one that holds nothing but what resuming needs."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: give a checkpoint, such as outputs/quickstart/step_224")
    if any(folder.glob("*.safetensors")):
        return
    inner = sorted(path.parent.name for path in folder.glob("*/*.safetensors"))
    hint = f"; did you mean {folder / inner[-1]}?" if inner else ""
    raise UserError(f"{folder} holds no weights (*.safetensors){hint}")


def _upload(folder: Path, repo_id: str, *, private: bool, revision: str | None, message: str) -> str:
    """Uploads the folder; returns the address of the commit."""
    import huggingface_hub
    from huggingface_hub import errors

    # What the Hub's error derives from is its HTTP client's, another one in each release: no connection, a time-out.
    client_errors: tuple[type[Exception], ...] = (
        OSError,
        *(base for base in errors.HfHubHTTPError.__bases__ if issubclass(base, Exception)),
    )
    api = huggingface_hub.HfApi(token=os.environ.get("HF_TOKEN"))
    try:
        # Without a word on visibility, an organisation's own default holds.
        api.create_repo(repo_id, private=True if private else None, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            commit_message=message,
            # An adapter beside a merged model would be taken for the model: it is pushed by its own folder.
            ignore_patterns=[*RUN_FILES, f"{RUN_FOLDER}/*", "adapter/*"],
        )
    except errors.LocalTokenNotFoundError:
        raise UserError("nobody is logged in: `hf auth login`, or export HF_TOKEN=...") from None
    except errors.HFValidationError as error:
        raise UserError(f"repo_id: {one_line(error)}") from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise UserError(
                f"{repo_id}: the Hub refuses to write there ({status}): `hf auth login` with a token that may write, "
                "or another repository"
            ) from None
        raise UserError(f"upload to {repo_id} failed: {one_line(error)}; the same command tries again") from None
    except client_errors as error:
        raise UserError(f"upload to {repo_id} failed: {one_line(error)}; the same command tries again") from None
    return str(getattr(done, "commit_url", done))
