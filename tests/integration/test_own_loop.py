"""A loop of one's own is the same training: same numbers, same checks, same files."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import jsonl, ppocli, read_json, stable_rows
from runs import WORDS
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppocli import PPOTrainer, load_run
from ppocli.config.config_yaml import read_config
from ppocli.errors import CheckpointError, ConfigError, RewardError
from ppocli.rewards.reward_records import RewardRequest
from ppocli.rewards.scoring import build_reward

QUICKSTART = ["+recipe=quickstart", "seed=3", "ppo.total_episodes=null", "ppo.num_steps=2",
              "ppo.num_rollouts=16", "ppo.chunk_size=6", "ppo.mini_batch_size=8",
              "ppo.kl_controller=adaptive", "reward.scale=running", "prompts.eval.limit=4",
              "eval.at_start=false", "eval.every_steps=null", "hardware.device=cpu",
              # which products are faster is measured anew by each run
              "hardware.gemm=default"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the command that a loop has to equal."""
    folder = tmp_path_factory.mktemp("quick")
    ppocli("train", *QUICKSTART, "run_name=command", cwd=folder, code=0)
    return folder / "runs/command"


def assert_same_model(one: Path, other: Path) -> None:
    ours, theirs = (load_file(run / "model/model.safetensors") for run in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def same_numbers(loop: Path, command: Path) -> None:
    rows = [{k: v for k, v in row.items() if not k.startswith("eval/")}
            for row in stable_rows(command / "metrics.jsonl")]
    assert [row["step"] for row in rows] == [1, 2]
    assert stable_rows(loop / "metrics.jsonl") == rows
    assert_same_model(loop, command)


def sentiment_of(trainer: PPOTrainer, batch, chunk: int = 6) -> list[float]:
    """The recipe's own reward, asked for as many at a time as the command does."""
    reward = build_reward(read_config(trainer.run_dir.parent / "reward.yaml").reward)
    scores: list[float] = []
    for start in range(0, len(batch), chunk):
        rows = slice(start, start + chunk)
        scores += reward.score(RewardRequest(
            batch.prompts[rows], batch.responses[rows], batch.response_ids[rows],
            {name: values[rows] for name, values in batch.columns.items()},
            trainer.tokenizer)).scores
    return scores


@pytest.mark.slow
def test_a_loop_gives_the_numbers_of_the_command(quick: Path, tmp_path: Path):
    (tmp_path / "reward.yaml").write_bytes((quick / "config.yaml").read_bytes())
    with PPOTrainer([*QUICKSTART, f"output_dir={tmp_path}", "run_name=loop"]) as trainer:
        while not trainer.done:
            batch = trainer.generate()
            trainer.log(trainer.step(batch, sentiment_of(trainer, batch)))
        run = trainer.finish()
    assert run.summary["status"] == "finished"
    same_numbers(run.run_dir, quick)


@pytest.fixture
def loop_words(shared_world: Path, tmp_path: Path) -> list[str]:
    return [f"model.path={shared_world / 'lm'}", *WORDS, f"output_dir={tmp_path / 'runs'}",
            "ppo.num_steps=4", "run_name=loop"]


@pytest.fixture
def trainer(loop_words: list[str]) -> Iterator[PPOTrainer]:
    with PPOTrainer(loop_words) as trainer:
        yield trainer


QUERIES = ["the film", "i saw", "this plot was"]


def good(texts: list[str]) -> list[float]:
    return [float(text.split().count("good")) + len(text) / 100 for text in texts]


def test_responses_from_elsewhere_are_measured_by_a_forward_pass(trainer: PPOTrainer, shared_world):
    """Against transformers' own model, with nothing of ours between."""
    model = AutoModelForCausalLM.from_pretrained(shared_world / "lm").eval()
    tokenizer = AutoTokenizer.from_pretrained(shared_world / "lm")
    queries = [torch.tensor(tokenizer(q)["input_ids"]) for q in QUERIES]
    responses = [torch.tensor([4, 9, 1]), torch.tensor([12, 5]), torch.tensor([30])]
    entropy = []
    for query, response in zip(queries, responses, strict=True):
        ids = torch.cat([query, response])[None]
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0].double(), -1)
        picked = logprobs[len(query) - 1:-1].gather(1, response[:, None])
        entropy.append(-float(picked.sum()))
    stats = trainer.step(queries, responses, [torch.tensor(1.0), torch.tensor([0.5]), 0.0])
    assert stats["objective/entropy"] == pytest.approx(sum(entropy) / 3, rel=1e-5)
    assert stats["objective/kl"] == 0.0
    assert stats["reward/mean"] == 0.5
    assert stats["val/num_eos_tokens"] == 1.0  # 1 is EOS
    assert stats["rollout/response_tokens_mean"] == 2.0
    assert (stats["episode"], stats["updates"]) == (3, 2)
    assert "tokens_per_second/rollout" not in stats
    assert "time/between" not in stats


@pytest.mark.parametrize(("scores", "said"), [
    ([1.0], "1 value for 3 samples"), ([1.0, 2.0, math.nan], "NaN"), ([[1.0], 2.0, 3.0], "tokens")])
def test_scores_are_checked_as_everywhere(scores, said, idle: PPOTrainer):
    batch = idle.generate(QUERIES)
    with pytest.raises(RewardError, match=said) as caught:
        idle.step(batch, scores)
    assert str(caught.value).startswith("your loop returned ")
    assert caught.value.where == "PPOTrainer.step(scores)"
    assert idle.steps == 0


