"""Episodes of several turns: how they are played and kept, and what PPO makes of them."""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from helpers import make_lm, save_lm
from sessions import (
    assert_same_responses,
    fresh_state,
    gradients,
    record_on_cpu,
    rolled,
    rollout_of,
    session_of,
    small_config,
)
from test_ppo_advantages import naive_gae

from ppocli.models.kernels import use_kernels
from ppocli.ppo.experience import PPOState
from ppocli.ppo.policy_samples import sample_policy
from ppocli.ppo.step import to_experience
from ppocli.ppo.step_metrics import episode_figures, rollout_samples
from ppocli.runs.episode import turn_numbers
from ppocli.sampling.conversation import KeptKeys
from ppocli.sampling.decode_state import Decoder
from ppocli.sampling.sampler import decoded_turns
from ppocli.sampling.samples import EVALUATION, ROLLOUT, SamplingSpec

PLAYS = {"env__fn": "played:Words", "env__max_tokens": 40, "env__max_turns": 3,
         "generation__max_new_tokens": 5}


def config(folder, **over):
    return small_config(folder, **{**PLAYS, **over})


def own_passes(lm, rollout, row):
    """Logits of transformers' pass over an episode's own tokens in float64 at its actions, and the
    ids there."""
    sequences = rollout.sequences
    ids = sequences.tokens[row, :int(sequences.lengths[row])]
    places = sequences.actions[row][sequences.mask[row]]
    return lm(input_ids=ids[None]).logits[0].double()[places - 1], ids[places]


def test_an_episode_is_context_and_what_was_said_in_turn(tmp_path):
    """Action ranges as ``OpenRLHF/OpenRLHF:openrlhf/utils/agent.py@04655bc`` notes them: from the
    end of all that was there to the end of the turn; feedback is encoded once and appended."""
    with session_of(config(tmp_path, env__fn="played:Slow"), None) as session:
        rollout = rollout_of(session)
        tokenizer, lm = session.tokenizer, session.policy.lm.eval()
        ended = {one.ended for one in rollout.extras.episodes}
        assert {"done", "turns"} <= ended
        for row, episode in enumerate(rollout.extras.episodes):
            prompt = rollout.prompts.tokens[row][rollout.prompts.mask[row]].tolist()
            ids = [*prompt, *tokenizer(episode.opening)["input_ids"]]
            taken = 0
            for turn in episode.turns:
                start = len(ids)
                said = rollout.response_tokens[row][taken:taken + turn.tokens].tolist()
                assert rollout.sequences.actions[row][taken:taken + turn.tokens].tolist() == list(
                    range(start, start + turn.tokens))
                ids += [*said, *tokenizer(turn.observation)["input_ids"]]
                taken += turn.tokens
                assert turn.tokens <= 5
            length = int(rollout.sequences.lengths[row])
            assert rollout.sequences.tokens[row, :length].tolist() == ids[:length]
            assert taken == int(rollout.response_mask[row].sum())
            assert rollout.responses[row] == episode.transcript
            assert rollout.scores[row] == pytest.approx(episode.score)
            with torch.no_grad():
                logits, chosen = own_passes(lm, rollout, row)
            wanted = torch.log_softmax(logits, -1).gather(-1, chosen[:, None])[:, 0]
            for found in (rollout.logprobs, rollout.ref_logprobs):
                torch.testing.assert_close(found[row, :taken].double(), wanted, rtol=0, atol=2e-5)


def test_episodes_depend_on_nothing_but_seed_and_number(tmp_path):
    wanted = rolled(config(tmp_path), None)
    with session_of(config(tmp_path, ppo__chunk_size=3), None) as session:
        found = rollout_of(session)
        later = rollout_of(session, start=5, count=4)
    assert found.extras.episodes == wanted.extras.episodes
    assert later.extras.episodes == wanted.extras.episodes[5:9]
    torch.testing.assert_close(found.logprobs, wanted.logprobs, rtol=0, atol=1e-5)


