"""``ppocli export`` beside others (evaluations, other exports, an earlier folder), and ``--to-hub``
against a Hub of our own."""

import functools
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from helpers import environment, jsonl, read_json, save_lm, save_talker, write_jsonl
from hub_double import TOKEN, HubDouble
from runs import STEPS, Command, Ended, run
from transformers import AutoTokenizer
from warm import Server

import ppocli
from ppocli.errors import ConfigError
from ppocli.export.card import PLACEHOLDER, user_text, with_user_text
from ppocli.export.facts import split_card, without_folders
from ppocli.storage.run_folder import lock_beside

LAST = f"step-{STEPS:06d}"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_evaluations_of_something_else_are_not_the_cards(finished, export):
    others = ({"num_samples": 1}, {"reward": "length", "overrides": ["reward.kwargs.target=8"]},
              {"limit": 2}, {"step": 2}, {"overrides": ["generation.temperature=0.5"]},
              {"overrides": ["generation.stop_token_ids=[5]"]})
    first, *_ = [ppocli.evaluate(finished, name=str(n), **asked).folder / "eval.json"
                 for n, asked in enumerate(others)]
    told = read_json(first)
    told["model"]["digest"] = "0" * 64  # of other weights
    first.write_text(json.dumps(told))
    assert export("mine").code == 0
    folder = finished / "export" / LAST
    assert not (folder / "eval.json").exists()
    assert "separate evaluation" not in (folder / "README.md").read_text()


def test_the_own_evaluation_comes_along_without_folders(finished, export, here):
    done = ppocli.evaluate(finished, name="zz", num_samples=3, seed=7)
    assert export("mine").code == 0
    folder = finished / "export" / LAST
    told = read_json(folder / "eval.json")
    assert told["figures"] == done.figures
    assert (told["run"], told["model"]["path"], told["settings"]["targets"]) == (
        "mine", "model", ["model"])
    assert (told["settings"]["reward"]["fn"], list(told["settings"]["code"])) == (
        "rewards.py:score", ["rewards.py"])
    for place in (here, here.resolve(), finished, Path(finished / "config.yaml")):
        assert str(place) not in (folder / "eval.json").read_text()
    split = {"reward": {"step_fn": f"{here}/steps.py:cut"}}
    assert without_folders(split) == {"reward": {"step_fn": "steps.py:cut"}}


def test_every_file_of_a_tokenizer_comes_along(here, export):
    """Among them named chat templates, which lie in a folder of their own."""
    model = save_talker(here / "two")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(model)
    (model / "emoji.json").write_text("{}")  # GPT-NeoX-Japanese has such a one
    for more in ((), ("--overwrite",)):
        export("./two", "--output", "named", *more, code=0)
    found = AutoTokenizer.from_pretrained(here / "named")
    assert found.chat_template == tokenizer.chat_template
    assert (here / "named/emoji.json").is_file()
    (here / "named/additional_chat_templates/mine.jinja").write_text("{{ mine }}")
    assert "would be lost (additional_chat_templates/mine.jinja)" in export(
        "./two", "--output", "named", "--overwrite", code=2).err


def test_a_second_export_to_the_same_place_is_told_who_works_there(finished, export):
    target = finished / "export" / LAST
    target.parent.mkdir()
    with lock_beside(target, ""):
        second = export("mine", code=5)
    assert f"Error: {target} is in use by process {os.getpid()} on " in second.err
    assert second.err.endswith(
        "fix:   wait for it to end or stop it, or name another folder: --output DIR\n")
    assert names(finished / "export") == set()


def test_what_another_export_has_written_meanwhile_is_not_replaced_unasked(finished, export):
    from ppocli.cli.export import _write
    from ppocli.export.facts import Mask
    from ppocli.export.request import ExportRequest, resolve

    request = ExportRequest("mine")
    plan = resolve(request, print)
    assert export("mine").code == 0
    with pytest.raises(ConfigError, match="holds an export already"):
        _write(plan, request, Mask({}), print)


