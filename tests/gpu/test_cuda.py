"""The engine on a CUDA device: the same numbers as on the CPU, in fp32 and bf16."""

import pytest
import torch
from sessions import fresh_state, optimize, rollout_of, session_of, small_config

from ppocli.launching.child_process import Start
from ppocli.launching.worker import run_worker
from ppocli.storage.run_folder import write_config
from ppocli.tasks.ppo.experience import to_experience, update_moments

pytestmark = pytest.mark.gpu


def test_a_rollout_on_the_gpu_is_that_on_the_cpu(tmp_path):
    found = []
    for device in ("cpu", "cuda"):
        with session_of(small_config(tmp_path, hardware__device=device, ppo__num_rollouts=64)
                        ) as session:
            found.append(rollout_of(session))
    cpu, gpu = found
    same = [a == b for a, b in zip(cpu.responses, gpu.responses, strict=True)]
    assert sum(same) >= 62  # rounding may flip a token where the noise falls between two
    for i in [i for i, equal in enumerate(same) if equal]:
        mask = cpu.response_mask[i]
        for name in ("logprobs", "ref_logprobs", "values"):
            a, b = getattr(cpu, name)[i], getattr(gpu, name)[i]
            torch.testing.assert_close(b[:len(mask)][mask[:len(b)]], a[mask], rtol=0, atol=1e-3)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.05)])
def test_with_learning_rate_zero_every_ratio_is_one(tmp_path, precision, tolerance):
    cfg = small_config(tmp_path, hardware__device="cuda", hardware__precision=precision,
                       ppo__optimizer__lr=0.0)
    with session_of(cfg) as session:
        rollout = rollout_of(session)
        state = update_moments(fresh_state(session), rollout, cfg)
        result = optimize(session, to_experience(rollout, state, cfg))
        assert next(session.policy.parameters()).dtype == torch.float32
        assert next(session.policy.parameters()).is_cuda
    assert result.terms["ratio"] == pytest.approx(1.0, abs=tolerance)
    assert result.terms["max_log_ratio"] <= tolerance


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_trains_and_leaves_a_model(tmp_path, precision):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    cfg = small_config(tmp_path, hardware__device="cuda", hardware__precision=precision,
                       reward__fn="length", reward__kwargs={"target": 4})
    write_config(cfg, run_dir / "config.yaml")
    result = run_worker(Start(run_dir))
    assert result.summary["status"] == "finished"
    assert result.summary["peak_memory_mib"] > 0
    assert (result.model_dir / "model.safetensors").is_file()
