"""``builtin:`` names, and the cache: atomic, safe for several processes, never half made."""

import dataclasses
import logging
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppocli.builtin import cache, walkmodel
from ppocli.builtin.names import is_builtin, list_builtins, resolve_builtin
from ppocli.builtin.randomwalks import WalkSettings, benchmark
from ppocli.builtin.randomwalks import optimality as score
from ppocli.errors import DiskError, InputError


@dataclasses.dataclass(frozen=True)
class Settings:
    size: int = 3


def fill(folder: Path) -> None:
    (folder / "data.txt").write_text("whole")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PPOCLI_CACHE", str(tmp_path / "cache"))


def hidden_leftovers() -> list[Path]:
    return list(cache.cache_root().glob(".*tmp-*"))


@pytest.mark.parametrize("name", [n for n in list_builtins() if n != "randomwalks"])
def test_every_shipped_name_resolves(name):
    path = resolve_builtin(f"builtin:{name}")
    assert path == resolve_builtin(name)
    if name.endswith("prompts"):
        assert path.suffix == ".jsonl"
    else:
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
            file.name for file in path.iterdir()}


def test_unknown_name_suggests_and_lists():
    with pytest.raises(InputError) as caught:
        resolve_builtin("builtin:reveiws")
    assert "'reveiws'" in caught.value.what
    assert "did you mean builtin:reviews?" in (caught.value.fix or "")
    assert "builtin:randomwalks" in (caught.value.fix or "")
    with pytest.raises(InputError) as caught:
        resolve_builtin("builtin:")
    assert "did you mean" not in (caught.value.fix or "")
    assert is_builtin("builtin:x")
    assert not is_builtin("reviews")


def test_cache_root_follows_the_environment(tmp_path, monkeypatch):
    assert cache.cache_root() == tmp_path / "cache"
    monkeypatch.delenv("PPOCLI_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_root() == tmp_path / "xdg" / "ppocli"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_root() == tmp_path / ".cache" / "ppocli"


def test_folder_is_built_once_and_named_by_its_settings(caplog):
    calls = []

    def build(folder: Path) -> None:
        calls.append(folder)
        fill(folder)

    with caplog.at_level(logging.INFO, logger="ppocli.builtin"):
        first = cache.cached_folder("thing", Settings(), build)
        assert cache.cached_folder("thing", Settings(), build) == first
    assert len(calls) == 1
    assert len(caplog.records) == 1
    assert calls[0].parent == first.parent  # same file system, so the rename is atomic
    assert cache.cached_folder("thing", Settings(size=4), build) != first
    assert not hidden_leftovers()


def test_interrupted_build_leaves_nothing():
    def fail(folder: Path) -> None:
        fill(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.cached_folder("thing", Settings(), fail)
    assert [path.name for path in cache.cache_root().iterdir() if path.is_dir()] == []
    assert (cache.cached_folder("thing", Settings(), fill) / "data.txt").read_text() == "whole"


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "empty"])
def test_damaged_folder_is_made_anew(damage):
    folder = cache.cached_folder("thing", Settings(), fill)
    if damage == "truncate":
        (folder / "data.txt").write_text("who")
    elif damage == "remove":
        (folder / "data.txt").unlink()
    elif damage == "manifest":
        (folder / cache.MANIFEST).write_text("{")
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    assert not cache.is_whole(folder)
    assert cache.cached_folder("thing", Settings(), fill) == folder
    assert cache.is_whole(folder)
    assert not hidden_leftovers()


def test_settings_of_different_names_do_not_meet():
    one = cache.cached_folder("one", Settings(), fill)
    assert cache.cached_folder("two", Settings(), fill).name.split("-")[1] != one.name.split("-")[1]


def test_unusable_cache_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PPOCLI_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(DiskError, match="PPOCLI_CACHE"):
        cache.cached_folder("thing", Settings(), fill)


# a process of its own that builds slowly; it imports the cache only, so it starts at once
SLOW_BUILDER = """
import dataclasses, sys, time
from ppocli.builtin import cache

@dataclasses.dataclass(frozen=True)
class Settings:
    size: int = 3

def build(folder):
    (folder / "first").write_text("1")
    with open(cache.cache_root() / "builds", "a") as counter:
        counter.write("x")
    time.sleep(float(sys.argv[1]))
    (folder / "data.txt").write_text("whole")

print((cache.cached_folder("thing", Settings(), build) / "data.txt").read_text())
"""


def start_builder(seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", SLOW_BUILDER, str(seconds)], text=True,
                            stdout=subprocess.PIPE)


def test_concurrent_builders_share_one_build():
    builders = [start_builder(0.8) for _ in range(3)]
    assert [builder.communicate(timeout=60)[0] for builder in builders] == ["whole\n"] * 3
    assert [builder.returncode for builder in builders] == [0] * 3
    assert (cache.cache_root() / "builds").read_text() == "x"
    assert not hidden_leftovers()


def test_builder_killed_halfway_is_survived():
    builder = start_builder(60)
    deadline = time.monotonic() + 60
    while not any(cache.cache_root().glob(".*tmp-*/first")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    builder.kill()
    builder.communicate(timeout=60)
    assert hidden_leftovers()
    folder = cache.cached_folder("thing", Settings(), fill)
    assert (folder / "data.txt").read_text() == "whole"
    assert not hidden_leftovers()


def test_walk_tokenizer_joins_letters():
    tokenizer = walkmodel.walk_tokenizer(benchmark()[0].letters, 32)
    assert len(tokenizer) == 23
    ids = tokenizer("sda")["input_ids"]
    assert ids == [18, 3, 0]
    assert tokenizer.decode(ids[:1]) + tokenizer.decode(ids[1:]) == "sda"
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "sda"
    assert tokenizer("z")["input_ids"] == [tokenizer.pad_token_id]
    assert tokenizer.pad_token_id != tokenizer.eos_token_id == tokenizer.bos_token_id


def test_small_walk_model_is_deterministic_and_leaves_the_global_state_alone(tmp_path):
    settings = walkmodel.WalkModelSettings(WalkSettings(walks=60), layers=1, width=24, heads=2,
                                           epochs=2)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    walkmodel.build_randomwalks(tmp_path / "one", settings)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    with torch.no_grad():
        walkmodel.build_randomwalks(tmp_path / "two", settings)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_randomwalks_is_fitted_cached_and_starts_near_trlx(capfd):
    folder = resolve_builtin("builtin:randomwalks")
    began = time.monotonic()
    assert resolve_builtin("randomwalks") == folder
    assert time.monotonic() - began < 2
    assert folder.parent == cache.cache_root()
    assert capfd.readouterr().out == ""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (model.config.n_layer, model.config.n_embd, model.config.vocab_size) == (6, 144, 23)
    generator = torch.Generator().manual_seed(3)
    graph, _ = benchmark()
    ids = tokenizer(list(graph.letters[1:]) * 25, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        for _ in range(9):
            logits = model(input_ids=ids).logits[:, -1]
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, token], dim=1)
    # what follows the goal isn't looked at, so stopping at EOS would not change the scores
    scores = score(tokenizer.batch_decode(ids, skip_special_tokens=True))
    assert 0.2 < sum(scores) / len(scores) < 0.35
