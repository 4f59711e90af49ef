"""Tasks and samplers from outside the package, through the ordinary command: training, evaluation,
two ranks under ZeRO 2, memory that runs out, kill -9 and resume."""

import functools
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import jsonl, read_json, stable_rows, write_jsonl
from runs import WORDS, last_checkpoint, run, whole_copy
from safetensors.torch import load_file, save_file

OUTSIDE = Path(__file__).parent.parent / "outside"
PAIRS = [{"chosen": f"the {noun} was {good}", "rejected": f"the {noun} was {bad}"}
         for noun in ("film", "plot", "actor")
         for good, bad in (("good", "bad"), ("great", "awful"), ("fine", "dull"), ("warm", "cold"))]
KINDS = {
    "task": ("task.fn=pairs_task.py:Pairs", "task.kwargs.path=pairs.jsonl",
             "checkpoint.metric=accuracy", "ppo.num_rollouts=8", "ppo.mini_batch_size=4"),
    "sampler": ("rollout.engine=slow_sampler.py:Whole", "rollout.kwargs.sharpness=1.0",
                "prompts.path=prompts.jsonl", "reward.fn=rewards.py:plain")}


ODD = '''\
from pairs_task import Pairs
from ppocli.sampling.sampler import Sampler
from ppocli.training.task import Task


class Starred(Task):
    def collect(self, state, context): pass
    def plan(self, state, batch): pass
    def loss(self, atoms, rows, weights, group): pass


def starred(setup):
    return Starred()


class Broken(Pairs):
    def __init__(self, setup): self.cfg = {}["lost"]


class Silent(Sampler):
    def __init__(self, setup): pass
    def acting(self, policy): pass
    def converse(self, *args, **kwargs): pass
'''


def words(kind: str, *more: str) -> list[str]:
    keys = {word.split("=", 1)[0]: word
            for word in ("model.path=./lm", *WORDS, *KINDS[kind], *more)}
    return list(keys.values())


def add_outside_code(folder: Path) -> None:
    for file in OUTSIDE.glob("*.py"):
        shutil.copy(file, folder)
    (folder / "odd.py").write_text(ODD)
    write_jsonl(folder / "pairs.jsonl", PAIRS)


@pytest.fixture
def here(world: Path) -> Path:
    add_outside_code(world)
    for file in OUTSIDE.glob("*.py"):  # as the folder of another test had it
        sys.modules.pop(file.stem, None)
    return world


