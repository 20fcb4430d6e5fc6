"""offload.training.hindsight: what the planner says of a run, beside what the run measured."""

from __future__ import annotations

from offload.plan.prediction import COMPUTE, UP
from offload.training.hindsight import Expected

MEASURED = {"steps": 100, "tokens_per_second": 4000.0, "device_peak_reserved_gib": 20.0, "host_rss_peak_gib": 30.0,
            "seconds_optimizer": 25.0}  # fmt: skip


def test_predicted_and_measured_side_by_side() -> None:
    expected = Expected(21.0, 27.0, 4400.0, 0.5, UP)
    assert expected.lines(MEASURED) == [
        ("predicted", "21.00 GiB reserved of the device, measured 20.00 (+5%); 27.00 GiB of the host, measured 30.00 "
                      "(-10%); 4,400 tok/s, measured 4,000 (+10%)"),
        ("exposed", f"0.50 s of each step, in which the device waits for: {UP} (predicted); 0.25 s of each in the "
                    "optimizer's step (measured)"),
    ]  # fmt: skip
    assert expected.values() == {
        "predicted_device_peak_reserved_gib": 21.0,
        "predicted_host_rss_peak_gib": 27.0,
        "predicted_tokens_per_second": 4400.0,
        "predicted_exposed_seconds": 0.5,
    }


def test_what_is_not_known_is_left_out() -> None:
    expected = Expected(None, 27.0)
    assert expected.lines({}) == [("predicted", "27.00 GiB of the host")]
    assert expected.values() == {"predicted_host_rss_peak_gib": 27.0}
    hidden = Expected(None, 27.0, 4000.0, 0.0, COMPUTE)
    assert hidden.lines(MEASURED)[1][1].startswith("nothing: the optimizer is hidden (predicted)")