def test_an_export_is_not_pushed_with_a_wish_unheard(here, export):
    before = names(here / FOLDER)
    refused = export(f"./{FOLDER}", "--to-hub", "--max-shard-size", "20KB", code=2)
    assert refused.err.endswith(
        "\n  fix:   --output DIR; or push it as it is: leave out --max-shard-size\n")
    assert names(here / FOLDER) == before


def test_an_export_of_an_export_tells_what_the_first_told(finished, export, here):
    ppocli.evaluate(finished, name="zz")
    assert export("mine", "--include-value-head", "-o", "one").code == 0
    card = here / "one/README.md"
    card.write_text(with_user_text(card.read_text(), "Use *with care*.").replace(
        "---\n", "---\nlicense: mit\n", 1))
    assert export("./one", "--dtype", "bf16", "--max-shard-size", "20KB", "-o", "two").code == 0
    old, new = ((here / place / "README.md").read_text() for place in ("one", "two"))
    assert split_card(new)[0] == split_card(old)[0]
    assert split_card(new)[0]["license"] == "mit"
    assert new == old.replace('name = "one"', 'name = "two"').replace(
        "stored as fp32", "stored as bf16")
    for name in ("training_config.yaml", "curve.svg", "eval.json", "value_head.safetensors"):
        assert (here / "two" / name).read_bytes() == (here / "one" / name).read_bytes(), name
    first, second = (read_json(here / place / "export.json") for place in ("one", "two"))
    for name in ("source", "run", "step", "evaluation", "run_id", "versions"):
        assert second[name] == first[name], name
    assert second["dtype"] == "bf16"
    assert second["files"].keys() >= {"training_config.yaml", "eval.json"}
    # what is written on the card that is replaced counts more
    replaced = here / "two/README.md"
    replaced.write_text(with_user_text(new, "Mine.").replace("---\n", "---\nlanguage: en\n", 1))
    assert export("./one", "-o", "two", "--overwrite").code == 0
    again = replaced.read_text()
    assert user_text(again) == "Mine."
    assert split_card(again)[0] == split_card(old)[0] | {"language": "en"}


def test_an_export_with_other_weights_tells_nothing_of_its_training(finished, export, here):
    assert export("mine", "-o", "one").code == 0
    config = read_json(here / "one/config.json")
    (here / "one/config.json").write_text(json.dumps(config | {"mine": 1}))
    done = export("./one", "-o", "two", code=0)
    assert "config.json in " in done.err
    assert "What it tells of its training is left behind." in done.err
    assert "## Training" not in (here / "two/README.md").read_text()


def test_a_card_without_a_kl_explains_none(finished, export):
    config = yaml.safe_load((finished / "config.yaml").read_text())
    config["model"]["reference"]["kind"] = "none"
    (finished / "config.yaml").write_text(yaml.safe_dump(config))
    rows = jsonl(finished / "metrics.jsonl")
    write_jsonl(finished / "metrics.jsonl", (row | {"eval/kl_mean": None} for row in rows))
    assert export("mine").code == 0
    card = (finished / "export" / LAST / "README.md").read_text()
    assert "| `reward_mean` |" in card
    assert "kl_mean" not in card


