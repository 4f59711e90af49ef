"""Servers that sample, against a double of vLLM's routes (``vllm_double``); what vLLM itself does
is in ``tests/vllm/test_vllm_itself.py``."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import checked, model_config, refused, save_lm
from safetensors.torch import save_file
from sessions import idle_context, refused_session, rollout_of, session_of, small_config
from vllm_double import (
    LORA,
    answering,
    assert_same,
    config,
    disturb,
    drawn,
    engine_of,
    move_adapter,
    one_server,
    ours,
    serving,
)

from ppocli.errors import ConfigError, RewardError, SamplerError
from ppocli.models.loading.load_adapters import adapter_tensors, write_adapter
from ppocli.models.loading.model_config import ModelFacts, read_lm
from ppocli.ppo.ppo_task import PPOTask
from ppocli.sampling.vllm.server_process import server_command, shell_line, why_merged
from ppocli.training.loop import initial_state

GENERATE = "/inference/v1/generate"


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_greedy_samples_equal_ours_before_and_after_an_update(kind, tmp_path):
    save_lm(tmp_path / "lm", kind)
    with one_server(tmp_path) as (session, engine):
        assert_same(drawn(session, do_sample=False), ours(session, do_sample=False))
        disturb(session)
        assert_same(drawn(session, do_sample=False), ours(session, do_sample=False))
        assert engine.asked["/pause"] == 2


def test_servers_are_started_with_the_base_of_an_adapter_in_its_own_revision(tmp_path):
    save_lm(tmp_path / "lm")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(
        {"base_model_name_or_path": str(tmp_path / "lm"), "revision": "b2"}))
    save_file({}, tmp_path / "adapter/adapter_model.safetensors")
    cfg = small_config(tmp_path, model__path=str(tmp_path / "adapter"), model__revision="a1")
    said = server_command(cfg, ModelFacts(model_config()), "python", "http://h")
    assert said[said.index("--model") + 1] == str(tmp_path / "lm")
    assert said[said.index("--revision") + 1] == "b2"


def test_stop_rules_and_limits_are_ours_and_lora_is_merged_into_what_is_sent(tmp_path):
    keys = {"model__peft": {"type": "lora", "r": 4, "lora_alpha": 8}}
    with one_server(tmp_path, **keys) as (session, _):
        disturb(session)
        for spec in ({"stop_ids": (7, 9, 11), "min_new_tokens": 4}, {"length_range": (2, 5)},
                     {"stop_sequences": ("good", "film")}):
            assert_same(drawn(session, do_sample=False, **spec),
                        ours(session, do_sample=False, **spec))


def test_an_adapter_is_sent_by_itself_under_a_new_name_each_time(tmp_path):
    """One that goes on is the server's from the start; a folder that it can't see changes
    nothing."""
    save_lm(tmp_path / "lm", "llama", tie_word_embeddings=True)
    engine = engine_of(tmp_path, model__peft=LORA)
    assert engine.name.endswith("-lora8")
    with one_server(tmp_path, engine=engine, model__peft=LORA) as (session, _):
        for _ in range(3):
            assert_same(drawn(session, do_sample=False), ours(session, do_sample=False))
            move_adapter(session)
        assert engine.asked["/collective_rpc"] == 0
        assert len(engine.adapters) == 1
        assert set(engine.adapters) == {engine.version}
        assert engine.asked["/v1/unload_lora_adapter"] == 2
        sent = [body["lora_path"] for body in engine.bodies if "lora_path" in body]
        assert [Path(path).is_dir() for path in sent] == [False, False, True]
        (tmp_path / "adapter").mkdir()
        write_adapter(session.loaded.adapter, adapter_tensors(session.loaded.adapter),
                      tmp_path / "adapter")
    further = {"model__path": str(tmp_path / "adapter"), "model__peft": {"type": "lora"}}
    with one_server(tmp_path, engine=engine, **further) as (session, _):
        assert_same(drawn(session, do_sample=False), ours(session, do_sample=False))
        session.sampler._weights.write(lambda folder: None, "x")
        with refused(SamplerError, "can't read the weights", "rollout.weights_dir"):
            session.sampler._weights.load_adapter(session.sampler.servers[0])
        assert_same(drawn(session, do_sample=False), ours(session, do_sample=False))


def test_a_server_that_answers_without_the_adapter_is_found_out(tmp_path):
    save_lm(tmp_path / "lm", "llama")
    engine = engine_of(tmp_path, model__peft=LORA)

    def spoil(path, number, body):
        body.pop("model", None)

    with one_server(tmp_path, spoil, engine, model__peft=LORA) as (session, _), refused(
            SamplerError, "can't have sampled"):
        drawn(session)


@pytest.mark.parametrize(("kind", "peft", "keys", "reason"), [
    ("gpt2", {}, {}, "GPT2LMHeadModel takes no LoRA"),
    ("llama", {"use_dora": True}, {}, "model.peft.use_dora"),
    ("llama", {"modules_to_save": ["model.norm"]}, {}, "model.peft.modules_to_save"),
    ("llama", {"bias": "all"}, {}, "model.peft.bias"),
    ("llama", {"rank_pattern": {"q_proj": 600}}, {}, "ranks up to 512"),
    ("llama", {"target_modules": ["embed_tokens"]}, {}, "q_proj"),
    ("llama", {}, {"hardware__device": "cuda"}, "precision=bf16"),
    ("qwen2", {"target_modules": ["self_attn.q_proj", "up_proj"], "use_rslora": True},
     {"hardware__device": "cuda", "hardware__precision": "bf16"}, None)])
def test_what_servers_take_as_an_adapter(kind, peft, keys, reason, tmp_path):
    save_lm(tmp_path / "lm", kind)
    cfg = small_config(tmp_path, model__peft={**LORA, **peft}, **keys)
    facts = read_lm(cfg.model)
    assert (reason or "nothing") in (why_merged(cfg, facts.config) or "nothing")
    words = server_command(cfg, facts, "python", "http://h")
    assert ("--hf-overrides" in words) == (reason is not None)
    assert ("--max-lora-rank 8" in shell_line(words)) == (reason is None)
    assert ("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in shell_line(words)) == (reason is None)


def test_a_quantized_policy_is_sampled_from_its_base_as_it_was(tmp_path):
    """Weights of 16 steps, in place of bitsandbytes', which may not be installed: the gap is
    corrected for, and too large for a policy that isn't quantized."""
    save_lm(tmp_path / "lm", "llama", gain=2.0)
    with one_server(tmp_path, engine=engine_of(tmp_path, model__peft=LORA), model__peft=LORA,
                    ppo__importance__level="token") as (session, _):
        with torch.no_grad():
            for name, weight in session.policy.lm.named_parameters():
                if "base_layer" in name:
                    step = weight.abs().amax(1, keepdim=True) / 8
                    weight.copy_((weight / step).round() * step)
        with refused(SamplerError, "says other tokens"):
            drawn(session)
        session.cfg.model.quantization = "4bit"
        rollout = rollout_of(session)
        assert float(rollout.gap.abs().mean()) > 0.01
    save_lm(tmp_path / "gpt2")
    cfg = small_config(tmp_path, model__path=str(tmp_path / "gpt2"), model__peft=LORA,
                       model__quantization="4bit")
    with refused(ConfigError, "GPT2LMHeadModel takes no LoRA", "rollout.engine=decode"):
        server_command(cfg, read_lm(cfg.model), "python", "http://h")
    with refused(ConfigError, "ppo.importance.level, model.quantization"):
        checked("+recipe=quickstart", "rollout.engine=vllm", "rollout.urls=[http://h]",
                "model.peft.type=lora", "model.quantization=4bit", "ppo.importance.level=none")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_servers_sleep_while_the_policy_trains(kind, tmp_path, caplog):
    """Weights are dropped where they are sent, and kept where only an adapter is."""
    save_lm(tmp_path / "lm", kind)
    keys = {"model__peft": LORA, "rollout__sleep": True}
    engine = engine_of(tmp_path, **keys)
    assert engine.name.endswith("-sleeps")
    with one_server(tmp_path, engine=engine, **keys) as (session, _):
        for _ in range(2):
            assert_same(drawn(session, do_sample=False), ours(session, do_sample=False))
            assert engine.asleep == {"weights", "kv_cache"}
            assert engine.empty == (kind == "gpt2")
            drawn(session)  # the same weights
            move_adapter(session)
    assert [record.message for record in caplog.records if "sleep" in record.message] == [
        "rollout.sleep does nothing here: vLLM on a CPU says that it sleeps, and keeps its memory."]
    keys["hardware__device"] = "cuda"
    cfg = small_config(tmp_path, **keys)
    assert "--enable-sleep-mode" in server_command(cfg, read_lm(cfg.model), "python", "http://h")


