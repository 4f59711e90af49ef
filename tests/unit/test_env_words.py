"""Words of an environment: how they join a conversation, and those of TRL and OpenRLHF."""

import played
import pytest
from helpers import refused
from played import chat_tokenizer, stepped

from ppocli.config.schema import EnvConfig
from ppocli.environments.env_calls import Called, Calls, ChatWords
from ppocli.environments.registry import ToolPlay, resolve
from ppocli.errors import InputError, RewardError
from ppocli.runs.episode import Step

FORGETS = ("{% for m in messages %}<im>{{ m.role }} {% if m.role == 'user' or loop.last %}"
           "{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}<eos> "
           "{% endfor %}{% if add_generation_prompt %}<im>assistant {% endif %}")


def prompt_of(tokenizer, messages):
    return tokenizer(tokenizer.apply_chat_template(messages, tokenize=False,
                                                   add_generation_prompt=True))["input_ids"]


@pytest.mark.parametrize("ended", [True, False])
def test_a_chat_goes_on_as_the_template_would_have_rendered_it(ended):
    """Whether the policy closed its message itself, or was cut off and the template closes it."""
    tokenizer = chat_tokenizer()
    words = ChatWords(tokenizer)
    asked = [{"role": "user", "content": "hello"}]
    ids, opening = words.opening(prompt_of(tokenizer, asked), asked, " there")
    said = tokenizer("an answer" + "<eos>" * ended)["input_ids"]
    more = words.between("go on", ended=ended, last=said[-1])
    wanted = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "an answer"},
         {"role": "user", "content": "go on"}], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids + said + more.ids) == wanted
    assert opening.ids == []
    assert (opening.text, more.text) == (" there", "\n[user] go on\n")


def test_a_template_that_rewrites_history_is_refused():
    with pytest.raises(InputError, match="changes earlier turns when a message is added"):
        ChatWords(chat_tokenizer(FORGETS))


def test_what_cannot_go_into_the_conversation_is_refused():
    tokenizer, asked = chat_tokenizer(), [{"role": "user", "content": "hello there"}]
    words, whole = ChatWords(tokenizer), prompt_of(tokenizer, asked)
    with refused(InputError, "A prompt was cut", "prompts.max_length"):
        words.opening(whole[1:], asked, " more")
    assert words.opening(whole[1:], asked, None)[0] == whole[1:]  # nothing is rendered anew
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    with refused(RewardError, "can't go behind a message that holds", "env.fn"):
        words.opening(prompt_of(tokenizer, parts), parts, " more")
    with refused(InputError, "template refuses the messages of an episode: no such role", "env.fn"):
        ChatWords(chat_tokenizer(tokenizer.chat_template + "{% for m in messages if m.role == "
                                 "'tool' %}{{ raise_exception('no such role') }}{% endfor %}")
                  ).between([{"role": "tool", "content": "3"}], ended=True, last=1)


# Other libraries' ---------------------------------------------------------------------------------

@pytest.mark.parametrize(("response", "wanted"), [
    ("no call", []),
    ('<tool_call>\n{"name": "echo", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
     ['{"a": 1, "b": 2}']),
    ('<tool_call>{"name": "echo", "arguments": "{\\"a\\": 1}"}</tool_call> and '
     '<tool_call>{"name": "echo"}', ['{"a": 1}', "{}"]),
    ('<tool_call>{"name": 3}</tool_call>', ["error: ValueError: arguments must be a JSON object"]),
    ('<tool_call>{"name": "echo", "arguments": "{"}</tool_call>',
     ["error: ValueError: arguments must be a JSON object"]),
    ("<tool_call>[1</tool_call>",
     ["error: ValueError: the call is no JSON object with a name: "])])
def test_tool_calls_are_read(response, wanted):
    def echo(**given: int) -> dict[str, int]:
        return given

    answers = ToolPlay([echo]).step(response).observation or []
    assert len(answers) == len(wanted)
    for one, other in zip(answers, wanted, strict=True):
        assert one["content"].startswith(other)
        assert one["name"] == ("unknown" if "error" in other else "echo")


def test_errors_of_a_tool_are_observations():
    play = ToolPlay([played.add, played.fail])
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
    assert one.result == " What is the film?"
    call = '<tool_call>{"name": "look", "arguments": {"name": "it"}}</tool_call>'
    told = stepped(calls, [one.environment], 1, call)[0].result
    assert told.observation == [{"role": "tool", "name": "look", "content": "it is good"}]
    assert stepped(calls, [one.environment], 2, "so it is")[0].result.done
    assert one.environment.wrapped.found == 1


def test_an_agent_of_openrlhf_s_runs_unchanged():
    cfg = EnvConfig(fn="played:AgentInstance", adapter="openrlhf")
    calls = Calls(resolve(cfg, ["label"]), cfg, seed=0)
    one, = calls.answers([Called(None, 0, 0, {"prompt": "p", "messages": None, "label": 3})], 1)
    assert one.result is None
    assert stepped(calls, [one.environment], 1, "abc")[0].result == Step(" more", 3.0)
    assert stepped(calls, [one.environment], 2, "ab")[0].result == Step(" more", 2.0, True)
