"""``ppocli chat``: in a real terminal, and line by line in this process."""

import re
from dataclasses import replace

import pytest
from helpers import ppocli, save_talker
from terminal import Terminal

from ppocli.cli.chat import Chat
from ppocli.config.schema import ModelConfig, RewardConfig, TrainConfig
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
        match = sought.search(self.raw, start)
        self._read_to = match.end()
        return self.raw[start:match.start()]

    def say(self, line: str) -> None:
        """Type a line; what the terminal echoes of it counts as read."""
        self.type(line.encode() + b"\n")
        self.until("\n")


def test_an_answer_is_stopped_and_the_chat_goes_on(tmp_path):
    save_talker(tmp_path / "talker", max_position_embeddings=10**6)
    with Talk("chat", "talker", "generation.max_new_tokens=100000",
              "generation.min_new_tokens=100000", cwd=tmp_path) as talk:
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
    assert "needs a terminal" in ppocli("chat", cwd=tmp_path, code=2).stderr


# Line by line -------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    folder = save_talker(tmp_path_factory.mktemp("chosen") / "talker")
    return load_player(ModelConfig(path=str(folder)), "talker")


def chat_with(player, reward=None, system=None, **sampling) -> Chat:
    cfg = replace(TrainConfig(), seed=0)
    sampling = {"max_new_tokens": 6, "min_new_tokens": 2, **sampling}
    return Chat(cfg, player, changed_sampling(cfg, sampling), reward, system)


def shown(capsys, talk, line):
    """What a line brings to standard output, and to standard error."""
    capsys.readouterr()
    assert talk.take(line)
    return capsys.readouterr()


def test_the_conversation_is_kept_and_repeats_with_its_seed(talker, capsys):
    talk = chat_with(talker)
    first, second, _, *again, _, _, other, blank = (shown(capsys, talk, line).out for line in (
        "the film", "the film", "/reset", "the film", "the film", "/reset", "/set seed=5",
        "the film", "   "))
    assert first.strip()
    assert again == [first, second]
    assert other != first
    assert blank == ""


def test_the_oldest_turns_are_dropped_and_a_note_tells_once(talker, capsys):
    talk = chat_with(talker, system="be warm", max_new_tokens=20)
    for turn in range(6):
        text = f"this plot was good {'and ' * turn}"
        messages, rendered, tokens = talk.prompt(text)
        assert len(tokens) + 20 <= 64
        assert rendered.startswith("we be warm . you this plot was good")
        talk.turns.append([messages[-1], {"role": "assistant", "content": "it was not so bad"}])
    assert talk.dropped > 2
    assert talk.turns
    assert rendered.count("you") == len(talk.turns)
    assert capsys.readouterr().err.count("its oldest turns are left out") == 1
    with pytest.raises(ConfigError, match="exceed the model's 64 positions"):
        talk.prompt("the film " * 40)


def test_wrong_lines_are_refused_and_the_chat_goes_on(talker, capsys):
    talk = chat_with(talker)
    for line, message in (
            ("/foo", "There is no command /foo"), ("/set seed=-1", "it takes a number"),
            ("/set temperature=-1", "generation.temperature: -1 must be"),
            ("the film " * 40, "exceed the model's 64 positions"),
            ("a \ud800", "tokenizer cannot encode")):
        ended = shown(capsys, talk, line)
        assert ended.err.startswith("Error: ")
        assert message in ended.err, ended.err
        assert ended.out == ""
    assert shown(capsys, talk, "/help").err.startswith("/quit")
    assert "temperature=0.5" in shown(capsys, talk, "/set temperature=0.5 top_k=3").err
    assert "top_k=3" in shown(capsys, talk, "/set").err
    assert shown(capsys, talk, "//the film").out.strip()
    assert not talk.take("/quit")


def test_without_a_chat_template_each_text_is_a_prompt(shared_world, capsys):
    plain = load_player(ModelConfig(path=str(shared_world / "lm")), "plain")
    judge = build_judge(RewardConfig(fn="keyword", kwargs={"words": ["the"]}), [])
    talk = chat_with(plain, judge)
    talk.greet()
    assert "each text is a prompt of its own" in capsys.readouterr().err
    assert "score " in shown(capsys, talk, "the film").err
    assert talk.prompt("it")[1] == "it"
    with pytest.raises(ConfigError, match="without a chat template"):
        chat_with(plain, system="be warm")