def test_a_rollout_keeps_the_servers_logprobs_beside_our_own(tmp_path, monkeypatch):
    """A seed for each row repeats it, only changed weights are sent, and with them the token that
    is kept nowhere."""
    monkeypatch.setenv("VLLM_TOKEN", "hush-hush")
    with one_server(tmp_path, generation__temperature=0.7, rollout__token_env="VLLM_TOKEN") as (
            session, engine):
        for parameter in session.policy.value_head.parameters():
            torch.nn.init.normal_(parameter)
        found = rollout_of(session)
        assert found.gap is not None
        assert 0 < float(found.gap.abs().max()) < 1e-4
        assert bool(found.values[found.response_mask].all())
        assert rollout_of(session).responses == found.responses
        seeds = {body["sampling_params"]["seed"] for body in engine.bodies
                 if "seed" in body.get("sampling_params", {})}
        assert len(seeds) == len(found)
        assert engine.asked["/update_weight_version"] == 1
        disturb(session)
        drawn(session)
        assert engine.asked["/update_weight_version"] == 2
        assert {headers["Authorization"] for headers in engine.headers} == {"Bearer hush-hush"}
        assert "hush-hush" not in repr(session.cfg)


def test_a_server_with_shared_output_embeddings_is_found_out(tmp_path):
    with one_server(tmp_path, engine=engine_of(tmp_path, tied=True)) as (session, _):
        disturb(session)
        with refused(SamplerError, "says other tokens", "vllm-command"):
            drawn(session)


