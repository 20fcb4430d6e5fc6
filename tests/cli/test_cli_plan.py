"""``tune plan`` and ``tune run … --dry-run``: the same table, the verdict, what makes a run fit, and mistakes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from offload.cli import plan, registry
from offload.cli.main import main
from offload.errors import UserError
from offload.metrics.this_machine import machine_of
from offload.plan.profile import Profile, write_profile


def totals(text: str) -> dict[str, float]:
    return {what: float(gib) for what, gib in re.findall(r"^(GPU|host) in all.*?: ([\d.]+) GiB", text, re.M)}


def test_a_run_that_does_not_fit_is_told_what_makes_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--config", "tiny_llama_offload", "batch_size=16", "--vram", "560MiB"]
    assert main(command) == 1
    told = capsys.readouterr().out
    assert "DOES NOT FIT" in told
    ways = [line.split(maxsplit=2)[2] for line in told.partition("  GPU    host  GiB\n")[2].splitlines()]
    assert ways
    # Each line is to be pasted, and does what it says.
    assert main([*command, *ways[0].split()]) == 0
    assert "fits" in capsys.readouterr().out


def test_a_known_card_has_a_speed_and_a_ranked_list_that_validates(capsys: pytest.CaptureFixture[str]) -> None:
    """A line's speed is that of its own plan within 1 %: work is counted for one micro-batch, and follows from that for
    others."""
    command = ["plan", "--config", "tiny_llama_offload", "--gpu", "RTX 3060", "--ram", "16GiB"]
    assert main(command) == 0
    told = capsys.readouterr().out
    speed = re.search(r"^speed: ([\d,]+) tok/s; 1,024 tokens, a step", told, re.M)
    assert speed and int(speed[1].replace(",", "")) > 10_000
    assert "bounded by: " in told and "data sheet of RTX 3060 12GB" in told
    rows = [line.split(maxsplit=3) for line in told.partition("GPU    host  GiB\n")[2].splitlines()]
    speeds = [int(row[0].replace(",", "")) for row in rows]
    assert speeds == sorted(speeds, reverse=True) and speeds[0] >= int(speed[1].replace(",", ""))
    for *_, changes in rows:
        words = [] if changes == "(as it is)" else changes.split()
        assert main(["validate", "tiny_llama_offload", *words]) == 0, words
    # The first line does what it says.
    capsys.readouterr()
    assert main([*command, *([] if rows[0][3] == "(as it is)" else rows[0][3].split())]) == 0
    again = re.search(r"^speed: ([\d,]+) tok/s", capsys.readouterr().out, re.M)
    assert again and int(again[1].replace(",", "")) == pytest.approx(speeds[0], rel=0.01)


def test_on_a_cpu_the_speed_is_that_of_measured_costs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = ["plan", "--config", "tiny_llama_offload", "device=cpu"]
    assert main(command) == 0
    assert "speed: `tune doctor` measures" in capsys.readouterr().out
    costs = {"products": 1e-9, "attention": 0.0, "moved": 0.0, "launches": 0.0}
    rates = {"training": {"fp32": costs, "bf16": costs}, "cpu_adamw": {"torch fused": 1e12}, "host_copy": 1e15}
    write_profile(Profile(machine_of(torch.device("cpu"), []), rates))
    assert main(command) == 0
    told = re.search(r"^speed: ([\d,]+) tok/s; 1,024 tokens", capsys.readouterr().out, re.M)
    # 6 FLOPs for each weight of a product and token: two layers and the head.
    seconds = 6 * (2 * (4 * 128**2 + 3 * 128 * 352) + 128 * 2048) * 1024 * 1e-9
    assert told and int(told[1].replace(",", "")) == pytest.approx(1024 / seconds, rel=0.01)


def test_a_dry_run_tells_the_same_and_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    output = tmp_path / "run"
    words = ["--config", "tiny_llama_offload", f"output_dir={output}", "device=cpu", "batch_size=2"]
    assert main(["run", "full_finetune_single_device", *words, "--dry-run"]) == 0
    dry = capsys.readouterr().out
    assert main(["plan", *words]) == 0
    told = capsys.readouterr().out
    assert totals(dry) == {"host": pytest.approx(totals(told)["host"], abs=0.05)}  # the process itself grows
    assert "GPU" not in dry and not output.exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gpu", "RTX 4091"], "did you mean 'RTX 4090'"),
        (["--vram", "16"], "--vram: got '16', expected a size with its unit (KiB, MiB,"),
        (["--ram", "32G"], "MB, GB, TB), such as 16GiB"),
        (["--ram", "0GiB"], "--ram: got '0GiB', expected a size above 0, such as 16GiB"),
        (["--vram", "0GiB"], "--vram: got '0GiB'"),
        (["--ram=-3GiB"], "--ram: got '-3GiB'"),
        (["--gpu", "L4", "--vram", "16GiB"], "not allowed with"),
        (["--gpu", "L4", "--ram-bandwidth", "fast"], "--ram-bandwidth: got 'fast', expected a size"),
        (["--vram", "16GiB", "device=cpu"], "device: is cpu"),
        (["batch_sizes=4"], "batch_size"),
        (["clip_grad_norm=1", "optimizer.update_in_backward=True"], "clip_grad_norm"),
        (["model=offload.models.huggingface.from_pretrained", "model.path=/nowhere/Some-7B", "checkpointer=null"],
         "config.json"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_status_2(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "tiny_llama_offload", *words]) == 2
    error = capsys.readouterr().err
    assert told in error and error.startswith("error: ") and len(error.splitlines()) == 1


def test_torchtunes_configs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "llama2/7B_full"]) == 2
    assert "torchtune's" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "nbytes"), [("16GiB", 2**34), ("24 gb", 24 * 10**9), ("512MiB", 2**29), ("1.5tib", 3 * 2**39)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert plan.size(text, "--ram") == nbytes


@pytest.mark.parametrize("text", ["", "16", "GiB", "-1GiB", "16GiBs", "0MiB", "1e3GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UserError, match="--ram"):
        plan.size(text, "--ram")


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("tiny_llama_offload", "full_finetune_single_device"),
        ("tiny_llama_offload_distributed", "full_finetune_distributed"),
    ],
)
def test_a_file_of_the_users_is_for_one_device_unless_it_has_a_key_of_several_processes(
    name: str, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text((registry.configs_dir() / f"{name}.yaml").read_text())
    assert main(["validate", str(mine)]) == 0
    assert f"is well-formed for {recipe}" in capsys.readouterr().out
    assert plan._recipe_of(mine) == recipe


def test_processes_share_what_a_run_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "tiny_llama_offload_distributed", "--vram", "8GiB", "--ram", "16GiB"]
    more = ["optimizer.strategy=resident", "model.embed_dim=1024"]
    told = {}
    for count in (1, 4):
        assert main(["plan", *words, "--nproc_per_node", str(count), *more]) == 0
        told[count] = capsys.readouterr().out
    assert "each of 4 processes" in told[4] and "processes" not in told[1]
    assert "weights, gathered" in told[4] and "weights, gathered" not in told[1]
    assert amount(told[4], "optimizer states") == pytest.approx(amount(told[1], "optimizer states") / 4, abs=0.01)
    assert "of 3.80, 95 % of it, for each of 4 processes" in told[4]
    for count, divided in ((2, "kept from forward to backward"), (1, "")):
        options = ["--nproc_per_node", str(count), "reshard_after_forward=auto"]
        assert main(["plan", *words, *options]) == 0
        out = capsys.readouterr().out
        assert f"auto: weights {divided}" in out if divided else "auto:" not in out
    assert main(["plan", *words, "--nproc_per_node", "2", "--nnodes", "2", "data_parallel_replicate_dim=auto"]) == 0
    assert "each of 4 processes" in (out := capsys.readouterr().out) and ", 2 replicas: " in out


def test_processes_of_a_known_card_have_a_speed_and_a_ranked_list(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line is to be pasted, fits and is as fast as it says; a tiny model's work is not quite in proportion to its
    tokens."""
    words = ["--config", "tiny_llama_offload_distributed", "--gpu", "RTX 3060", "--ram", "64GiB",
             "--nproc_per_node", "4"]  # fmt: skip
    assert main(["plan", *words]) == 0
    told = capsys.readouterr().out
    speed = re.search(r"^speed: ([\d,]+) tok/s of all 4 processes; 2,048 tokens, a step", told, re.M)
    assert speed and "collectives at 18 GB/s through the host" in told and "154 GB/s of host memory assumed" in told
    rows = [line.split(maxsplit=3) for line in told.partition("GPU    host  GiB\n")[2].splitlines()]
    speeds = [int(row[0].replace(",", "")) for row in rows]
    assert speeds == sorted(speeds, reverse=True) and speeds[0] > int(speed[1].replace(",", ""))
    assert main(["plan", *words, *rows[0][3].split()]) == 0
    again = re.search(r"^speed: ([\d,]+) tok/s", capsys.readouterr().out, re.M)
    assert again and int(again[1].replace(",", "")) == pytest.approx(speeds[0], rel=0.01)
    assert main(["plan", *words, "optimizer.strategy=auto"]) == 0
    assert re.search(r"^auto: of the optimizer's states .* \(100%\) rest on the GPU$", capsys.readouterr().out, re.M)


