"""``ppocli chat``: in a real terminal, and line by line in this process."""

import re

import pytest
from helpers import ppocli, save_talker
from terminal import Terminal

from ppocli.cli.chat import Chat, Conversation
from ppocli.cli.sampling_request import ChosenModels, SamplingRequest, find_models, sampling_of
from ppocli.config.schema import ModelConfig
from ppocli.errors import ConfigError
from ppocli.evaluation.player import build_judge, changed_sampling, load_player

# where a line begins, as an answer can contain "<bos> "; a terminal may be set up before it
PROMPT = r"^(\x1b\[[0-9;?]*[A-Za-z])*> "


class Talk(Terminal):
    """A chat on a terminal, read up to one thing after another."""

    _read_to = 0

    def until(self, pattern: str) -> str:
        """What was shown since the last call, up to where ``pattern`` is first found."""
        sought, start = re.compile(pattern, re.MULTILINE), self._read_to
        self.wait_for(lambda: sought.search(self.raw, start) is not None)
        found = sought.search(self.raw, start)
        self._read_to = found.end()
        return self.raw[start:found.start()]

    def say(self, line: str) -> None:
        """Type a line; what the terminal echoes of it counts as read."""
        self.type(line.encode() + b"\n")
        self.until("\n")


def test_an_answer_is_stopped_and_the_chat_goes_on(tmp_path):
    save_talker(tmp_path / "talker", max_position_embeddings=10**6)
    with Talk("chat", "talker", "--max-new-tokens", "100000", "--min-new-tokens", "100000",
              cwd=tmp_path) as talk:
        greeting = talk.until(PROMPT)
        assert "chatting with talker: max_new_tokens=100000" in greeting
        assert "no chat template" not in greeting
        talk.say("the film was good")
        talk.until(" the ")  # it is talking
        talk.type(b"\x03")
        assert "(stopped)" in talk.until(PROMPT)
        talk.say("/set max_new_tokens=3 min_new_tokens=3")
        assert "max_new_tokens=3" in talk.until(PROMPT)
        talk.say("and")
        assert 1 <= len(talk.until(PROMPT).split()) <= 3
        # one that comes between the prompt's text and the waiting for keys is taken with the next
        talk.press_until(b"\x03", "Stopped: left by Ctrl-C")
        assert talk.end() == 130


def test_a_pipe_is_refused(tmp_path):
    done = ppocli("chat", cwd=tmp_path, code=2)
    assert done.stderr == (
        "Error: ppocli chat needs a terminal, and standard input isn't one.\n"
        "  where: standard input\n"
        "  fix:   ppocli generate takes prompts from a pipe or a file\n")


# Line by line -------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def chosen(tmp_path_factory) -> ChosenModels:
    folder = save_talker(tmp_path_factory.mktemp("chosen") / "talker")
    return find_models(SamplingRequest(str(folder)))


@pytest.fixture(scope="module")
def talker(chosen):
    return load_player(chosen.cfg.model, "talker")


def chat_with(chosen, *players, reward=None, **asked) -> Chat:
    given = SamplingRequest(flags={"max_new_tokens": 6, "min_new_tokens": 2}, **asked)
    return Chat(given, chosen, players, sampling_of(given, chosen, players[0]), reward)


def said(capsys, talk, line):
    """What a line brings to standard output, and to standard error."""
    capsys.readouterr()
    assert talk.take(line)
    return capsys.readouterr()


def test_the_conversation_is_kept_and_repeats_with_its_seed(chosen, talker, capsys):
    talk = chat_with(chosen, talker)
    first, second, _, *again, _, _, other, blank = (said(capsys, talk, line).out for line in (
        "the film", "the film", "/reset", "the film", "the film", "/reset", "/seed 5", "the film",
        "   "))
    assert first.strip()
    assert again == [first, second]
    assert other != first
    assert blank == ""


def test_the_first_answer_is_that_of_generate(chosen, talker, capsys):
    generation = changed_sampling(chosen.cfg, {"max_new_tokens": 6, "min_new_tokens": 2})
    text = talker.render(["the film"], chat=True)
    assert text == ["you the film . i "]
    tokens = talker.tokens(text, generation, chat=True)
    answer, = [a for batch in talker.answers(tokens, generation, seed=0) for a in batch]
    assert said(capsys, chat_with(chosen, talker), "the film").out == answer.text + "\n"


def test_the_oldest_turns_are_dropped_and_it_is_said_once(talker, chosen, capsys):
    generation = changed_sampling(chosen.cfg, {"max_new_tokens": 20})
    talk = Conversation(talker, system="be warm")
    for turn in range(6):
        rendered, tokens = talk.ask(f"this plot was good {'and ' * turn}", generation)
        assert len(tokens) + 20 <= 64
        assert rendered.startswith("we be warm . you this plot was good")
        talk.keep(f"this plot was good {'and ' * turn}", "it was not so very bad")
    assert talk.dropped > 2
    assert talk.turns
    assert rendered.count("you") == len(talk.turns)
    assert capsys.readouterr().err.count("its oldest turns are left out") == 1
    with pytest.raises(ConfigError, match="exceed the model's 64 positions"):
        talk.ask("the film " * 40, generation)
    assert Conversation(talker, "be warm").ask("it", generation)[0] == "we be warm . you it . i "


def test_wrong_lines_are_told_and_the_chat_goes_on(chosen, talker, capsys):
    talk = chat_with(chosen, talker)
    for line, message in (
            ("/foo", "There is no command /foo"), ("/seed -1", "it takes a number"),
            ("/set temperature", "it takes NAME=VALUE"),
            ("/set heat=3", "'heat' is not a sampling setting"),
            ("/set temperature=-1", "generation.temperature: -1 must be"),
            ("the film " * 40, "exceed the model's 64 positions"), ("a \ud800", "no character")):
        ended = said(capsys, talk, line)
        assert ended.err.startswith("Error: ")
        assert message in ended.err, ended.err
        assert ended.out == ""
    assert said(capsys, talk, "/help").err.startswith("/quit")
    assert "temperature=0.5" in said(capsys, talk, "/set temperature=0.5 top_k=3").err
    assert "top_k=3" in said(capsys, talk, "/set").err
    assert "no effect: top_p, as do_sample=false" in said(
        capsys, talk, "/set do_sample=false top_p=0.5").err
    assert said(capsys, talk, "//the film").out.strip()
    assert not talk.take("/quit")


def test_two_models_keep_their_own_conversations(chosen, talker, shared_world, capsys):
    plain = load_player(ModelConfig(path=str(shared_world / "lm")), "plain")
    chosen.cfg.reward.fn = "keyword"
    chosen.cfg.reward.kwargs = {"words": ["the"]}
    talk = chat_with(chosen, talker, plain, reward=build_judge(chosen.cfg.reward, []))
    talk.greet()
    greeting = capsys.readouterr().err
    assert "chatting with talker and plain" in greeting
    assert "plain has no chat template" in greeting
    both = said(capsys, talk, "the film")
    assert both.out.startswith("[talker]\n")
    assert "\n[plain]\n" in both.out
    assert both.err.count("score ") == 2
    alone = said(capsys, chat_with(chosen, plain), "the film").out
    assert both.out.endswith(alone)