def test_a_group_plays_one_game_and_differs_in_what_follows(tmp_path):
    cfg = config(tmp_path, env__fn="played:Reports", env__max_turns=1, ppo__n=4,
                 ppo__advantage="grpo", ppo__init_kl_coef=0.0)
    with session_of(cfg, None) as session:
        rollout = rollout_of(session)
        later = rollout_of(session, start=6, count=4)  # as on a rank, or behind what was left out
        evaluated = torch.cat([torch.tensor([one.score for one in part.episodes]) for part in (
            sample_policy(session, session.context(), session.policy, rollout.prompts,
                          session.eval_sampling, EVALUATION))])
        experience = to_experience(rollout, fresh_state(session), cfg)
    numbers = [int(np.random.default_rng([cfg.seed, ROLLOUT, group, 0]).integers(10**6))
               for group in range(4)]
    assert rollout.scores == [numbers[i // 4] for i in range(16)]
    assert later.scores == rollout.scores[6:10]
    assert len({one.turns[0].observation for one in rollout.extras.episodes}) == 16
    assert len(set(rollout.responses)) == 16
    assert not experience.advantages.any(), "what a group is compared by is the same game"
    assert len(set(evaluated.tolist())) == 16, "prompts.eval.repeat plays as many games"


def test_limits_of_turns_and_tokens_hold(tmp_path):
    cfg = config(tmp_path, env__max_tokens=12, env__max_turns=9)
    rollout = rolled(cfg, None)
    prompts = rollout.prompts.mask.sum(1)
    assert int((rollout.sequences.lengths - prompts).max()) <= 12
    assert "tokens" in {one.ended for one in rollout.extras.episodes}
    # what nobody read is no observation
    assert all(one.turns[-1].observation_tokens == 0 for one in rollout.extras.episodes)
    assert not any(rollout.finished[i] for i, one in enumerate(rollout.extras.episodes)
                   if one.ended != "done")
    figures = episode_figures(rollout.extras.episodes)
    cut = [one.ended for one in rollout.extras.episodes].count("tokens")
    assert figures["env/truncated_share"] == pytest.approx(cut / 16)
    assert figures["env/turns_mean"] == pytest.approx(
        sum(len(one.turns) for one in rollout.extras.episodes) / 16)
    rows = rollout_samples(rollout, 1, cfg)
    assert [row["turns"][0]["response"] for row in rows] == [
        one.turns[0].response for one in rollout.extras.episodes]


def test_episodes_whose_environment_fails(tmp_path):
    rollout = rolled(config(tmp_path, env__fn="played:Failing", env__on_error="drop",
                            reward__on_invalid="skip"), None)
    failed = [one.ended == "error" for one in rollout.extras.episodes]
    assert 2 < sum(failed) < 14
    assert all(("the door is locked" in str(one.error)) == bad
               and len(one.turns) == (2 if bad else 3)
               for one, bad in zip(rollout.extras.episodes, failed, strict=True))
    assert rollout.valid.tolist() == [not bad for bad in failed]
    assert episode_figures(rollout.extras.episodes)["env/errors"] == sum(failed)


def test_a_reward_function_scores_the_whole_transcript_beside(tmp_path):
    rollout = rolled(config(tmp_path),
                     lambda responses, **_: [float(len(text)) for text in responses])
    for row, episode in enumerate(rollout.extras.episodes):
        assert rollout.scores[row] == pytest.approx(episode.score + len(episode.transcript))
        count = int(rollout.response_mask[row].sum())
        wanted = episode.token_rewards
        wanted[-1] += len(episode.transcript)
        assert rollout.extras.dense[row, :count].tolist() == pytest.approx(wanted)
    assert set(rollout.parts) == {"env", "<lambda>"} or len(rollout.parts) == 2


@pytest.mark.parametrize(("kind", "graphs"), [
    ("gpt2", False), ("gpt2", True), ("qwen3", False), ("llama", True)])
def test_keys_that_are_kept_over_turns_give_what_reading_anew_gives(kind, graphs, monkeypatch):
    """Rows whose turns end at different times, that are fed nothing, little or much, and that stop
    speaking; tokens and logprobs of three turns."""
    work, limits = record_on_cpu(monkeypatch) if graphs else [], [1, 6, 2, 3, 6]
    lm = make_lm(kind).eval()
    use_kernels(lm)
    spec = SamplingSpec(max_new_tokens=6, stop_ids=(1, 5, 6))
    contexts = [[3, 4, 5], [7], [8, 9], [4, 4, 4, 4], [5]]
    noise = np.random.default_rng(5).uniform(0.01, 0.99, (5, 30))
    head = torch.randn(lm.get_output_embeddings().weight.shape[1],
                       generator=torch.Generator().manual_seed(0))
    decoder = Decoder(lm, spec, value_head=lambda hidden: hidden @ head, records=graphs)
    one = decoded_turns(decoder, noise, nullcontext)
    other = KeptKeys(decoder, contexts, noise, nullcontext).speak
    for rows, fed in (([0, 1, 2, 3, 4], [[], [3], [4, 5, 6], [], []]),
                      ([0, 1, 3, 4], [[7, 7, 7, 7], [], [3], []]), ([1, 3], [[9], [8, 3, 4]])):
        for row, ids in zip(rows, fed, strict=True):
            contexts[row] += ids
        wanted, found = (talk(rows, [contexts[row] for row in rows], [limits[row] for row in rows])
                         for talk in (one, other))
        for row, ids in zip(rows, wanted.ids, strict=True):
            contexts[row] += ids
        assert_same_responses(found, wanted)
    assert bool(work) == graphs


@pytest.mark.parametrize("keys", [
    {"kind": "mistral"}, {"kind": "mpt"},
    {"generation__stop_sequences": ["film"], "generation__min_new_tokens": 2},
    {"generation__repetition_penalty": 1.3, "model__num_layers_unfrozen": 1}])
def test_decoded_logprobs_of_episodes_are_those_of_a_pass(tmp_path, keys):
    found, keys = [], dict(keys)
    save_lm(tmp_path / "lm", keys.pop("kind", "gpt2"))
    for way in ("decode", "forward"):
        with session_of(config(tmp_path, **keys, ppo__logprobs_from=way), None) as session:
            found.append(rollout_of(session))
            assert session.from_decode == (way == "decode")
    assert found[0].extras.episodes == found[1].extras.episodes
    assert any(len(one.turns) > 1 for one in found[0].extras.episodes)
    for name in ("logprobs", "values"):
        torch.testing.assert_close(getattr(found[0], name), getattr(found[1], name), rtol=0,
                                   atol=2e-5)


# Advantages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["token", "turn"])
def test_a_whole_step_of_episodes_against_a_naive_float64_version(tmp_path, unit):
    """Rewards, KL, GAE over the actions alone and the first update's gradient, each episode by
    itself, by transformers' own passes in float64."""
    cfg = config(tmp_path, ppo__gae_unit=unit, ppo__lam=0.9, ppo__gamma=0.98, ppo__vf_coef=0.5,
                 ppo__whiten_advantages=False, ppo__init_kl_coef=0.1)
    with session_of(cfg, None) as session:
        rollout = rollout_of(session)
        experience = to_experience(rollout, PPOState(0.1, 0.1), cfg)
        found, _ = gradients(session, experience)
        policy = copy.deepcopy(session.policy)
        policy.lm.double()
    loss, count = torch.zeros((), dtype=torch.float64), int(rollout.response_mask.sum())
    for i, episode in enumerate(rollout.extras.episodes):
        sequences = rollout.sequences
        ids = sequences.tokens[i, :int(sequences.lengths[i])]
        places = sequences.actions[i][sequences.mask[i]]
        out = policy.lm(input_ids=ids[None], output_hidden_states=True)
        logprobs = torch.log_softmax(out.logits[0], -1)[places - 1].gather(
            -1, ids[places][:, None])[:, 0]
        values = policy.value_head(out.hidden_states[-1][0])[places - 1].double()
        old = values.detach()
        rewards = torch.tensor(episode.token_rewards, dtype=torch.float64)  # the KL is 0 yet
        number = turn_numbers([episode], len(places))[0]
        if unit == "turn":
            firsts = [number.index(k) for k in range(len(episode.turns))]
            r = [float(rewards[[n == k for n in number]].sum()) for k in range(len(firsts))]
            v = [float(old[t]) for t in firsts]
        else:
            r, v, number = rewards.tolist(), old.tolist(), list(range(len(places)))
        own = naive_gae([r], [v], [len(r)], 0.98, 0.9)[0].tolist()
        for t, k in enumerate(number):
            assert float(experience.advantages[i, t]) == pytest.approx(own[k], abs=1e-5)
            assert float(experience.returns[i, t]) == pytest.approx(own[k] + v[k], abs=1e-5)
            loss = loss - own[k] * torch.exp(logprobs[t] - logprobs[t].detach())
            loss = loss + 0.5 * 0.5 * (values[t] - (own[k] + v[k])).square()
    (loss / count).backward()
    for name, parameter in policy.named_parameters():
        if name in found:
            torch.testing.assert_close(found[name].double(), parameter.grad.double(), rtol=1e-3,
                                       atol=2e-6)
