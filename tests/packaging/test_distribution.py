"""The wheel and the sdist, built for real, and what a user gets who installs the wheel."""

import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from contextlib import closing
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path

import pytest
import warm
from helpers import environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from runs import PLANTED

ROOT = Path(__file__).resolve().parents[2]
MEBIBYTE = 2**20
SMALL = ("ppo.total_episodes=32", "ppo.num_rollouts=16", "ppo.mini_batch_size=8",
         "ppo.ppo_epochs=1", "eval.at_start=false", "prompts.eval.limit=4",
         "generation.max_new_tokens=8", "hardware.device=cpu")


def build(kind: str, folder: Path, source: Path = ROOT) -> Path:
    """Build one distribution with the installed hatchling, so that nothing is downloaded."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)],
                   cwd=source, check=True, capture_output=True, timeout=120)
    [made] = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    return build("sdist", tmp_path_factory.mktemp("sdist"))


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_all_that_a_run_reads(wheel):
    names = names_in(wheel)
    shipped = [path.relative_to(ROOT) for folder in ("conf", "recipes")
               for path in (ROOT / folder).rglob("*.yaml")]
    code = [path.relative_to(ROOT) for path in (ROOT / "ppocli").rglob("*")
            if path.suffix in (".py", ".css", ".js", ".LICENSE", ".j2", ".jinja")]
    data = [path.relative_to(ROOT) for path in (ROOT / "ppocli/builtin/data").rglob("*")
            if path.is_file()]
    assert len(shipped) > 10
    assert {path.suffix for path in data} == {".json", ".jsonl", ".safetensors"}
    wanted = {*(f"ppocli/{path}" for path in shipped), *map(str, code), *map(str, data)}
    assert wanted - names == set()


def test_versions_that_are_known_to_be_wrong_are_ruled_out(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        told = BytesParser().parsebytes(archive.read(name)).get_all("Requires-Dist")
    bounds = {r.name: r.specifier for text in told if (r := Requirement(text)).marker is None}
    assert "5.4.0" not in bounds["transformers"]  # config.json could run code: CVE-2026-5241
    assert "5.5.0" in bounds["transformers"]
    assert "6.0.0" not in bounds["transformers"]
    assert "2.5.1" not in bounds["torch"]  # torch.load before weights_only was its default
    assert "3.0.0" not in bounds["huggingface-hub"]
    assert "0.31.0" not in bounds["typer"]


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    [source] = [path for path in tmp_path.iterdir() if path.is_dir()]
    present = {path.name for path in source.iterdir()}
    assert {"Makefile", "constraints.txt", "README.md", "CONTRIBUTING.md", "LICENSE", "tests",
            "docs", "benchmarks", "conf", "recipes", "tools", "pyproject.toml"} <= present
    assert not present & {"runs", ".venv", "dist", "build"}
    assert sdist.stat().st_size < 11 * MEBIBYTE
    again = build("wheel", tmp_path / "again", source)
    assert names_in(again) == names_in(wheel)


def test_constraints_lie_within_the_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonicalize_name(name): version for name, pin, version in
              (line.partition("==") for line in lines) if pin and not name.startswith("#")}
    extras = project["optional-dependencies"].values()
    for text in (*project["dependencies"], *(text for extra in extras for text in extra)):
        requirement = Requirement(text)
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, text
    assert not [name for name in pinned if name.startswith(("nvidia", "cuda", "triton"))]
    assert "+" not in "".join(pinned.values())  # a local version exists in one index only


@dataclass(frozen=True, slots=True)
class Installed:
    """A virtual environment with the wheel, and an empty folder to work in."""

    python: Path
    home: Path
    env: dict[str, str]

    def run(self, *words: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment from the empty folder."""
        program = str(self.python.parent / words[0])
        return subprocess.run([program, *words[1:]], cwd=self.home, text=True, check=False,
                              capture_output=True, timeout=timeout, env=self.env)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Installed:
    """The wheel in an environment that sees the libraries of this one, but not the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True,
                   timeout=60)
    python = folder / "env/bin/python"
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet",
                    "--no-deps", "--no-index", "--disable-pip-version-check", wheel],
                   check=True, capture_output=True, timeout=120)
    # After pip, which would otherwise take this environment's ppocli for the new one's. A path in
    # a .pth file is searched last, and the .pth files in it (an editable ppocli) are not read.
    site = sysconfig.get_path("purelib", vars={"base": str(folder / "env")})
    Path(site, "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    home = folder / "home"
    home.mkdir()
    kept = {name: value for name, value in environment().items() if not name.startswith("PYTHON")}
    tokens = dict.fromkeys(("HF_TOKEN", "WANDB_API_KEY", "HUGGING_FACE_HUB_TOKEN"), PLANTED)
    return Installed(python, home, kept | tokens)


@pytest.fixture(scope="module")
def trained(installed) -> Path:
    """The model of a small run, by the installed command."""
    done = installed.run("ppocli", "train", "+recipe=quickstart", "run_name=tiny", *SMALL)
    assert done.returncode == 0, done.stderr
    assert PLANTED not in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == str(installed.home / "runs/tiny/model")
    return installed.home / "runs/tiny/model"


def test_the_installed_command_answers(installed):
    from ppocli.version import __version__

    assert installed.run("ppocli", "--version").stdout == f"ppocli {__version__}\n"
    done = installed.run("ppocli", "recipes", "list", "--json")
    listed = json.loads(done.stdout)
    assert {"quickstart", "randomwalks", "imdb_sentiment"} <= {row["name"] for row in listed}
    package = str(installed.python.parent.parent)
    assert all(row["file"].startswith(package) for row in listed)
    done = installed.run("ppocli", "train", "--cfg", "job", "+recipe=quickstart")
    assert done.returncode == 0, done.stderr
    assert "path: builtin:reviews" in done.stdout
    assert list(installed.home.iterdir()) == []


# the words of each command, its exit code, and what its standard output holds
COMMANDS: list[tuple[str, int, str]] = [
    ("resume runs/tiny ppo.total_episodes=48", 0, "runs/tiny/model"),
    ("watch runs/tiny --no-progress", 0, "step 3/3"),
    ("eval runs/tiny --limit 4 --against base --json", 0, '"win_rate"'),
    ("eval runs/tiny --limit 4 --min-reward 1.5 --name strict", 10, "reward"),
    ("generate runs/tiny --prompt The --score --json", 0, '"score"'),
    ("chat runs/tiny", 2, ""),
    ("export runs/tiny --to-hub someone/tiny --dry-run", 0, ""),
    ("export runs/tiny --dtype bf16", 0, "runs/tiny/export/"),
    ("report runs/tiny", 0, "report.html"),
    ("plot runs/tiny --metric reward", 0, "reward"),
    ("plot runs/tiny --output curve.svg", 0, "curve.svg"),
    ("compare runs/tiny runs/other --json", 0, "other"),
    ("runs list --json", 0, '"finished"'),
    ("runs prune --dry-run", 0, "tiny"),
    ("validate +recipe=quickstart --json", 0, "quickstart"),
    ("estimate +recipe=quickstart", 0, "most at once"),
    ("schema ppo.optimizer", 0, "ppo.optimizer.lr"),
    ("env", 0, "torch"),
    ("completion bash", 0, "_PPOCLI_COMPLETE"),
]


@pytest.mark.timeout(600)
def test_every_installed_command_works_and_gives_no_token_away(installed, trained):
    """Forked from a process of that environment, in which the libraries are loaded."""
    shutil.copytree(installed.home / "runs/tiny", installed.home / "runs/other")
    with closing(warm.Server(str(installed.python), installed.env)) as server:
        for line, code, expected in COMMANDS:
            with warm.begin(["-m", "ppocli", *line.split()], cwd=installed.home,
                            env=installed.env, server=server) as process:
                out, err = process.communicate(timeout=240)
            assert process.returncode == code, f"{line}: {process.returncode}\n{out}\n{err}"
            assert expected in out, f"{line}\n{out}\n{err}"
            assert "Traceback" not in err, f"{line}\n{err}"
            assert PLANTED not in out + err, line
    files = [path for path in installed.home.rglob("*") if path.is_file()]
    assert {"config.yaml", "metrics.jsonl", "eval.json", "report.html", "training_config.yaml",
            "README.md", "ppocli.log"} <= {path.name for path in files}
    given_away = [str(path.relative_to(installed.home)) for path in files
                  if PLANTED.encode() in path.read_bytes()]
    assert given_away == []
