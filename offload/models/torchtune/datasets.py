"""What data sets and packs of torchtune need from it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def _is_imported() -> bool:
    """What torchtune has to do with a data set, it was imported for."""
    return "torchtune.datasets" in sys.modules


def is_packed(dataset: Any) -> bool:
    """Whether a data set consists of torchtune's packs."""
    if not _is_imported():
        return False
    from torchtune.datasets import PackedDataset

    return isinstance(dataset, PackedDataset)


def supports_flex_attention() -> bool:
    """Whether torchtune's attention takes the masks of flex attention on this machine."""
    from torchtune.utils._import_guard import _SUPPORTS_FLEX_ATTENTION

    return bool(_SUPPORTS_FLEX_ATTENTION)


def block_causal_mask(lengths: list[Tensor]) -> Tensor:
    """What each token of packs attends to, bool [batch, tokens, tokens].

    Args:
        lengths: of the samples in each pack, int64 [samples].
    """
    from torchtune.modules.attention_utils import create_block_causal_mask

    mask: Tensor = create_block_causal_mask(lengths)
    return mask


@contextlib.contextmanager
def packing_through(rows_of: Callable[[Any], Any]) -> Iterator[None]:
    """While a data set is built, torchtune's packing reads its rows through ``rows_of``.

    The builders pack what they have just made, and give no other hold on its rows. Nothing happens where torchtune has
    not been imported, with the builder that a section names.
    """
    if not _is_imported():
        yield
        return
    from torchtune.datasets import PackedDataset

    original = PackedDataset.__init__

    def init(self: Any, ds: Any, **arguments: Any) -> None:
        original(self, rows_of(ds), **arguments)

    PackedDataset.__init__ = init
    try:
        yield
    finally:
        PackedDataset.__init__ = original
