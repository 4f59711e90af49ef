"""Some messages of each kind, word for word: other tests look at an error's code and key, and leave
its words to be improved."""

from collections.abc import Callable
from pathlib import Path

import pytest
from data_tokenizers import words
from helpers import checked, request_of, write_jsonl

from ppocli.config.command_words import read_words
from ppocli.config.schema import PromptsConfig, RewardConfig
from ppocli.data.prompt_set import load_prompts
from ppocli.errors import DivergedError, PpocliError, StoppedError
from ppocli.rewards.scoring import build_reward
from ppocli.runs.checkpoints import open_checkpoint
from ppocli.runs.target import find_run


def quickstart(*more: str) -> Callable[[], object]:
    return lambda: checked("+recipe=quickstart", *more)


def prompts(**keys) -> Callable[[], object]:
    return lambda: load_prompts(PromptsConfig(**keys), words(), seed=0, max_prompt_tokens=64)


def reward(fn: str, **kwargs) -> Callable[[], object]:
    return lambda: build_reward(RewardConfig(fn=fn, kwargs=kwargs)).score(request_of(1))


def raising(error: PpocliError) -> Callable[[], object]:
    def call() -> None:
        raise error

    return call


GOLDEN = {
    "a misspelt key": (quickstart("ppo.lrr=1"), "unknown-key", """\
ppo.lrr: unknown key; did you mean ppo.optimizer.lr? (from command line)"""),
    "a value of another type": (quickstart("seed=abc"), "wrong-type", """\
seed: abc must be a whole number (from command line)"""),
    "a value out of range": (quickstart("ppo.vf_coef=-1"), "out-of-range", """\
ppo.vf_coef: -1 must be >= 0 (from command line)"""),
    "two keys that contradict each other": (
        quickstart("ppo.mini_batch_size=500", "ppo.num_rollouts=100"), "contradiction", """\
ppo.mini_batch_size, ppo.num_rollouts: mini_batch_size 500 must be at most num_rollouts 100 \
(from command line)
  fix:   ppo.mini_batch_size=100"""),
    "nothing at all": (checked, "wrong-usage", """\
3 problems in the configuration:
  model.path: missing; it must be given: model.path=... (a folder, a Hub name, or builtin:reviews \
/ builtin:randomwalks; an adapter goes on under model.peft, and is merged without it)
  ppo.total_episodes, ppo.num_steps: say how long to train: give one of them, or ppo.epochs
  reward.fn: missing; give an import path (reward.fn=my_rewards:score), a built-in's name, or a \
config group (reward=...)
  fix:   start from a recipe, e.g. ppocli train +recipe=quickstart (ppocli recipes list)"""),
    "a misspelt option": (lambda: read_words(["--multirn"]), "wrong-usage", """\
unknown option --multirn; did you mean --multirun?
  where: command line
  fix:   see `ppocli train --help`"""),
    "a file that isn't there": (prompts(path="q.jsonl"), "no-such-file", """\
Prompt file or folder q.jsonl does not exist (looked in HERE).
  where: prompts.path=q.jsonl
  fix:   did you mean p.jsonl?"""),
    "a file that is no JSON": (prompts(path="bad.json"), "unusable-input", """\
Line 1 of bad.json is not valid JSON: Expecting value (character 2).
  where: bad.json"""),
    "another column": (prompts(path="p.jsonl", column="text"), "no-such-column", """\
There is no column 'text' in row 1 of p.jsonl: its columns are prompt, label.
  where: prompts.column=text
  fix:   prompts.column=prompt"""),
    "a misspelt placeholder": (prompts(path="p.jsonl", template="{promt}"), "wrong-usage", """\
The template's placeholder {promt} is no column; there are prompt, label. Did you mean {prompt}?
  where: prompts.template='{promt}'
  fix:   write a literal brace twice: {{ or }}"""),
    "no chat template": (prompts(path="p.jsonl", chat=True), "no-chat-template", """\
The tokenizer has no chat template.
  where: prompts.chat=true
  fix:   prompts.chat=false (with prompts.template=... if the model expects a form), or \
model.chat_template=FILE"""),
    "a misspelt function": (reward("rewards.py:scor"), "reward", """\
There is no 'scor' in 'rewards.py'. Did you mean 'score'?
  where: reward.fn=rewards.py:scor
  fix:   name a function that the module has"""),
    "a misspelt argument": (reward("rewards.py:score", taget=3), "reward", """\
rewards.py:score (rewards.py:1) has no argument 'taget'. Did you mean 'target'?
  where: reward.kwargs.taget
  fix:   it takes: target; or, where a recipe brought it, take the recipe's reward out: \
reward=null reward.fn=rewards.py:score"""),
    "a score that is no number": (reward("rewards.py:score"), "reward", """\
rewards.py:score (rewards.py:1) returned NaN for sample 0: 'prompt0 response0'
  where: reward.fn
  fix:   return a finite number, or set reward.on_invalid=skip to drop the sample"""),
    "another run": (lambda: find_run("night", say=print), "no-such-run", """\
night does not exist (looked in HERE).
  where: RUN
  fix:   name a run's folder: ppocli runs list"""),
    "a checkpoint that isn't there": (
        lambda: open_checkpoint(Path("step-000004").absolute()), "refused-run", """\
step-000004 can't be used: it is not a folder
  where: HERE/step-000004
  fix:   name another checkpoint (there: none)"""),
    "an error of one's own": (raising(DivergedError("The loss is not finite.", code="loss")),
                              "loss", "The loss is not finite."),
    "a stop": (raising(StoppedError("stopped by SIGTERM", signal_number=15)), "stopped",
               "stopped by SIGTERM"),
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden_messages(kind, tmp_path, monkeypatch):
    call, code, text = GOLDEN[kind]
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text("def score(outputs, target=1):\n"
                                  "    return [float('nan')] * len(outputs)\n")
    write_jsonl(Path("p.jsonl"), [{"prompt": "the film", "label": 1}])
    Path("bad.json").write_text("[nope]")
    with pytest.raises(PpocliError) as caught:
        call()
    assert caught.value.code == code
    assert str(caught.value).replace(str(tmp_path), "HERE") == text
