"""Hands a command on to torchtune's own ``tune``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from offload.errors import UserError

NOT_WORKING = {
    "eleuther_eval": (
        "torchtune's recipe takes lm_eval before 0.4.10 for the newest, and those need transformers before 5; "
        "checkpoints are in Hugging Face's format, so ask lm_eval itself: pip install 'lm_eval>=0.4.10', then "
        "lm_eval --model hf --model_args pretrained=outputs/RUN/step_N,dtype=bfloat16 --tasks hellaswag"
    ),
}
"""Recipes of torchtune that fail with the packages that this one needs: why, and the way out."""


def check_works(recipe: str) -> None:
    """Refuse a recipe that would end in a traceback of its dependencies.

    Raises:
        UserError: says what to do in its place.
    """
    if recipe in NOT_WORKING:
        raise UserError(f"{recipe}: {NOT_WORKING[recipe]}")


def torchtune(arguments: Sequence[str]) -> int:
    """Runs torchtune's command with ``arguments`` (``["run", ...]``), in this process; returns 0.

    Imports torch and all of torchtune. Its errors are its own: argparse's, with status 2.
    """
    from offload import torchao_shim

    torchao_shim.install()
    try:
        from torchtune._cli.tune import main
    except ImportError as error:
        raise UserError(f"torchtune cannot be imported ({error}): pip install torchtune==0.6.1") from None
    # torchtune's command reads sys.argv itself, more than once.
    sys.argv = ["tune", *arguments]
    main()
    return 0