def test_hosts_share_a_network(capsys: pytest.CaptureFixture[str]) -> None:
    """A slow one bounds a run whose weights cross it; a replica in each host sends gradients alone."""
    words = [
        "--config",
        "tiny_llama_offload_distributed",
        "--gpu",
        "RTX 3060",
        "--ram",
        "64GiB",
        "--nproc_per_node",
        "2",
    ]
    found = {}
    for options in (
        ("--nnodes", "2"),
        ("--nnodes", "1:2", "--network", "1Gbit/s"),
        ("--nnodes", "2", "--network", "1GB/s"),
    ):
        assert main(["plan", *words, *options]) == 0
        told = capsys.readouterr().out
        speed = re.search(r"^speed: ([\d,]+) tok/s of all 4 processes", told, re.M)
        assert speed
        found[options[-1]] = int(speed[1].replace(",", "")), told
    assert "between 2 hosts at 1 GB/s of each, of 10 Gbit/s assumed (--network 100Gbit/s tells)" in found["2"][1]
    assert (
        "of each, of 1 Gbit/s, in rings" in found["1Gbit/s"][1]
        and "of each, of 8 Gbit/s, in rings" in found["1GB/s"][1]
    )
    assert found["1Gbit/s"][0] < found["1GB/s"][0] < found["2"][0]
    assert "bounded by: collectives" in found["1Gbit/s"][1]
    best = found["1Gbit/s"][1].partition("GPU    host  GiB\n")[2].splitlines()[0]
    assert "data_parallel_replicate_dim=2" in best
    options = ["--nnodes", "2", "--network", "1Gbit/s"]
    assert main(["plan", *words, *options, *best.split(maxsplit=3)[3].split()]) == 0
    again = re.search(r"^speed: ([\d,]+) tok/s", capsys.readouterr().out, re.M)
    assert again and int(again[1].replace(",", "")) == pytest.approx(int(best.split()[0].replace(",", "")), rel=0.01)