@pytest.mark.parametrize(("call", "said"), [
    (lambda t: t.generate([]), "no prompts"), (lambda t: t.generate("the film"), "one text"),
    (lambda t: t.generate([[1, 99999]]), "99999"),
    (lambda t: t.generate([[5] * 60]), "leaves no room"),
    (lambda t: t.step([[4]], [[5], [6]], [1.0]), "1 queries, but 2"),
    (lambda t: t.step([[4]], [[5] * 64], [1.0]), "more than the 64"),
    (lambda t: t.step([[4]] * 49, [[5]] * 49, [1.0] * 49), "only 48 of the 48"),
    (lambda t: t.log({"lr": 1.0}), "isn't logged yet"),
    (lambda t: t.log({"step": 1, "note": "text"}), "no number")])
def test_what_does_not_fit_is_told(call, said, idle: PPOTrainer):
    with pytest.raises(ConfigError, match=said):
        call(idle)


def test_a_refused_call_loses_nothing_and_a_batch_is_used_once(trainer: PPOTrainer):
    batch = trainer.generate(QUERIES)
    with pytest.raises(ConfigError, match="only scores go with it"):
        trainer.step(batch)
    with pytest.raises(RewardError):
        trainer.step(batch, [1.0])
    stats = trainer.step(batch, good(batch.responses))
    with pytest.raises(ConfigError, match="policy after step 0, which has made 1"):
        trainer.step(batch, good(batch.responses))
    trainer.log({**stats, "mine/figure": torch.tensor(2.0)})
    with pytest.raises(ConfigError, match="logged"):
        trainer.log(stats)
    run = trainer.finish()
    (row,) = jsonl(run.run_dir / "metrics.jsonl")
    assert (row["step"], row["mine/figure"], run.summary["steps"]) == (1, 2.0, 1)
    assert (run.run_dir / "checkpoints/step-000001").is_dir()
    assert len(load_run(run.run_dir).generate(["the film"])) == 1
    with pytest.raises(ConfigError, match="closed"):
        trainer.save_pretrained(run.run_dir / "again")


def run_steps(trainer: PPOTrainer, count: int) -> None:
    for _ in range(count):
        batch = trainer.generate(QUERIES * 4)
        trainer.log(trainer.step(batch, good(batch.responses)))


def test_a_resumed_loop_goes_on_as_if_never_stopped(loop_words, tmp_path):
    with PPOTrainer([*loop_words, "run_name=whole"]) as whole:
        run_steps(whole, 3)
        whole.save_pretrained(tmp_path / "whole/model")
    with PPOTrainer(loop_words) as first:
        run_steps(first, 1)
        saved = first.save_checkpoint()
        run_steps(first, 1)  # lost
    assert read_json(saved.parent.parent / "summary.json")["status"] == "stopped"
    with PPOTrainer([f"resume={saved.parent.parent}"]) as second:
        assert second.steps == 1
        run_steps(second, 2)
        second.save_pretrained(tmp_path / "second/model")
        with pytest.raises(CheckpointError, match="in use"):
            PPOTrainer([f"resume={saved.parent.parent}"])
    runs = tmp_path / "runs"
    assert stable_rows(runs / "loop/metrics.jsonl") == stable_rows(runs / "whole/metrics.jsonl")
    assert_same_model(tmp_path / "second", tmp_path / "whole")


def test_a_failure_is_noted_and_a_closed_trainer_says_so(loop_words):
    with pytest.raises(ZeroDivisionError), PPOTrainer(loop_words) as trainer:
        raise ZeroDivisionError("mine")
    summary = read_json(trainer.run_dir / "summary.json")
    assert (summary["status"], summary["error"]) == ("failed", "ZeroDivisionError: mine")
    with pytest.raises(ConfigError, match="closed"):
        trainer.generate(QUERIES)
    trainer.close()


def test_groups_stand_together(loop_words):
    with PPOTrainer([*loop_words, "ppo.advantage=rloo", "ppo.n=2"]) as trainer:
        with pytest.raises(ConfigError, match="2 responses to the same prompt"):
            trainer.step(["it", "i saw"], ["was", "a film"], [1.0, 0.0])
        assert trainer.step(["it", "it"], ["was", "good"], [1.0, 0.0])["updates"] > 0


def test_processes_that_nobody_has_started_are_refused(loop_words, monkeypatch):
    with pytest.raises(ConfigError, match="starts no other processes"):
        PPOTrainer([*loop_words, "hardware.num_processes=2"])
    with pytest.raises(ConfigError, match="whole weights"):
        PPOTrainer([*loop_words, "hardware.zero_stage=2"])
    with pytest.raises(ConfigError, match="which policy they come from"):
        PPOTrainer([*loop_words, "ppo.staleness=1"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="starts no other processes"):
        PPOTrainer(loop_words)


def test_a_loop_within_autocast_learns_with_the_weights_of_now(loop_words):
    """Torch keeps rounded weights until the outermost context ends, which is the script's."""
    found = []
    for name, on in (("apart", False), ("within", True)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on), PPOTrainer(
                [*loop_words, f"run_name={name}", "hardware.precision=bf16"]) as trainer:
            for _ in range(2):
                batch = trainer.generate()
                found.append(trainer.step(batch, [float(len(text)) for text in batch.responses]))
    assert [row["loss/value_avg"] for row in found[2:]] == [
        row["loss/value_avg"] for row in found[:2]]
