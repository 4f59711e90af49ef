"""Rollouts, updates, evaluations, checkpoints and whole runs on the simulated device: they compute
what the CPU computes, and nothing of them lies on the wrong side."""

import json

import pytest
import torch
from helpers import save_lm
from sessions import (
    count_letters,
    fresh_state,
    optimize,
    rollout_of,
    session_of,
    small_config,
    weights_of,
)
from simulated import OnDevice

from ppocli.launch.local_ranks import Start
from ppocli.launch.worker import run_worker
from ppocli.ppo.policy_samples import evaluate
from ppocli.ppo.step import to_experience
from ppocli.runs.run_folder import write_config

CASES = {
    "all layers": {}, "top layer": {"model__num_layers_unfrozen": 1},
    "adapters": {"model__peft": {"type": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.1}},
    "a critic of its own": {"model__value__kind": "model"},
    "an offloaded reference": {"model__reference__offload": True},
    "checkpointed gradients": {"model__gradient_checkpointing": True},
    "KL over the vocabulary": {"ppo__kl_estimator": "full"},
    "full KL in the loss": {"ppo__kl_in": "loss", "ppo__kl_estimator": "full"},
    "gspo": {"ppo__policy_loss": "gspo"},
    "a penalty and a nucleus": {"generation__repetition_penalty": 1.3, "generation__top_p": 0.8,
                                "generation__stop_sequences": ["good"],
                                "generation__min_new_tokens": 2},
    "chunks scored in a thread": {"ppo__chunk_size": 5, "generation__length_sampler": [2, 10],
                                  "reward__overlap": "always"},
}


STEPS = [*(("gpt2", name) for name in CASES), ("llama", "all layers"), ("llama", "top layer"),
         ("llama", "adapters"), ("llama", "chunks scored in a thread")]


@pytest.mark.parametrize(("kind", "name"), [
    pytest.param(*step, marks=() if step == STEPS[-1] else pytest.mark.slow) for step in STEPS])
def test_a_step_and_an_evaluation_compute_what_the_cpu_computes(sim, tmp_path, monkeypatch, kind,
                                                                  name):
    keys = CASES[name]
    save_lm(tmp_path / "lm", kind)
    found = []
    for device in ("cpu", "cuda"):
        # accelerate would take it for a CPU as well
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu" if device == "cpu" else "sim")
        cfg = small_config(tmp_path, hardware__device=device, ppo__num_rollouts=8,
                           ppo__mini_batch_size=4, ppo__ppo_epochs=1, prompts__eval__limit=4,
                           **keys)
        with session_of(cfg, reward=count_letters) as session:
            parameters = list(session.policy.parameters())
            assert all(isinstance(p, OnDevice) for p in parameters) == (device == "cuda")
            rollout = rollout_of(session)
            result = optimize(session, to_experience(rollout, fresh_state(session), cfg))
            later = evaluate(session, session.context())
            found.append((rollout, result.terms, later.figures,
                          {name: t.cpu() for name, t in weights_of(session).items()}))
    (here, terms, figures, weights), (there, *others) = found
    assert here.responses == there.responses
    for figure in ("logprobs", "ref_logprobs", "values", "kl"):
        torch.testing.assert_close(getattr(there, figure), getattr(here, figure), rtol=0, atol=1e-4)
    assert others[0] == pytest.approx(terms, abs=2e-3)
    assert others[1] == pytest.approx(figures, abs=2e-3)
    for place, tensor in others[2].items():
        torch.testing.assert_close(tensor, weights[place], rtol=0, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [
    {}, {"model__peft": {"type": "lora"}}, {"model__num_layers_unfrozen": 1}],
    ids=["all", "lora", "top"])
def test_a_run_saves_goes_on_where_it_stopped_and_leaves_a_model(sim, tmp_path, keys):
    """One step and one more after it make the same weights as two at once."""
    left = []
    for name, parts in (("straight", (2,)), ("stopped", (1, 2))):
        folder = tmp_path / name
        folder.mkdir()
        for steps in parts:
            cfg = small_config(tmp_path, hardware__device="cuda", reward__fn="length",
                               reward__kwargs={"target": 4}, ppo__num_steps=steps,
                               checkpoint__every_steps=1, eval__every_steps=1, **keys)
            write_config(cfg, folder / "config.yaml")
            result = run_worker(Start.of_folder(folder, resume=steps != parts[0]))
        assert result.summary["status"] == "finished"
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [0, 1, 2]
        state = next((folder / "checkpoints").glob("*2/rng.safetensors"))
        assert state.stat().st_size > 0
        left.append({path.relative_to(folder).as_posix(): path.read_bytes()
                     for path in (folder / "model").rglob("*.safetensors")})
    assert left[0] == left[1]
    assert left[0]