def test_a_dry_run_knows_its_processes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["full_finetune_distributed", "--config", "tiny_llama_offload_distributed", "device=cpu", "--dry-run"]
    assert main(["run", "--nproc_per_node", "2", *words]) == 0
    assert "each of 2 processes" in capsys.readouterr().out


def test_mistakes_of_processes(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--config", "tiny_llama_offload", "--nproc_per_node", "2"],
         "runs on one device: leave out --nproc_per_node 2, or use full_finetune_distributed"),
        (["--config", "tiny_llama_offload_distributed", "--nproc_per_node", "0"],
         "--nproc_per_node: got 0, expected a number above 0"),
        (["--config", "tiny_llama_offload", "--nnodes", "2"],
         "runs on one device: leave out --nnodes 2, or use full_finetune_distributed"),
        *((["--config", "tiny_llama_offload_distributed", "--nnodes", nodes], f"--nnodes: got {nodes!r}, expected a "
           "number of hosts") for nodes in ("two", "4:2", "")),
        (["--config", "tiny_llama_offload_distributed", "--nnodes", "-1"], "--nnodes: got -1, expected a number above"),
        (["--config", "tiny_llama_offload_distributed", "--network", "1Gbit/s"],
         "--network: is between hosts, and there is one"),
        *((["--config", "tiny_llama_offload_distributed", "--nnodes", "2", "--network", network],
           f"--network: got {network!r}, expected a rate above 0 with its unit, such as 100Gbit/s")
          for network in ("100", "100GB", "0Gbit/s", "fast")),
        (["--config", "tiny_llama_offload_distributed", "--nproc_per_node", "4", "reshard_after_forward=3"],
         "reshard_after_forward: got 3"),
        (["--config", "tiny_llama_offload_distributed", "--nproc_per_node", "4", "reshard_after_forward=aut"],
         "auto"),
    ):  # fmt: skip
        assert main(["plan", *words]) == 2
        error = capsys.readouterr().err
        assert message in error and len(error.splitlines()) == 1


def test_rates() -> None:
    for text, expected in (("100Gbit/s", 12.5e9), ("100 Gbps", 12.5e9), ("25Gb/s", 3.125e9), ("12.5GB/s", 12.5e9),
                           ("800MBps", 8e8), ("1TBit/s", 1.25e11)):  # fmt: skip
        assert plan.rate(text, "--network") == expected


def amount(text: str, name: str) -> float:
    """Of a line of the table, in GiB."""
    (line,) = [line for line in text.splitlines() if name in line]
    found = re.search(r"([\d.]+) (GiB|MiB)", line)
    assert found is not None
    return float(found[1]) / (1 if found[2] == "GiB" else 1024)
