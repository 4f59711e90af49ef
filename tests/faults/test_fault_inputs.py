"""Models, prompts and settings that can't be used: told before anything is written."""

import json
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from helpers import ppocli, read_json
from runs import words


def truncated(lm: Path) -> None:
    path = lm / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def fewer_weights(lm: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(lm / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, lm / "model.safetensors", metadata={"format": "pt"})


def marked_as_gguf(lm: Path) -> None:
    config = read_json(lm / "config.json")
    config["quantization_config"] = {"quant_method": "gguf", "dequantize": False}
    (lm / "config.json").write_text(json.dumps(config))


BROKEN_MODELS = {truncated: "model.safetensors can't be read",
                 fewer_weights: "h.1.mlp.c_fc.weight",
                 marked_as_gguf: "remove quantization_config"}


@pytest.mark.parametrize("breaking", BROKEN_MODELS, ids=lambda f: f.__name__)
def test_a_broken_model_folder_is_refused_with_what_is_wrong(breaking, command, world):
    breaking(world / "lm")
    ended = command(*words(), code=3)
    assert BROKEN_MODELS[breaking] in ended.err, ended.err
    assert "lm" in ended.err
    assert "where: model" in ended.err
    assert not (world / "runs").exists()


@contextmanager
def black_hole() -> Iterator[str]:
    """The address of a port that never answers: its queue of connections is full."""
    with socket.socket() as listener, ExitStack() as callers:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_without_network_everything_missing_is_told_soon(tmp_path):
    """Neither a cache nor an offline variable helps: the network has to be found dead."""
    with black_hole() as address:
        started = time.monotonic()
        ended = ppocli("train", "+recipe=imdb_sentiment", cwd=tmp_path, code=3, HF_HUB_OFFLINE="0",
                       HF_HOME=str(tmp_path / "cache"), HF_ENDPOINT=address, no_proxy="*")
        elapsed = time.monotonic() - started
    for part in ("3 inputs are missing", "model.path=lvwerra/gpt2-imdb", "reward.kwargs.model",
                 "lvwerra/distilbert-imdb", "prompts.path", "imdb", "=/path"):
        assert part in ended.stderr, ended.stderr
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "cache/hub").exists()
    assert elapsed < 15  # the hub's own calls would wait 20 to 50 s


def test_an_output_folder_with_spaces_and_unicode(command, world):
    shutil.move(world / "lm", world / "my lm ü")
    ended = command(*words("model.path='my lm ü'", "output_dir='läufe und mehr'", "run_name=日本 1",
                           "ppo.num_steps=1"), code=0)
    assert ended.out.splitlines()[-1] == str(world / "läufe und mehr/日本 1/model")