def response(**over: Any) -> dict[str, Any]:
    return {"choices": [{"token_ids": [5], "finish_reason": "stop", "logprobs": {"content": [
        {"token_id": 5, "logprob": -1.0}]}, "weight_versions": [{"version": "x"}], **over}]}


@pytest.mark.parametrize(("status", "reply", "words"), [
    (200, response(finish_reason="abort"), ["broke a response off (abort)"]),
    (200, response(logprobs=None), ["no response with logprobs"]),
    (200, response(token_ids=[6]), ["can't have sampled"]),
    (200, response(logprobs={"content": [{"token_id": 5, "logprob": math.nan}]}),
     ["can't have sampled"]),
    (200, b"x" * 2**21, ["answered 200: 'xxx"]), (200, b"[" * 10**5, ["no JSON"]),
    (400, {"error": {"message": "too long by 3"}}, ["'too long by 3'"]),
    (401, {"error": {"message": None}}, ["answered 401", "rollout.token_env"]),
    (404, {"detail": "Not Found"}, ["404", "vLLM 0.32"])])
def test_a_server_that_is_not_right_is_one_clear_error(status, reply, words):
    with answering(status, reply) as (server, _), refused(SamplerError, "rollout.urls", *words):
        server.generate([4], {"max_tokens": 8})


def test_a_server_of_another_model_and_one_that_is_too_slow_are_named():
    with answering(200, {"data": [{"id": "other", "max_model_len": 64}]}) as (server, _), refused(
            SamplerError, "serves other (up to 64 tokens)", "this run's is mine", "vllm-command"):
        server.check("mine", 64)
    with answering(200, {"success": False}) as (server, _), refused(
            SamplerError, "forget its prefix cache"):
        server.load(lambda: None, "x")
    with answering(200, response(), 1.0) as (server, _), refused(
            SamplerError, "did not answer within 0.5 s"):
        server.generate([4], {"max_tokens": 8})


