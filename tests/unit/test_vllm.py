"""Servers that sample, against a double of vLLM's routes (``vllm_double``); what vLLM itself does
is in ``tests/vllm/test_vllm_itself.py``."""

import json
import math
from typing import Any

import pytest
import torch
from helpers import checked, model_config, refused, save_lm
from safetensors.torch import save_file
from sessions import rollout_of, session_of, set_keys, small_config
from vllm_double import (
    assert_same,
    config,
    disturb,
    drawn,
    engine_of,
    one_server,
    ours,
    serving,
    slow,
)

from ppocli.errors import ConfigError, SamplerError
from ppocli.models.loading.model_config import ModelFacts
from ppocli.sampling.vllm.server_process import server_command

GENERATE = "/inference/v1/generate"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_greedy_samples_equal_ours_before_and_after_an_update(kind, tmp_path):
    save_lm(tmp_path / "lm", kind)
    with one_server(tmp_path) as (session, engine):
        for _ in range(2):
            assert_same(drawn(session, do_sample=False), ours(session, do_sample=False))
            disturb(session)
        assert_same(drawn(session, do_sample=False), ours(session, do_sample=False))
        assert engine.asked["/pause"] == 3


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


@pytest.mark.parametrize(("spec", "keys"), [
    ({"stop_ids": (7, 9, 11)}, {}), ({"stop_ids": (7, 9, 11), "min_new_tokens": 4}, {}),
    ({"stop_sequences": ("good", "film")}, {}), ({"length_range": (2, 5)}, {}),
    ({}, {"model__peft": {"type": "lora", "r": 4, "lora_alpha": 8}})])
def test_stop_rules_and_limits_are_ours_and_lora_is_merged_into_what_is_sent(spec, keys, tmp_path):
    with one_server(tmp_path, **keys) as (session, _):
        disturb(session)
        assert_same(drawn(session, do_sample=False, **spec), ours(session, do_sample=False, **spec))


def test_a_seed_for_each_row_repeats_it_and_only_changed_weights_are_sent(tmp_path):
    with one_server(tmp_path) as (session, engine):
        one, other = drawn(session), drawn(session)
        assert one.action_ids == other.action_ids
        seeds = {body["sampling_params"]["seed"] for body in engine.bodies
                 if "seed" in body.get("sampling_params", {})}
        assert len(seeds) == 6
        assert engine.asked["/update_weight_version"] == 1
        disturb(session)
        drawn(session)
        assert engine.asked["/update_weight_version"] == 2


def test_a_rollout_keeps_the_servers_logprobs_beside_our_own(tmp_path):
    with one_server(tmp_path, generation__temperature=0.7) as (session, _):
        for parameter in session.policy.value_head.parameters():
            torch.nn.init.normal_(parameter)
        found = rollout_of(session)
        assert found.gap is not None
        assert 0 < float(found.gap.abs().max()) < 1e-4
        assert bool(found.values[found.response_mask].all())


def test_a_server_with_shared_output_embeddings_is_found_out(tmp_path):
    with one_server(tmp_path, engine=engine_of(tmp_path, tied=True)) as (session, _):
        disturb(session)
        with refused(SamplerError, "says other tokens", "vllm-command"):
            drawn(session)


def spoilt(route: str, status: int, said: Any, start: int = 1) -> Any:
    return lambda path, number, body: (status, said) if path == route and number >= start else None


def said(**over: Any) -> dict[str, Any]:
    return {"choices": [{"token_ids": [5], "finish_reason": "stop", "logprobs": {"content": [
        {"token_id": 5, "logprob": -1.0}]}, "weight_versions": [{"version": "x"}], **over}]}


def token(one: int = 5, logprob: float = -1.0) -> dict[str, Any]:
    return {"token_ids": [one],
            "logprobs": {"content": [{"token_id": one, "logprob": logprob}]}}


