"""Environments: what is asked of them, how their words join an episode, what PPO makes of it."""

import copy
import sys
import time
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import played
import pytest
import torch
from helpers import checked, make_lm, make_tokenizer, refused, save_lm
from sessions import gradients, rollout_of, session_of, set_keys, small_config

from ppocli.config.schema import EnvConfig
from ppocli.environments import adapters
from ppocli.environments.calls import Called, Calls, as_step
from ppocli.environments.resolve import resolve
from ppocli.environments.wording import ChatWords, PlainWords
from ppocli.episode import Episode, Step, Turn, turn_numbers
from ppocli.errors import ConfigError, InputError, RewardError
from ppocli.models.trunk import Decoding
from ppocli.ppo import advantages
from ppocli.ppo.noise import ROLLOUT
from ppocli.sampling.conversation import Rereading
from ppocli.sampling.decoder import Decoder
from ppocli.sampling.kept_turns import KeptKeys
from ppocli.sampling.token_choice import SamplingSpec
from ppocli.tasks.ppo.experience import to_experience
from ppocli.tasks.ppo.figures import episode_figures, rollout_samples
from ppocli.tasks.ppo.records import PPOState

PLAYS = {"env__fn": "played:Words", "env__max_tokens": 40, "env__max_turns": 3,
         "generation__max_new_tokens": 5}


def calls_of(name: str, **keys) -> Calls:
    cfg = set_keys(EnvConfig(fn=f"played:{name}"), keys)
    return Calls(resolve(cfg, ["label"]), cfg, seed=7)


def begun(calls: Calls, *episodes: int):
    return [one.environment for one in calls.answers(
        [Called(None, episode, 0, {"prompt": "the", "messages": None, "label": 1})
         for episode in episodes], ROLLOUT)]


def stepped(calls: Calls, environments, turn: int, response: str = "good"):
    return calls.answers([Called(one, episode, turn, {"response": response})
                          for episode, one in enumerate(environments)], ROLLOUT)


# Calls --------------------------------------------------------------------------------------------

def test_random_numbers_are_those_of_seed_stream_episode_and_turn():
    calls = calls_of("Words")
    first, second = begun(calls, 0, 1), begun(calls, 0, 1)
    assert [one.last for one in first] == [one.last for one in second] == [
        int(np.random.default_rng([7, ROLLOUT, episode, 0]).integers(1, 5)) for episode in (0, 1)]
    said = [one.told.observation for one in stepped(calls, first, 1)]
    assert said == [(None, " good", " a film was", " warm")[
        int(np.random.default_rng([7, ROLLOUT, episode, 1]).integers(4))] for episode in (0, 1)]


@pytest.mark.parametrize(("name", "keys"), [("Words", {"workers": 3}), ("Slow", {}),
                                            ("Words", {"timeout": 20.0})])
def test_calls_in_threads_and_awaited_ones_answer_the_same(name, keys):
    plain, other = calls_of("Words"), calls_of(name, **keys)
    wanted, got = begun(plain, *range(9)), begun(other, *range(9))
    for turn in (1, 2):
        assert [one.told for one in stepped(plain, wanted, turn)] == [
            one.told for one in stepped(other, got, turn)]


def test_awaited_calls_wait_together():
    calls = calls_of("Slow")
    games = begun(calls, *range(50))
    start = time.monotonic()
    stepped(calls, games, 1)
    assert time.monotonic() - start < 0.4  # one after another: half a second


@pytest.mark.parametrize(("name", "keys", "said"), [
    ("Failing", {}, "ValueError: the door is locked"),
    ("Failing", {"workers": 4}, "ValueError: the door is locked"),
    ("Hanging", {"timeout": 0.2}, "still running after 0.2 s (env.timeout)"),
    ("Garbage", {}, "'higher'\", not a Step or (observation, reward, done)"),
    ("NoNumber", {}, "the reward is nan, which is no finite number")])
def test_what_goes_wrong_names_episode_turn_file_and_line(name, keys, said):
    calls = calls_of(name, **keys)
    games = begun(calls, *range(6))
    stepped(calls, games, 1)
    with pytest.raises(RewardError) as caught:
        stepped(calls, games, 2, "an answer")
    assert said in str(caught.value)
    first = next(i for i, one in enumerate(games) if one.fails)
    assert f"step, turn 2, of episode {first}" in str(caught.value)
    assert "'an answer'" in str(caught.value)
    if name == "Failing":
        assert "played.py:" in caught.value.where