def test_weights_of_another_run_are_found_out(tmp_path):
    def spoil(path, number, body):
        if path == GENERATE and number > 1:
            return 200, response(weight_versions=[{"version": "x"}, {"version": "y"}])
        return None

    with one_server(tmp_path, spoil) as (session, _), refused(
            SamplerError, "weights x and y instead of", "another run uses it"):
        drawn(session)


def test_two_servers_share_the_rows(tmp_path):
    engines = engine_of(tmp_path), engine_of(tmp_path)
    with (serving(engines[0]) as one, serving(engines[1]) as other,
          session_of(config(tmp_path, one, other, rollout__concurrency=1)) as session):
        assert_same(drawn(session, do_sample=False), ours(session, do_sample=False))
        assert all(engine.asked[GENERATE] > 1 for engine in engines)
        disturb(session)
        drawn(session)
        assert engines[1].version == engines[0].version


def test_an_address_with_a_password_is_refused_and_not_shown():
    with refused(ConfigError, "rollout.token_env") as caught:
        checked("+recipe=quickstart", "rollout.engine=vllm", "rollout.urls=[http://me:pass@host]")
    assert "pass@" not in str(caught.value)


def test_encoder_decoders_are_refused(tmp_path):
    save_lm(tmp_path / "lm", "t5")
    with serving(engine_of(tmp_path)) as url:
        refused_session(config(tmp_path, url), ConfigError, "encoder-decoder")


def test_turns_of_episodes_are_the_servers(tmp_path):
    keys = {"env__fn": "played:Words", "env__max_tokens": 40, "env__max_turns": 3,
            "generation__max_new_tokens": 5, "ppo__num_rollouts": 8, "generation__do_sample": False}
    with session_of(small_config(tmp_path, **keys)) as session:
        wanted = rollout_of(session)
    with one_server(tmp_path, **keys) as (session, engine):
        found = rollout_of(session)
        assert found.responses == wanted.responses
        torch.testing.assert_close(found.logprobs, wanted.logprobs, atol=1e-4, rtol=0)
        assert float(found.gap.abs().max()) < 1e-4
        assert engine.asked[GENERATE] > 2 * len(found)


@pytest.mark.parametrize("env", ["Words", "Slow"])
def test_episodes_are_played_one_step_ahead(env, tmp_path):
    """With the weights from before, as the other loop plays them; an evaluation waits for them, and
    a run that goes on begins anew with the weights that it has."""
    keys = {"env__fn": f"played:{env}", "env__max_tokens": 40, "env__max_turns": 3,
            "generation__max_new_tokens": 5, "ppo__num_rollouts": 8, "ppo__num_steps": 3,
            "generation__do_sample": False}
    with session_of(small_config(tmp_path, **keys)) as session:
        wanted = [rollout_of(session, start) for start in (0, 8)]
    with one_server(tmp_path, rollout__ahead=1, **keys) as (session, engine):
        task = PPOTask(session)
        state = initial_state(task)
        first = task.collect(state, idle_context())
        disturb(session)
        versions = engine.asked["/update_weight_version"]
        task.evaluate(idle_context())
        assert engine.asked["/update_weight_version"] == versions + 1
        state = replace(state, step=1, episodes=8)
        second = task.collect(state, idle_context())
        for found, rollout in zip((first, second), wanted, strict=True):
            assert found.responses == rollout.responses
            assert found.extras.dense.tolist() == rollout.extras.dense.tolist()
        assert float(first.gap.abs().max()) < 1e-4
        assert float(second.gap.abs().mean()) > 0.01
        resumed = PPOTask(session).collect(state, idle_context())
        assert float(resumed.gap.abs().max()) < 1e-4
        assert [one.opening for one in resumed.extras.episodes] == [
            one.opening for one in second.extras.episodes]


def test_an_environment_that_fails_ahead_stops_the_run(tmp_path):
    keys = {"env__fn": "played:Failing", "env__max_tokens": 40, "generation__max_new_tokens": 5,
            "ppo__num_rollouts": 8}
    with one_server(tmp_path, rollout__ahead=1, **keys) as (session, _), refused(
            RewardError, "the door is locked"):
        task = PPOTask(session)
        task.collect(initial_state(task), idle_context())