@pytest.fixture(scope="module")
def straight_of(shared_world: Path, tmp_path_factory: pytest.TempPathFactory):
    """The run of a kind without any trouble, made once."""
    folder = tmp_path_factory.mktemp("straight") / "world"
    shutil.copytree(shared_world, folder, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    add_outside_code(folder)

    @functools.cache
    def made(kind: str) -> Path:
        run("train", *words(kind, f"run_name={kind}"), cwd=folder, code=0)
        return folder / "runs" / kind

    return made


@pytest.fixture
def straight(here: Path, kind: str, straight_of) -> Path:
    return whole_copy(straight_of(kind), here / "runs/straight")


def tensors_of(run_dir: Path) -> dict[str, torch.Tensor]:
    """All that the last checkpoint holds."""
    return {f"{path.name}/{name}": value
            for path in sorted(last_checkpoint(run_dir).rglob("*.safetensors"))
            for name, value in load_file(path).items()}


def assert_equal(one: Path, other: Path) -> None:
    a, b = tensors_of(one), tensors_of(other)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert stable_rows(one / "metrics.jsonl") == stable_rows(other / "metrics.jsonl")
    assert (one / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()


def assert_close(one: Path, other: Path) -> None:
    rows, others = stable_rows(one / "metrics.jsonl"), stable_rows(other / "metrics.jsonl")
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for row, expected in zip(rows, others, strict=True):
        assert row == pytest.approx(expected, rel=2e-3, abs=1e-4)


@pytest.mark.parametrize("kind", ["task"])
def test_a_task_of_ones_own_trains_is_evaluated_and_is_saved_as_a_model(straight):
    rows = jsonl(straight / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[-1]["loss/total"] < rows[1]["loss/total"]
    assert rows[-1]["eval/margin_mean"] > rows[0]["eval/margin_mean"] == 0.0
    summary = read_json(straight / "summary.json")
    assert summary["eval_after"]["accuracy"] == rows[-1]["eval/accuracy"]
    assert summary["seen"] == summary["episodes"] == 32
    assert summary["best"]["name"] == "accuracy"
    saved = last_checkpoint(straight)
    assert load_file(saved / "task_state.safetensors")["weights"].shape == (8,)
    assert load_file(saved / "head.safetensors")["weight"].shape == (1, 32)
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(straight / "model")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sampler"])
def test_a_sampler_of_ones_own_is_measured_by_forward_passes(straight):
    rows = jsonl(straight / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    # its logprobs are zeros: had they been taken, the ratio would be e^logprob
    assert rows[1]["val/ratio"] == pytest.approx(1.0, abs=0.05)
    assert rows[1]["objective/kl"] == pytest.approx(0.0, abs=1e-5)
    assert rows[0]["eval/kl_mean"] == pytest.approx(0.0, abs=1e-5)


def test_old_logprobs_that_are_not_the_policy_s_are_found_by_the_first_ratios(here, command):
    kept = [word for word in words("sampler", "run_name=r", "ppo.optimizer.lr=1e-8")
            if not word.startswith("rollout.")] + ["rollout.engine=claims.py:Claims"]
    first = command(*kept, "ppo.num_steps=2", code=0)
    assert first.err.count("0.5 nats apart (root mean square; up to 0.5). From now on they") == 1
    again = command(*kept, "ppo.num_steps=3", "resume=auto", code=0)
    assert "nats apart" not in again.err
    assert [row["policy/max_log_ratio"] < 1e-3 for row in jsonl(here / "runs/r/metrics.jsonl")[1:]
            ] == [False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "fault"), [
    ("task", "optimize.minibatch@7:kill9"), ("sampler", "rollout.token@150:kill9")])
def test_kill9_then_resume_equals_the_straight_run(kind, fault, straight, here):
    run("train", *words(kind, "run_name=r"), cwd=here, PPOCLI_FAULTS=fault, code=-9)
    run("train", *words(kind, "run_name=r", "resume=auto"), cwd=here, code=0)
    assert_equal(straight, here / "runs/r")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_under_zero_2_come_to_what_one_process_comes_to(kind, straight, here):
    run("train", *words(kind, "run_name=two", "hardware=zero2"), cwd=here, code=0)
    assert_close(straight, here / "runs/two")


@pytest.mark.parametrize(("words_", "code", "said"), [
    (("task.fn=nowhere.py:Task",), 2, "nowhere.py"),
    (("task.fn=pairs_task.py:Pairs", "task.kwargs.file=pairs.jsonl"), 2, "task.kwargs"),
    (("task.fn=odd.py:starred",), 2, "abstract class Starred"),
    (("task.fn=odd.py:Broken",), 1, "It came through code that ppocli was given: odd.py:17."),
    (("rollout.engine=nothing",), 2, "rollout.engine")])
def test_what_cannot_be_one_is_said_with_its_key(words_, code, said, here, command):
    assert said in command(*words("sampler", "run_name=r", *words_), code=code).err


@pytest.mark.parametrize(("word", "code", "said"), [
    ("task.fn=odd.py:Starred", 2, "Starred lacks evaluate."),
    ("rollout.engine=odd.py:Silent", 2, "Silent lacks sample.")])
def test_what_a_class_lacks_is_said_before_a_model_loads(word, code, said, here, command, validate):
    save_file({"other": torch.zeros(1)}, here / "lm/model.safetensors")
    tried = words("sampler", "run_name=r", word)
    tried = [one for one in tried if word.startswith("rollout") or "kwargs" not in one]
    assert said in validate(*tried, code=code).err
    if "Starred" in word:
        assert said in command(*tried, code=code).err