FOLDER = "out"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a bare model."""
    from ppocli.cli.export import export
    from ppocli.export.request import ExportRequest

    folder = tmp_path_factory.mktemp("hub")
    save_lm(folder / "lm")
    export(ExportRequest(str(folder / "lm"), output=folder / FOLDER, max_shard_size="50KB"), False)
    return folder / FOLDER


@pytest.fixture
def here(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a copy of the export in it."""
    shutil.copytree(exported, tmp_path / FOLDER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def one_hub() -> Iterator[tuple[HubDouble, Server]]:
    """A Hub, and a process that has loaded the libraries with its address."""
    with HubDouble() as double:
        server = Server(env=environment(**double.environment()))
        yield double, server
        server.close()


@pytest.fixture
def hub(one_hub: tuple[HubDouble, Server]) -> HubDouble:
    """An empty one."""
    double, _ = one_hub
    double.repos, double.store, double.requests, double.failures = {}, {}, [], []
    double.role = "write"
    return double


@pytest.fixture
def export_to(one_hub: tuple[HubDouble, Server], hub: HubDouble, here: Path) -> Command:
    """``ppocli export`` in a process that knows the Hub; no token may be shown, whatever
    happens."""
    def command(*given: str, code: int | None = None, **env: str) -> Ended:
        done = run("export", *given, cwd=here, server=one_hub[1], code=code,
                   **hub.environment(**env))
        assert TOKEN not in done.said
        return done

    return command


@pytest.fixture
def push(export_to: Command) -> Command:
    """Push the export."""
    return functools.partial(export_to, f"./{FOLDER}", "--to-hub")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_failed(done: Ended, cause: str, again: str, folder: Path) -> None:
    """Exit code 9, the cause, where the export lies, the command, and an untouched export."""
    assert done.code == 9, done.said
    assert cause in done.err
    assert "Your export is complete in ./out." in done.err
    assert again in done.err
    assert done.out == ""
    assert (folder / FOLDER / "export.json").is_file()


def test_export_and_push_in_one_go(hub, export_to, here, exported):
    """Private by default, under the token's user; the weights go by LFS; every byte arrives."""
    shutil.copytree(exported.parent / "lm", here / "lm")
    done = export_to("./lm", "-o", "mine", "--to-hub", code=0)
    assert done.out == f"{hub.url}/tester/lm\n"
    assert done.err.index("Verified: ") < done.err.index("created tester/lm (private)")
    repo = hub.repos["tester/lm"]
    assert repo.private
    assert repo.branches["main"] == contents(here / "mine")
    assert repo.lfs == {"model.safetensors"}
    assert 'name = "tester/lm"' in (here / "mine/README.md").read_text()
    assert hub.requests.index("GET /api/whoami-v2") < hub.requests.index("POST /api/repos/create")


def test_pushing_again_replaces_stale_weights_and_keeps_what_was_written_there(hub, push, here):
    assert push("--repo-id", "tester/x", "--public", code=0).out == f"{hub.url}/tester/x\n"
    repo = hub.repos["tester/x"]
    assert not repo.private
    files = repo.branches["main"]
    assert len(repo.lfs) > 1
    theirs = with_user_text(files["README.md"].decode(), "Written on the Hub.")
    files |= {"README.md": theirs.encode(), "model-00007-of-00009.safetensors": b"stale",
              "adapter.safetensors": b"someone's", "adapter_config.json": b"{}",
              "adapter_model.safetensors": b"that was merged", "base_model.json": b"{}"}
    again = push("--repo-id", "tester/x", "--public", code=0)
    assert "kept the text that was written on the Hub" in again.err
    there = hub.repos["tester/x"].branches["main"]
    assert there.pop("adapter.safetensors") == b"someone's"
    assert there == contents(here / FOLDER)
    card = here / FOLDER / "README.md"
    assert user_text(card.read_text()) == "Written on the Hub."
    assert PLACEHOLDER not in card.read_text()


def test_branches_and_pull_requests(hub, push, export_to, here):
    assert push("--revision", "v2", "--repo-id", "x", code=0).out == (
        f"{hub.url}/tester/x/tree/v2\n")
    repo = hub.repos["tester/x"]
    assert repo.branches["v2"] == contents(here / FOLDER)
    assert repo.branches["main"] == {}
    hub.fail("POST /api/models/tester/x/commit/refs/pr/1", 400, message="not like this")
    failed = push("--create-pr", "--repo-id", "x")
    command = "ppocli export ./out --to-hub --repo-id tester/x --revision refs/pr/1"
    assert_failed(failed, "the Hub refused (HTTP 400", command, here)
    hub.failures.clear()
    assert export_to(*shlex.split(command)[2:], code=0).out == (
        f"{hub.url}/tester/x/discussions/1\n")
    assert len(repo.pulls) == 1
    assert repo.branches["refs/pr/1"] == contents(here / FOLDER)
    assert repo.branches["main"] == {}


def test_a_repository_of_another_visibility_is_left_alone(hub, push, here):
    push("--repo-id", "tester/x", "--public", code=0)
    before = dict(hub.repos["tester/x"].branches["main"])
    (here / FOLDER / "README.md").write_text("new")
    for words, why in (((), "the default is private"), (("--private",), "asked for private")):
        done = push("--repo-id", "tester/x", *words)
        assert_failed(done, f"the repository is there already and is public, and {why}",
                      "push to the public repository: ppocli export ./out --to-hub "
                      "--repo-id tester/x --public", here)
    assert hub.repos["tester/x"].branches["main"] == before


@pytest.mark.parametrize(("request_", "status", "message", "repo", "cause"), [
    ("POST /api/repos/create", 403, "no write access to org", "org/x", "Error: The push to org/x "
     "did not go through: your token may not write there (HTTP 403: no write access to org) "
     "(creating the repository)."),
    ("GET /api/whoami-v2", 401, "no", "x", "your token is not accepted (HTTP 401")])
def test_refusals(hub, push, here, request_, status, message, repo, cause):
    hub.fail(request_, status, message=message)
    done = push("--repo-id", repo, "--public")
    assert_failed(done, cause, f"ppocli export ./out --to-hub --repo-id {repo} --public", here)
    assert hub.count(request_) == 1


def test_a_failing_hub_is_waited_for_but_not_for_ever(hub, push, here):
    """One failure of each kind is survived, a dropped commit too; then it stays broken."""
    hub.fail("GET /api/models/tester/x$", 500, times=1)
    hub.fail("POST /tester/x.git/info/lfs", 503, times=1)
    hub.fail("POST /api/models/tester/x/commit", 0, times=1)
    done = push("--repo-id", "tester/x", code=0)
    assert "looking for the repository: the Hub failed (HTTP 500); trying again in 1 s" in done.err
    assert "uploading: the connection failed (" in done.err
    assert hub.repos["tester/x"].branches["main"] == contents(here / FOLDER)
    hub.fail("GET /api/whoami-v2", 500)
    hub.requests.clear()
    done = push("--repo-id", "tester/x")
    assert_failed(done, "the Hub failed (HTTP 500) (asking the Hub who you are)",
                  "try again: ppocli export ./out --to-hub --repo-id tester/x", here)
    assert hub.count("GET /api/whoami-v2") == 3


def test_no_hub_to_be_reached(here):
    done = run("export", "./out", "--to-hub", cwd=here, HF_ENDPOINT="http://127.0.0.1:9",
               HF_TOKEN=TOKEN, HF_HUB_OFFLINE="0", code=9)
    assert done.err.split("\n", 1)[1] == (
        "Error: The push to the Hub did not go through: the Hub can't be reached "
        "(http://127.0.0.1:9). Your export is complete in ./out.\n"
        "  where: http://127.0.0.1:9\n  fix:   try again: ppocli export ./out --to-hub\n")


def test_tokens_that_will_not_do(hub, push, here):
    hub.role = "read"
    done = push()
    assert_failed(done, "your token may only read", f"{hub.url}/settings/tokens", here)
    done = push(HF_TOKEN="", HF_HOME=str(here / "nobody"))
    assert_failed(done, "there is no token",
                  "log in with hf auth login (or set HF_TOKEN), then: ppocli export ./out", here)
    assert hub.repos == {}


def test_only_what_was_verified_is_pushed(hub, push, here):
    (here / FOLDER / "private-notes.txt").write_text("not for the Hub")
    (here / FOLDER / "README.md").write_text("---\nlicense: mit\n---\nMy own card.\n")
    push("--repo-id", "tester/x", code=0)
    there = hub.repos["tester/x"].branches["main"]
    assert "private-notes.txt" not in there
    assert there["README.md"] == b"---\nlicense: mit\n---\nMy own card.\n"
    shard = next((here / FOLDER).glob("model-00001*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert push("--repo-id", "tester/x", code=3).err.startswith(
        f"Error: {shard.name} in out is not as it was exported.\n")