def test_an_awaited_call_past_its_limit_is_one_episode_s_and_not_tried_again():
    played.Waiting.calls = 0
    calls = calls_of("Waiting", timeout=0.1, retries=3, on_error="truncate")
    found = stepped(calls, begun(calls, *range(3)), 1)
    assert played.Waiting.calls == 3
    assert all(f"step, turn 1, of episode {i}" in str(one.error) and
               "still running after 0.1 s (env.timeout)" in str(one.error)
               for i, one in enumerate(found))


def test_an_async_step_that_blocks_is_told():
    calls = calls_of("Blocking", timeout=0.1, on_error="truncate")
    games = begun(calls, *range(3))
    with pytest.raises(RewardError, match="is async and awaits nothing: 3 calls are still"):
        stepped(calls, games, 1)


def test_a_call_that_raised_is_tried_again():
    played.Counter.calls = 0
    calls = calls_of("Counter", retries=2)
    assert stepped(calls, begun(calls, 0), 1)[0].told == Step(None, 1.0, True)
    played.Counter.calls = 0
    with pytest.raises(RewardError, match="OSError: busy"):
        stepped(calls_of("Counter", retries=1), begun(calls, 0), 1)


@pytest.mark.parametrize(("given", "wanted"), [
    (Step("a", 1, True), Step("a", 1.0, True)), (("a", True, False), Step("a", 1.0, False)),
    (["", 0, 0], Step(None, 0.0, False)),
    (([{"role": "tool", "content": "x"}], torch.tensor(2.0), np.bool_(True)),
     Step([{"role": "tool", "content": "x"}], 2.0, True))])
def test_what_a_step_may_be(given, wanted):
    assert as_step(given) == wanted


@pytest.mark.parametrize("given", [None, "text", ("a", "b", False), (3, 1.0, False),
                                   ("a", float("inf"), False), ([{"role": "tool"}], 0.0, False)])
def test_what_it_may_not_be(given):
    with pytest.raises((TypeError, ValueError)):
        as_step(given)


@pytest.mark.parametrize(("name", "keys", "said"), [
    ("Needy", {}, "reset asks for 'secret', which nothing provides"),
    ("Mute", {}, "has no method step"), ("add", {}, "is no class"),
    ("Words", {"kwargs": {"less": 1}}, "can't be made with env.kwargs={'less': 1}"),
    ("Wirds", {}, "Did you mean 'Words'?")])
def test_what_cannot_be_played_is_said_before_a_model_loads(name, keys, said):
    with pytest.raises(RewardError) as caught:
        calls_of(name, **keys)
    assert said in str(caught.value)


@pytest.mark.parametrize(("words", "said"), [
    (["env.max_turns=3"], "this belongs to env.fn"),
    (["env.fn=played:Words", "env.tools=[played:add]"], "these are played by env.fn=tools"),
    (["env.fn=tools"], "there are none: env.tools="),
    (["env.fn=tools", "env.tools=[played:add]"], "tools give no reward"),
    (["env.fn=played:Words", "env.on_error=drop"], "set reward.on_invalid=skip"),
    (["env.fn=played:Words", "ppo.staleness=1"], "samples that wait keep no episodes"),
    (["env.fn=played:Words", "env.max_tokens=8"], "doesn't fit an episode of 8"),
    (["reward.fn=length", "ppo.gae_unit=turn"], "only an environment")])
def test_contradictions_are_refused(words, said):
    with refused(ConfigError, said):
        checked("model.path=builtin:reviews", "prompts.path=builtin:reviews", "ppo.num_steps=1",
                *words)


def test_an_environment_needs_no_reward_function():
    cfg = checked("model.path=builtin:reviews", "prompts.path=builtin:reviews", "ppo.num_steps=1",
                  "env.fn=played:Words").config
    assert cfg.reward.fn is None


# Words --------------------------------------------------------------------------------------------

