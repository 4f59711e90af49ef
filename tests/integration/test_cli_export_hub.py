"""``ppocli export --to-hub`` against a Hub of our own: what arrives, and what is said when it
doesn't."""

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import save_lm
from hub_double import TOKEN, HubDouble
from runs import Ended, run

from ppocli.export.card import PLACEHOLDER, user_text, with_user_text

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


@pytest.fixture
def hub() -> Iterator[HubDouble]:
    with HubDouble() as double:
        yield double


def push(hub: HubDouble, here: Path, *words: str, run_name: str = FOLDER, **env: str) -> Ended:
    """Push the export; no token may be shown, whatever happens."""
    done = run("export", f"./{run_name}", "--to-hub", *words, cwd=here, **hub.environment(**env))
    assert TOKEN not in done.said
    return done


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


def test_export_and_push_in_one_go(hub, here, exported):
    """Private by default, under the token's user; the weights go by LFS; every byte arrives."""
    shutil.copytree(exported.parent / "lm", here / "lm")
    done = run("export", "./lm", "-o", "mine", "--to-hub", cwd=here, **hub.environment())
    assert (done.code, done.out) == (0, f"{hub.url}/tester/lm\n"), done.err
    assert done.err.index("Verified: ") < done.err.index("created tester/lm (private)")
    repo = hub.repos["tester/lm"]
    assert repo.private
    assert repo.branches["main"] == contents(here / "mine")
    assert repo.lfs == {"model.safetensors"}
    assert 'name = "tester/lm"' in (here / "mine/README.md").read_text()
    assert hub.requests.index("GET /api/whoami-v2") < hub.requests.index("POST /api/repos/create")


def test_pushing_again_replaces_stale_weights_and_keeps_what_was_written_there(hub, here):
    done = push(hub, here, "--repo-id", "tester/x", "--public")
    assert (done.code, done.out) == (0, f"{hub.url}/tester/x\n"), done.err
    repo = hub.repos["tester/x"]
    assert not repo.private
    files = repo.branches["main"]
    assert len(repo.lfs) > 1
    theirs = with_user_text(files["README.md"].decode(), "Written on the Hub.")
    files |= {"README.md": theirs.encode(), "model-00007-of-00009.safetensors": b"stale",
              "adapter.safetensors": b"someone's"}
    again = push(hub, here, "--repo-id", "tester/x", "--public")
    assert again.code == 0, again.err
    assert "kept the text that was written on the Hub" in again.err
    there = hub.repos["tester/x"].branches["main"]
    assert there.pop("adapter.safetensors") == b"someone's"
    assert there == contents(here / FOLDER)
    card = here / FOLDER / "README.md"
    assert user_text(card.read_text()) == "Written on the Hub."
    assert PLACEHOLDER not in card.read_text()


def test_branches_and_pull_requests(hub, here):
    done = push(hub, here, "--revision", "v2", "--repo-id", "x")
    assert (done.code, done.out) == (0, f"{hub.url}/tester/x/tree/v2\n"), done.err
    repo = hub.repos["tester/x"]
    assert repo.branches["v2"] == contents(here / FOLDER)
    assert repo.branches["main"] == {}
    hub.fail("POST /api/models/tester/x/commit/refs/pr/1", 400, message="not like this")
    failed = push(hub, here, "--create-pr", "--repo-id", "x")
    command = "ppocli export ./out --to-hub --repo-id tester/x --revision refs/pr/1"
    assert_failed(failed, "the Hub refused (HTTP 400", command, here)
    hub.failures.clear()
    done = run(*shlex.split(command)[1:], cwd=here, **hub.environment())
    assert (done.code, done.out) == (0, f"{hub.url}/tester/x/discussions/1\n"), done.err
    assert len(repo.pulls) == 1
    assert repo.branches["refs/pr/1"] == contents(here / FOLDER)
    assert repo.branches["main"] == {}


