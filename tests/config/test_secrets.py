"""offload.config.secrets: tokens and passwords stay out of what a run leaves."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from offload.config.secrets import MASK, is_secret_key, masked, masked_words, resolved_and_masked
from offload.training.resume_changes import resume_notes


@pytest.mark.parametrize(
    "key",
    ["token", "hf_token", "HF_TOKEN", "api_key", "apiKey", "wandb_api_key", "password", "db-password", "client_secret"]
    + ["access_key", "secret_access_key", "private_key", "use_auth_token", "credentials", "authToken"],
)
def test_keys_of_secrets(key: str) -> None:
    assert is_secret_key(key)


@pytest.mark.parametrize(
    "key",
    ["tokenizer", "max_new_tokens", "pad_token", "eos_token", "special_tokens", "num_tokens", "key", "monkey", "keep"]
    + ["pad_token_id", "secretary", "path", "project", "lr", "token_type"],
)
def test_keys_of_other_things(key: str) -> None:
    assert not is_secret_key(key)


def test_secrets_are_masked_wherever_they_stand() -> None:
    tree = {
        "dataset": [{"token": "hf_abc", "split": "train"}, {"token": True}, {"token": None}, {"token": ""}],
        "source": "https://host/data?auth=s3cr3t-value",
        "logger": {"password": "s3cr3t-value", "api_key": 12345678, "max_new_tokens": 7},
        "secrets": {"first": "one", "more": ["two"]},
        "proxy": "http://me:hunter2@proxy:80/",
        "note": "login with hf_ABCDEFGHIJKLMNOPQRSTUVWX first",
        "pad_token": "<pad>",
    }
    assert masked(tree) == {
        "dataset": [{"token": MASK, "split": "train"}, {"token": True}, {"token": None}, {"token": ""}],
        "source": f"https://host/data?auth={MASK}",
        "logger": {"password": MASK, "api_key": MASK, "max_new_tokens": 7},
        "secrets": {"first": MASK, "more": [MASK]},
        "proxy": f"http://{MASK}@proxy:80/",
        "note": f"login with {MASK} first",
        "pad_token": "<pad>",
    }
    assert tree["logger"]["password"] == "s3cr3t-value"  # type: ignore[index,call-overload]


def test_what_an_interpolation_brings_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_TOKEN", "hf_from-the-environment")
    cfg = OmegaConf.create(
        {"dataset": {"token": "${oc.env:TEST_TOKEN}", "url": "x?t=${dataset.token}"}, "other": "${dataset}"}
    )
    assert "environment" not in repr(resolved_and_masked(cfg))
    assert cfg.dataset.token == "hf_from-the-environment"  # the run reads it


def test_a_resumed_run_with_another_token_is_the_same_run() -> None:
    def run(token: str) -> dict[str, object]:
        return {"dataset": {"token": token, "split": "train"}, "optimizer": {"lr": 1.0}}

    saved = resolved_and_masked(OmegaConf.create(run("first")))
    assert list(resume_notes(saved, OmegaConf.create(run("second")))) == []
    assert list(resume_notes(run("first"), OmegaConf.create(run("second")))) == []  # saved before masks
    changed = {**run("first"), "dataset": {"token": "first", "split": "test"}}
    assert len(list(resume_notes(saved, OmegaConf.create(changed)))) == 1


def test_a_command_line_without_its_secrets() -> None:
    """wandb keeps the command line of a run."""
    words = ["--config", "c.yaml", "+dataset.token=abc", "extra={api_key: my-own-key}", "seed=1", "--logger.apiKey=k=1"]
    tree = {"dataset": {"token": "abc"}, "extra": {"api_key": "my-own-key"}, "seed": 1, "logger": {"apiKey": "k=1"}}
    shown = [f"+dataset.token={MASK}", f"extra={{api_key: {MASK}}}", "seed=1", f"--logger.apiKey={MASK}"]
    assert masked_words(words, tree) == ["--config", "c.yaml", *shown]