TEMPLATE = ("{% for m in messages %}<im>{{ m.role }} {{ m.content }}<eos> {% endfor %}"
            "{% if add_generation_prompt %}<im>assistant {% endif %}")
FORGETS = ("{% for m in messages %}<im>{{ m.role }} {% if m.role == 'user' or loop.last %}"
           "{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}<eos> "
           "{% endfor %}{% if add_generation_prompt %}<im>assistant {% endif %}")


def chat_tokenizer(template: str = TEMPLATE):
    """Of characters, so that any text can be read back."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *letters])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>",
                                   unk_token="<unk>", chat_template=template)


@pytest.mark.parametrize("ended", [True, False])
def test_a_chat_goes_on_as_the_template_would_have_rendered_it(ended):
    """Whether the policy closed its message itself, or was cut off and the template closes it."""
    tokenizer = chat_tokenizer()
    words = ChatWords(tokenizer)
    asked = [{"role": "user", "content": "hello"}]
    prompt = tokenizer(tokenizer.apply_chat_template(asked, tokenize=False,
                                                     add_generation_prompt=True))["input_ids"]
    ids, opening = words.opening(prompt, asked, " there")
    said = tokenizer("an answer" + "<eos>" * ended)["input_ids"]
    more = words.between("go on", ended=ended, last=said[-1])
    wanted = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "an answer"},
         {"role": "user", "content": "go on"}], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids + said + more.ids) == wanted
    assert opening.ids == []
    assert (opening.text, more.text) == (" there", "\n[user] go on\n")


def test_a_template_that_rewrites_history_is_refused():
    with pytest.raises(InputError, match="rewrites what was said before"):
        ChatWords(chat_tokenizer(FORGETS))


def test_messages_need_a_chat_template():
    with pytest.raises(RewardError, match="without a chat template it must be text"):
        PlainWords(make_tokenizer()).between([{"role": "user", "content": "a"}])


# Other libraries' ---------------------------------------------------------------------------------

@pytest.mark.parametrize(("response", "wanted"), [
    ("no call", []),
    ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
     [("add", {"a": 1, "b": 2})]),
    ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call> and '
     '<tool_call>{"name": "x"}', [("add", {"a": 1}), ("x", {})]),
    ('<tool_call>{"name": 3}</tool_call>', ["arguments must be a JSON object"]),
    ("<tool_call>[1</tool_call>", ["the call is no JSON object with a name: "])])
def test_tool_calls_are_read(response, wanted):
    found = adapters.called(response)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one == other or (isinstance(one, str) and one.startswith(other))


def test_errors_of_a_tool_are_observations():
    play = adapters.ToolPlay([played.add, played.fail])
    assert play.step("done").done
    step = play.step('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>')
    assert step == Step([{"role": "tool", "name": "add", "content": "3"}])
    for call, said in (('{"name": "fail", "arguments": {"a": 1}}', "RuntimeError: out of order"),
                       ('{"name": "sub"}', "there is no tool 'sub'; there are add, fail"),
                       ('{"name": "add", "arguments": {"a": 1}}', "missing"), ("{", "no JSON")):
        step = play.step(f"<tool_call>{call}</tool_call>")
        assert said in step.failed
        assert step.observation[0]["content"] == step.failed
        assert not step.done


def test_an_environment_of_trl_s_runs_unchanged():
    cfg = EnvConfig(fn="played:Lookup", adapter="trl")
    what = resolve(cfg, ["label"])
    assert [tool.__name__ for tool in what.tools] == ["look"]
    calls = Calls(what, cfg, seed=0)
    one, = calls.answers([Called(None, 0, 0, {"prompt": "p", "messages": None, "label": 3})], 1)
    assert one.told == " What is the film?"
    call = '<tool_call>{"name": "look", "arguments": {"name": "it"}}</tool_call>'
    told = stepped(calls, [one.environment], 1, call)[0].told
    assert told.observation == [{"role": "tool", "name": "look", "content": "it is good"}]
    assert stepped(calls, [one.environment], 2, "so it is")[0].told.done
    assert one.environment.own.found == 1


def test_an_agent_s_file_is_read_without_openrlhf(tmp_path, monkeypatch):
    (tmp_path / "agent.py").write_text(
        "from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor\n"
        "class AgentInstance(AgentInstanceBase):\n"
        "    def __init__(self):\n        pass\n"
        "    async def step(self, states, **kwargs):\n"
        "        return {'rewards': 1.0, 'environment_feedback': '', 'done': True}\n"
        "class AgentExecutor(MultiTurnAgentExecutor):\n"
        "    def __init__(self):\n        super().__init__(AgentInstance)\n")
    monkeypatch.chdir(tmp_path)
    cfg = EnvConfig(fn="agent.py:AgentInstance", adapter="openrlhf")
    calls = Calls(resolve(cfg, []), cfg, seed=0)
    one, = calls.answers([Called(None, 0, 0, {"prompt": "p", "messages": None})], 1)
    assert stepped(calls, [one.environment], 1)[0].told == Step(None, 1.0, True)
    assert "openrlhf" not in sys.modules


def test_an_agent_of_openrlhf_s_runs_unchanged():
    cfg = EnvConfig(fn="played:AgentInstance", adapter="openrlhf")
    calls = Calls(resolve(cfg, ["label"]), cfg, seed=0)
    one, = calls.answers([Called(None, 0, 0, {"prompt": "p", "messages": None, "label": 3})], 1)
    assert one.told is None
    assert stepped(calls, [one.environment], 1, "abc")[0].told == Step(" more", 3.0)
    assert stepped(calls, [one.environment], 2, "ab")[0].told == Step(" more", 2.0, True)


# Episodes -----------------------------------------------------------------------------------------

def own_passes(lm, rollout, row):
    """Logits of transformers' pass over an episode's own tokens in float64 at its actions, and the
    ids there."""
    sequences = rollout.sequences
    ids = sequences.tokens[row, :int(sequences.lengths[row])]
    places = sequences.actions[row][sequences.mask[row]]
    return lm(input_ids=ids[None]).logits[0].double()[places - 1], ids[places]


@pytest.mark.parametrize("name", ["Words", "Slow"])
def test_an_episode_is_context_and_what_was_said_in_turn(tmp_path, name):
    """Action ranges as ``OpenRLHF/OpenRLHF:openrlhf/utils/agent.py@04655bc`` notes them: from the
    end of all that was there to the end of the turn; feedback is encoded once and appended."""
    keys = {**PLAYS, "env__fn": f"played:{name}"}
    with session_of(small_config(tmp_path, **keys), None) as session:
        rollout = rollout_of(session)
        tokenizer, lm = session.tokenizer, session.policy.lm.eval()
        ended = {one.ended for one in rollout.episodes}
        assert {"done", "turns"} <= ended
        for row, episode in enumerate(rollout.episodes):
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


def test_awaited_and_plain_environments_give_the_same_episodes(tmp_path):
    found = []
    for name in ("Words", "Slow"):
        with session_of(small_config(tmp_path, **{**PLAYS, "env__fn": f"played:{name}"}),
                        None) as session:
            found.append(rollout_of(session))
    assert torch.equal(found[0].sequences.tokens, found[1].sequences.tokens)
    assert found[0].episodes == found[1].episodes


def test_one_half_speaks_while_the_environments_of_the_other_think(tmp_path, monkeypatch):
    events = []
    answers, speak = Calls.answers, KeptKeys.speak

    def asked(self, calls, stream):
        if calls and calls[0].turn:
            events.append("thinks")
            time.sleep(0.3)  # the other half speaks in less
            events.append("has thought")
        return answers(self, calls, stream)

    def spoken(self, *given):
        events.append(f"{len(given[0])} speak")
        return speak(self, *given)

    monkeypatch.setattr(Calls, "answers", asked)
    monkeypatch.setattr(KeptKeys, "speak", spoken)
    with session_of(small_config(tmp_path, **{**PLAYS, "env__fn": "played:Slow"}),
                    None) as session:
        events.clear()  # those of the rehearsal
        rollout_of(session)
    assert events[:4] == ["8 speak", "thinks", "8 speak", "thinks"]


@pytest.mark.parametrize("keys", [{"ppo__chunk_size": 3}, {"rollout__engine": "transformers"}])
def test_episodes_depend_on_nothing_but_seed_and_number(tmp_path, keys):
    with session_of(small_config(tmp_path, **PLAYS), None) as session:
        wanted = rollout_of(session)
    with session_of(small_config(tmp_path, **PLAYS, **keys), None) as session:
        found = rollout_of(session)
        later = rollout_of(session, start=5, count=4)
    assert found.episodes == wanted.episodes
    assert later.episodes == wanted.episodes[5:9]
    torch.testing.assert_close(found.logprobs, wanted.logprobs, rtol=0, atol=1e-5)


def test_limits_of_turns_and_tokens_hold(tmp_path):
    keys = {**PLAYS, "env__max_tokens": 12, "env__max_turns": 9}
    with session_of(small_config(tmp_path, **keys), None) as session:
        rollout = rollout_of(session)
    prompts = rollout.prompts.mask.sum(1)
    assert int((rollout.sequences.lengths - prompts).max()) <= 12
    assert "tokens" in {one.ended for one in rollout.episodes}
    assert not any(rollout.finished[i] for i, one in enumerate(rollout.episodes)
                   if one.ended != "done")
    figures = episode_figures(rollout.episodes)
    cut = [one.ended for one in rollout.episodes].count("tokens")
    assert figures["env/truncated_share"] == pytest.approx(cut / 16)
    assert figures["env/turns_mean"] == pytest.approx(
        sum(len(one.turns) for one in rollout.episodes) / 16)
    rows = rollout_samples(rollout, 1, session.cfg)
    assert [row["turns"][0]["response"] for row in rows] == [
        one.turns[0].response for one in rollout.episodes]


@pytest.mark.parametrize("on_error", ["truncate", "drop"])
def test_episodes_whose_environment_fails(tmp_path, on_error):
    keys = {**PLAYS, "env__fn": "played:Failing", "env__on_error": on_error,
            "reward__on_invalid": "skip"}
    with session_of(small_config(tmp_path, **keys), None) as session:
        rollout = rollout_of(session)
    failed = [one.ended == "error" for one in rollout.episodes]
    assert 2 < sum(failed) < 14
    assert all(("the door is locked" in str(one.error)) == bad
               and len(one.turns) == (2 if bad else 3)
               for one, bad in zip(rollout.episodes, failed, strict=True))
    assert rollout.valid.tolist() == ([True] * 16 if on_error == "truncate" else
                                      [not bad for bad in failed])
    assert episode_figures(rollout.episodes)["env/errors"] == sum(failed)


def test_a_reward_function_scores_the_whole_transcript_beside(tmp_path):
    with session_of(small_config(tmp_path, **PLAYS),
                    lambda responses, **_: [float(len(text)) for text in responses]) as session:
        rollout = rollout_of(session)
    for row, episode in enumerate(rollout.episodes):
        assert rollout.scores[row] == pytest.approx(episode.score + len(episode.transcript))
        count = int(rollout.response_mask[row].sum())
        wanted = episode.token_rewards
        wanted[-1] += len(episode.transcript)
        assert rollout.dense[row, :count].tolist() == pytest.approx(wanted)
    assert set(rollout.parts) == {"env", "<lambda>"} or len(rollout.parts) == 2


def test_trl_environments_reach_the_reward(tmp_path):
    tokenizer = chat_tokenizer()
    lm = save_lm(tmp_path / "lm", vocab_size=len(tokenizer), max_position_embeddings=512)
    tokenizer.save_pretrained(lm)
    keys = {**PLAYS, "env__fn": "played:Lookup", "env__adapter": "trl", "prompts__chat": True,
            "reward__fn": "played:found", "env__max_tokens": 40}
    with session_of(small_config(tmp_path, **keys), None) as session:
        rollout = rollout_of(session)
    assert rollout.scores == [0.0] * 16  # it calls nothing
    assert all(one.environment is None and len(one.turns) == 1 for one in rollout.episodes)
    shown = session.tokenizer.decode(rollout.sequences.tokens[0])
    assert "What is the film?<eos> <im>assistant" in shown.replace(" What", "What")


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3"])
@pytest.mark.parametrize("limits", [[4, 4, 4, 4, 4], [1, 6, 2, 3, 6]])
def test_keys_that_are_kept_over_turns_give_what_reading_anew_gives(kind, limits):
    """Rows whose turns end at different times, that are fed nothing, little or much, and that stop
    speaking; tokens and logprobs of three turns."""
    lm = make_lm(kind).eval()
    spec = SamplingSpec(max_new_tokens=6, stop_ids=(1, 5, 6))
    contexts = [[3, 4, 5], [7], [8, 9], [4, 4, 4, 4], [5]]
    noise = np.random.default_rng(5).uniform(0.01, 0.99, (5, 30))
    head = torch.randn(lm.get_output_embeddings().weight.shape[1],
                       generator=torch.Generator().manual_seed(0))
    decoder = Decoder(lm, spec, value_head=lambda hidden: hidden @ head)
    one = Rereading(decoder, contexts, noise, Decoding.STEPS, nullcontext)
    other = KeptKeys(decoder, contexts, noise, nullcontext)
    for rows, fed in (([0, 1, 2, 3, 4], [[], [3], [4, 5, 6], [], []]),
                      ([0, 1, 3, 4], [[7, 7, 7, 7], [], [3], []]), ([1, 3], [[9], [8, 3, 4]])):
        wanted, found = (talk.speak(rows, fed, [limits[row] for row in rows])
                         for talk in (one, other))
        assert torch.equal(found.tokens, wanted.tokens)
        assert torch.equal(found.mask, wanted.mask)
        assert torch.equal(found.finished, wanted.finished)
        for name in ("logprobs", "values"):
            torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=0,
                                       atol=2e-5)


@pytest.mark.parametrize("keys", [
    {"kind": "mistral"}, {"model__peft": {"type": "prefix", "num_virtual_tokens": 3}},
    {"model__peft": {"type": "prompt", "num_virtual_tokens": 3}},
    {"generation__stop_sequences": ["film"]}, {"generation__min_new_tokens": 2},
    {"generation__repetition_penalty": 1.3}, {"model__num_layers_unfrozen": 1}])
def test_decoded_logprobs_of_episodes_are_those_of_a_pass(tmp_path, keys):
    found, keys = [], dict(keys)
    save_lm(tmp_path / "lm", keys.pop("kind", "gpt2"))
    for way in ("decode", "forward"):
        cfg = small_config(tmp_path, **PLAYS, **keys, ppo__logprobs_from=way)
        with session_of(cfg, None) as session:
            found.append(rollout_of(session))
            assert session.from_decode == (way == "decode")
    assert found[0].episodes == found[1].episodes
    assert any(len(one.turns) > 1 for one in found[0].episodes)
    for name in ("logprobs", "values"):
        torch.testing.assert_close(getattr(found[0], name), getattr(found[1], name), rtol=0,
                                   atol=2e-5)


# Advantages ---------------------------------------------------------------------------------------

def turns_of(counts):
    return [Episode("", tuple(Turn("", n) for n in row), "done") for row in counts]


def test_turn_numbers():
    assert turn_numbers(turns_of([[2, 1], [1, 1, 2]]), 5) == [[0, 0, 1, 1, 1], [0, 1, 2, 2, 2]]


def test_gae_over_turns_against_a_loop_by_hand():
    rng = np.random.default_rng(3)
    counts = [[2, 3, 1], [4], [1, 1, 1, 2], [3, 2]]
    width = max(map(sum, counts))
    rewards, values = (torch.from_numpy(rng.normal(size=(4, width))) for _ in range(2))
    mask = torch.arange(width)[None, :] < torch.tensor([sum(row) for row in counts])[:, None]
    turns = torch.tensor(turn_numbers(turns_of(counts), width))
    for gamma, lam, lam_value in ((1.0, 0.95, None), (0.9, 0.5, 1.0)):
        found, returns = advantages.gae(advantages.Samples(
            rewards * mask, mask, torch.arange(4), values, gamma=gamma, lam=lam,
            lam_value=lam_value, turns=turns))
        for i, row in enumerate(counts):
            starts = np.cumsum([0, *row])
            r = [float(rewards[i, a:b].sum()) for a, b in pairwise(starts)]
            v = [float(values[i, a]) for a in starts[:-1]] + [0.0]
            for own, got, extra in ((lam, found, False), (lam_value or lam, returns, True)):
                running = 0.0
                for k in reversed(range(len(row))):
                    running = r[k] + gamma * v[k + 1] - v[k] + gamma * own * running
                    for t in range(starts[k], starts[k + 1]):
                        assert float(got[i, t]) == pytest.approx(running + extra * v[k])
            assert not found[i, starts[-1]:].any()
            assert not returns[i, starts[-1]:].any()


def test_gae_passes_over_observations_as_areal_s_does():
    """On whole rows with a loss mask, where what follows an action is carried over the words of
    others (``inclusionAI/AReaL:areal/trainer/ppo/actor.py@4aef98d``, ``_compute_advantages``)."""
    rng = np.random.default_rng(4)
    for _ in range(20):
        length = int(rng.integers(2, 14))
        said = rng.integers(0, 2, length).astype(bool)
        said[-1] = True
        rewards, values = (torch.from_numpy(rng.normal(size=length) * said) for _ in range(2))
        after, running, wanted = 0.0, 0.0, [0.0] * length
        for t in reversed(range(length)):
            delta = float(rewards[t]) + 0.9 * after - float(values[t])
            if said[t]:
                after, running = float(values[t]), delta + 0.9 * 0.8 * running
            wanted[t] = running
        places = np.flatnonzero(said)
        found, _ = advantages.gae(advantages.Samples(
            rewards[None, places], torch.ones(1, len(places), dtype=torch.bool), torch.arange(1),
            values[None, places], gamma=0.9, lam=0.8))
        assert found[0].tolist() == pytest.approx([wanted[t] for t in places])


def test_turns_of_one_token_are_tokens():
    mask = torch.ones(2, 4, dtype=torch.bool)
    rewards, values = torch.randn(2, 4), torch.randn(2, 4)
    given = {"groups": torch.arange(2), "values": values, "gamma": 0.9, "lam": 0.8}
    plain = advantages.gae(advantages.Samples(rewards, mask, **given))
    over = advantages.gae(advantages.Samples(rewards, mask, **given,
                                             turns=torch.arange(4).expand(2, -1)))
    for one, other in zip(plain, over, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("unit", ["token", "turn"])
def test_a_whole_step_of_episodes_against_a_naive_float64_version(tmp_path, unit):
    """Rewards, KL, GAE over the actions alone and the first update's gradient, each episode by
    itself, by transformers' own passes in float64."""
    cfg = small_config(tmp_path, **PLAYS, ppo__gae_unit=unit, ppo__lam=0.9, ppo__gamma=0.98,
                       ppo__whiten_advantages=False, ppo__vf_coef=0.5, ppo__init_kl_coef=0.1)
    with session_of(cfg, None) as session:
        rollout = rollout_of(session)
        experience = to_experience(rollout, PPOState(0.1, 0.1), cfg)
        found, _ = gradients(session, experience)
        policy = copy.deepcopy(session.policy)
        policy.lm.double()
    loss, count = torch.zeros((), dtype=torch.float64), int(rollout.response_mask.sum())
    for i, episode in enumerate(rollout.episodes):
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
        running, own = 0.0, [0.0] * len(r)
        for k in reversed(range(len(r))):
            after = v[k + 1] if k + 1 < len(v) else 0.0
            running = r[k] + 0.98 * after - v[k] + 0.98 * 0.9 * running
            own[k] = running
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


def test_one_turn_without_an_observation_is_what_a_reward_function_gives(tmp_path):
    def experience(cfg, reward):
        with session_of(cfg, reward) as session:
            rollout = rollout_of(session)
            return rollout, to_experience(rollout, PPOState(0.05, 0.05), cfg)

    class_words = {**PLAYS, "env__fn": "played:OneTurn", "env__max_turns": 1, "env__max_tokens": 5}
    one = experience(small_config(tmp_path, **class_words), None)
    other = experience(small_config(tmp_path, generation__max_new_tokens=5),
                       lambda responses, **_: [len(text) / 10 for text in responses])
    for name in ("logprobs", "values", "ref_logprobs", "scores"):
        a, b = getattr(one[0], name), getattr(other[0], name)
        assert a == b if isinstance(a, list) else torch.equal(a, b)
    for name in ("advantages", "returns"):
        assert torch.equal(getattr(one[1], name), getattr(other[1], name))
    assert torch.equal(one[0].finished, other[0].finished)