def test_a_repository_of_another_visibility_is_left_alone(hub, here):
    assert push(hub, here, "--repo-id", "tester/x", "--public").code == 0
    before = dict(hub.repos["tester/x"].branches["main"])
    (here / FOLDER / "README.md").write_text("new")
    for words, why in (((), "the default is private"), (("--private",), "asked for private")):
        done = push(hub, here, "--repo-id", "tester/x", *words)
        assert_failed(done, f"the repository is there already and is public, and {why}",
                      "push to the public repository: ppocli export ./out --to-hub "
                      "--repo-id tester/x --public", here)
    assert hub.repos["tester/x"].branches["main"] == before


@pytest.mark.parametrize(("request_", "status", "message", "repo", "cause"), [
    ("POST /api/repos/create", 403, "no write access to org", "org/x", "Error: The push to org/x "
     "did not go through: your token may not write there (HTTP 403: no write access to org) "
     "(creating the repository)."),
    ("GET /api/whoami-v2", 401, "no", "x", "your token is not accepted (HTTP 401")])
def test_refusals(hub, here, request_, status, message, repo, cause):
    hub.fail(request_, status, message=message)
    done = push(hub, here, "--repo-id", repo, "--public")
    assert_failed(done, cause, f"ppocli export ./out --to-hub --repo-id {repo} --public", here)
    assert status >= 500 or hub.count(request_) == 1


def test_a_failing_hub_is_waited_for_but_not_for_ever(hub, here):
    """One failure of each kind is survived, a dropped commit too; then it stays broken."""
    hub.fail("GET /api/models/tester/x$", 500, times=1)
    hub.fail("POST /tester/x.git/info/lfs", 503, times=1)
    hub.fail("POST /api/models/tester/x/commit", 0, times=1)
    done = push(hub, here, "--repo-id", "tester/x")
    assert done.code == 0, done.err
    assert "looking for the repository: the Hub failed (HTTP 500); trying again in 1 s" in done.err
    assert "uploading: the connection failed (" in done.err
    assert hub.repos["tester/x"].branches["main"] == contents(here / FOLDER)
    hub.fail("GET /api/whoami-v2", 500)
    hub.requests.clear()
    done = push(hub, here, "--repo-id", "tester/x")
    assert_failed(done, "the Hub failed (HTTP 500) (asking the Hub who you are)",
                  "try again: ppocli export ./out --to-hub --repo-id tester/x", here)
    assert hub.count("GET /api/whoami-v2") == 3


def test_no_hub_to_be_reached(here):
    done = run("export", "./out", "--to-hub", cwd=here, HF_ENDPOINT="http://127.0.0.1:9",
               HF_TOKEN=TOKEN, HF_HUB_OFFLINE="0")
    assert (done.code, done.err.split("\n", 1)[1]) == (9, (
        "Error: The push to the Hub did not go through: the Hub can't be reached "
        "(http://127.0.0.1:9). Your export is complete in ./out.\n"
        "  where: http://127.0.0.1:9\n"
        "  fix:   try again: ppocli export ./out --to-hub\n"))


def test_tokens_that_will_not_do(hub, here):
    hub.role = "read"
    done = push(hub, here)
    assert_failed(done, "your token may only read", f"{hub.url}/settings/tokens", here)
    done = push(hub, here, HF_TOKEN="", HF_HOME=str(here / "nobody"))
    assert_failed(done, "there is no token",
                  "log in with hf auth login (or set HF_TOKEN), then: ppocli export ./out", here)
    assert hub.repos == {}


def test_only_what_was_verified_is_pushed(hub, here):
    (here / FOLDER / "private-notes.txt").write_text("not for the Hub")
    (here / FOLDER / "README.md").write_text("---\nlicense: mit\n---\nMy own card.\n")
    assert push(hub, here, "--repo-id", "tester/x").code == 0
    there = hub.repos["tester/x"].branches["main"]
    assert "private-notes.txt" not in there
    assert there["README.md"] == b"---\nlicense: mit\n---\nMy own card.\n"
    shard = next((here / FOLDER).glob("model-00001*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    done = push(hub, here, "--repo-id", "tester/x")
    assert (done.code, done.err.splitlines()[0]) == (
        3, f"Error: {shard.name} in out is not as it was exported.")


def test_a_dry_run_asks_nobody(hub, here):
    done = push(hub, here, "--dry-run", "--create-pr")
    assert done.code == 0
    assert "would push to: USER/out" in done.out
    assert "as a pull request" in done.out
    assert hub.requests == []