@pytest.mark.parametrize(("spoil", "words"), [
    (spoilt("/v1/models", 200, {"data": [{"id": "other", "max_model_len": 64}]}),
     ["serves other (up to 64 tokens)", "this run's is ppocli-gpt2-float32-", "vllm-command"]),
    (spoilt("/v1/models", 200, {"data": ["x"]}), ["serves no model"]),
    (spoilt("/v1/models", 401, {"error": {"message": "Unauthorized"}}),
     ["answered 401: 'Unauthorized'", "rollout.token_env"]),
    (spoilt("/v1/models", 200, b"[" * 10**5), ["no JSON"]),
    (spoilt("/collective_rpc", 404, {"detail": "Not Found"}), ["404", "vLLM 0.32"]),
    (spoilt(GENERATE, 400, {"error": {"message": "too long by 3"}}, 2), ["'too long by 3'"]),
    (spoilt(GENERATE, 200, said(finish_reason="abort"), 2), ["broke a response off (abort)"]),
    (spoilt(GENERATE, 200, said(logprobs=None), 2), ["no response with logprobs"]),
    (spoilt(GENERATE, 200, said(token_ids=[6]), 2), ["can't have sampled"]),
    (spoilt(GENERATE, 200, b"x" * 2**21, 2), ["answered 200: 'xxx"]),
    (spoilt(GENERATE, 200, said(**token(logprob=math.nan)), 2), ["can't have sampled"]),
    (spoilt(GENERATE, 200, said(**token(10**6))), ["can't have sampled"]),
    (spoilt(GENERATE, 500, {"error": {"message": None}}, 2), ["answered 500"]),
    (spoilt(GENERATE, 200, said(weight_versions=[{"version": "x"}, {"version": "y"}]), 2),
     ["weights x and y instead of", "another run uses it"]),
    (spoilt("/reset_prefix_cache", 200, {"success": False}), ["forget its prefix cache"]),
    (slow(30, "/v1/models"), ["did not answer within 0.5 s"])])
def test_a_server_that_is_not_right_is_one_clear_error(spoil, words, tmp_path, monkeypatch):
    monkeypatch.setattr("ppocli.sampling.vllm.server.LOOK", 0.5)
    with refused(SamplerError, "rollout.urls", *words), one_server(tmp_path, spoil) as (session, _):
        drawn(session)


def test_a_slow_server_ends_the_run_in_time(tmp_path):
    def spoil(path, number, body):
        return slow(30)(path, number, body) if number > 1 else None

    with (serving(engine_of(tmp_path), spoil) as url,
          session_of(set_keys(config(tmp_path, url), {"rollout.timeout": 1.0})) as session,
          refused(SamplerError, "did not answer within 1 s")):
        drawn(session)


def test_two_servers_share_the_rows(tmp_path):
    engines = engine_of(tmp_path), engine_of(tmp_path)
    with (serving(engines[0]) as one, serving(engines[1]) as other,
          session_of(config(tmp_path, one, other, rollout__concurrency=1)) as session):
        assert_same(drawn(session, 12, do_sample=False), ours(session, 12, do_sample=False))
        assert all(engine.asked[GENERATE] > 1 for engine in engines)
        disturb(session)
        drawn(session)
        assert engines[1].version == engines[0].version


def test_a_token_is_sent_and_not_kept(tmp_path, monkeypatch):
    with refused(SamplerError, "no variable VLLM_TOKEN", "rollout.token_env"), one_server(
            tmp_path, rollout__token_env="VLLM_TOKEN"):
        pass
    monkeypatch.setenv("VLLM_TOKEN", "hush-hush")
    with one_server(tmp_path, rollout__token_env="VLLM_TOKEN") as (session, engine):
        drawn(session)
        assert {headers["Authorization"] for headers in engine.headers} == {"Bearer hush-hush"}
        assert "hush-hush" not in repr(session.cfg)


def test_an_address_with_a_password_is_refused_and_not_shown():
    with refused(ConfigError, "rollout.token_env") as caught:
        checked("+recipe=quickstart", "rollout.engine=vllm", "rollout.urls=[http://me:pass@host]")
    assert "pass@" not in str(caught.value)


def test_encoder_decoders_are_refused(tmp_path):
    save_lm(tmp_path / "lm", "t5")
    with (refused(ConfigError, "encoder-decoder"), serving(engine_of(tmp_path)) as url,
          session_of(config(tmp_path, url))):
        pass


def test_turns_of_episodes_are_the_servers(tmp_path):
    keys = {"env__fn": "played:Words", "env__max_tokens": 40, "env__max_turns": 3,
            "generation__max_new_tokens": 5, "generation__do_sample": False}
    with session_of(small_config(tmp_path, **keys)) as session:
        wanted = rollout_of(session)
    with one_server(tmp_path, **keys) as (session, engine):
        found = rollout_of(session)
        assert found.responses == wanted.responses
        torch.testing.assert_close(found.logprobs, wanted.logprobs, atol=1e-4, rtol=0)
        assert float(found.gap.abs().max()) < 1e-4
        assert engine.asked[GENERATE] > 2 * len(found)
