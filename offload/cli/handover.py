"""Hands a command on to torchtune's own ``tune``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from offload.errors import UserError


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
