"""The time that tests spend on a stream where no kernel sleeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.engine.sleeping import Products


@pytest.mark.parametrize(
    ("each", "milliseconds", "count"), [(0.5, 3.0, 6), (0.4, 1.0, 3), (2.0, 1.0, 1), (0.0, 0.01, 10)]
)
def test_as_many_products_as_take_the_time(
    each: float, milliseconds: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Callable[[], None]] = []

    def measure(run: Callable[[], None]) -> float:
        run()
        measured.append(run)
        return each

    multiplied: list[int] = []
    mm = torch.mm

    def counting(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        multiplied.append(out.data_ptr())
        return mm(a, b, out=out)

    products = Products(torch.device("cpu"), measure, size=8)
    monkeypatch.setattr(torch, "mm", counting)
    assert len(measured) == 1
    products.sleep(milliseconds)
    assert len(multiplied) == count and len(set(multiplied)) == 1
