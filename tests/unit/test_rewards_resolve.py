"""Import paths, signatures and kwargs of reward functions."""

import functools
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import refused

from ppocli.config import import_guard
from ppocli.config.schema import RewardConfig
from ppocli.errors import ConfigError, InputError, RewardError
from ppocli.rewards.reward_records import RewardRequest
from ppocli.rewards.scoring import build_metric, build_reward, check_reward_config

REQUEST = RewardRequest(
    prompts=["a ", "b "], responses=["one", "two words"], response_ids=[[1, 2], [3, 4, 5]],
    columns={"label": [0.25, 0.75], "original_output": ["x", "two"]}, tokenizer="TOKENIZER")


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Writes a module into an empty current folder; imports are undone afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write_file(name: str, source: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return path

    yield write_file
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def score(spec: str, **kwargs: object) -> list[float]:
    return build_reward(RewardConfig(fn=spec, kwargs=kwargs)).score(REQUEST).scores


PLAIN = "def score(outputs): return [float(len(o)) for o in outputs]\n"


@pytest.mark.parametrize("spec", ["my_rewards:score", "my_rewards.score", "my_rewards.py:score",
                                  "./my_rewards.py:score"])
def test_the_forms_of_an_import_path(write, spec):
    path = write("my_rewards.py", PLAIN)
    reward = build_reward(RewardConfig(fn=spec))
    assert reward.score(REQUEST).scores == [3.0, 9.0]
    assert reward.code_files == [str(path)]
    assert sys.path.count(str(path.parent)) == 1


@pytest.mark.parametrize("spec", ["pkg/deep/mod.py:score", "pkg.deep:mod.score", "pkg.score"])
def test_packages_and_reexports(write, spec):
    write("pkg/__init__.py", "from pkg.deep.mod import score")
    write("pkg/deep/__init__.py", "from pkg.deep import mod")
    write("pkg/deep/mod.py", PLAIN)
    assert score(spec) == [3.0, 9.0]


def test_what_lies_in_the_current_folder_is_no_installed_library(write, monkeypatch):
    sys.path.append(os.getcwd())
    for library, path in (("wandb", "wandb/run-1/x.json"), ("trackio", "trackio.py"),
                          ("submitit_", "submitit_/__init__.py"), ("absent_library", "x.py")):
        write(path, "")
        assert not import_guard.installed(library), library
    assert import_guard.installed("peft")
    monkeypatch.setitem(import_guard.EXTRAS, "absent_library", "absent")
    with refused(InputError, "A thing needs absent_library", "pip install 'ppocli[absent]'"):
        import_guard.require("absent_library", "A thing", "key")


def test_a_file_sees_its_neighbours_and_edits(write):
    write("elsewhere/helper_module.py", "FACTOR = 2")
    source = "import helper_module as h\ndef f(outputs): return [{} * h.FACTOR for o in outputs]"
    path = write("elsewhere/scorer.py", source.format("1"))
    assert score("elsewhere/scorer.py:f") == [2.0, 2.0]
    path.write_text(source.format("1000"))
    assert score(f"{path}:f") == [2000.0, 2000.0]


def test_every_known_name_and_defaults_and_positional_only():
    def by_name(samples, /, prompts, *, outputs, responses, completions, completion_ids,
                response_ids, output_ids, tokenizer, label=None, absent="default"):
        assert outputs == responses == completions == ["one", "two words"]
        assert completion_ids == response_ids == output_ids == [[1, 2], [3, 4, 5]]
        assert (tokenizer, label, absent) == ("TOKENIZER", [0.25, 0.75], "default")
        return [len(s) for s in samples]

    assert build_reward(RewardConfig(), reward_fn=by_name).score(REQUEST).scores == [5.0, 11.0]


def test_what_a_function_changes_in_what_it_gets_is_forgotten():
    def vandal(outputs, response_ids, wanted, info):
        info[0]["tags"].clear()
        found = [wanted[0].pop(), wanted[1].pop()]
        outputs.clear(), wanted.clear(), response_ids[0].clear()
        return found

    shared = [1, 2, 3]  # as the samples of a prompt share it
    request = RewardRequest(["a", "a"], ["x", "y"], [[1], [1]],
                            {"wanted": [shared, shared], "info": [{"tags": [1]}, {}]}, None)
    reward = build_reward(RewardConfig(), reward_fn=vandal)
    assert reward.score(request).scores == reward.score(request).scores == [3.0, 3.0]
    assert request.columns == {"wanted": [[1, 2, 3]] * 2, "info": [{"tags": [1]}, {}]}
    assert (request.responses, request.response_ids) == (["x", "y"], [[1], [1]])


def test_classes_objects_partials_and_kwargs(write):
    write("shapes.py", '''
        import functools
        import torch
        class Bonus:
            def __init__(self, bonus, factor=1):
                self.bonus, self.factor = bonus, factor
            def __call__(self, outputs):
                return [self.bonus + self.factor * len(o) for o in outputs]
            @staticmethod
            def fixed(outputs):
                return [7 for _ in outputs]
        instance = Bonus(1)
        def scaled(outputs, factor):
            return [factor * len(o) for o in outputs]
        ready = functools.partial(scaled, factor=3)
        class Net(torch.nn.Module):
            def forward(self, outputs):
                return torch.tensor([2.0 * len(o) for o in outputs])
        net = Net()
        anything = lambda **kw: [kw["extra"]] * len(kw["outputs"])
        ''')
    assert score("shapes:Bonus", bonus=10, factor=2) == [16.0, 28.0]
    assert score("shapes:Bonus.fixed") == [7.0, 7.0]
    assert score("shapes:instance") == [4.0, 10.0]
    assert score("shapes:ready") == [9.0, 27.0]
    assert score("shapes:net") == [6.0, 18.0]
    assert score("shapes:anything", extra=5) == [5.0, 5.0]


@pytest.mark.parametrize(("spec", "words"), [
    ("my_reward:score", ["no module 'my_reward'", "Did you mean 'my_rewards'?"]),
    ("my_rewards:scor", ["no 'scor'", "my_rewards.py", "Did you mean 'score'?"]),
    ("my_rewards", ["no function in it", "fix:   reward.fn=my_rewards:score"]),
    ("lenght", ["Did you mean 'length'?"]),
    ("my_reward.py:score", ["no file 'my_reward.py'", "Did you mean 'my_rewards.py'?"]),
    ("pkg:inner", ["no function in it", "reward.fn=pkg.inner:score"]),
    ("my_rewards:Failing", ["Building", "KeyError: 'weights'", "my_rewards.py:7"]),
    ("my_rewards:Needs", ["can't be built without 'bonus'", "reward.kwargs.bonus=..."]),
])
def test_wrong_paths_name_the_remedy(write, spec, words):
    write("my_rewards.py", '''\
        def score(outputs): return [1.0 for _ in outputs]
        class Needs:
            def __init__(self, bonus): pass
            def __call__(self, outputs): return [1.0 for _ in outputs]
        class Failing:
            def __init__(self):
                {}["weights"]
            def __call__(self, outputs): return [1.0 for _ in outputs]
        ''')
    write("pkg/__init__.py", "from pkg import inner")
    write("pkg/inner.py", PLAIN)
    with refused(RewardError, *words) as caught:
        build_reward(RewardConfig(fn=spec))
    assert caught.value.exit_code == 7
    assert "reward.fn" in str(caught.value) or "my_rewards.py" in str(caught.value)


def test_unknown_kwargs_name_the_nearest(write):
    write("my_rewards.py", '''
        def score(outputs, factor=1.0): return [factor for _ in outputs]
        class Scorer:
            def __init__(self, factor=1.0): pass
            def __call__(self, outputs): return [1.0 for _ in outputs]
        ''')
    for name in ("score", "Scorer"):
        with pytest.raises(RewardError, match=r"no argument 'facto'. Did you mean 'factor'\?"):
            build_reward(RewardConfig(fn=f"my_rewards:{name}", kwargs={"facto": 2}))
    with pytest.raises(RewardError, match=r"reward\.fns\.style\.kwargs\.facto"):
        build_reward(RewardConfig(fns={"style": {"fn": "my_rewards:score",
                                                 "kwargs": {"facto": 1}}}))


def test_a_required_parameter_without_a_source(write):
    write("my_rewards.py", "def score(outputs, labels): return [1.0 for _ in outputs]")
    reward = build_reward(RewardConfig(fn="my_rewards:score"))  # may yet be a column
    with refused(RewardError, "'labels'", "Did you mean 'label'?", "label, id",
                 "reward.kwargs.labels=..."):
        reward.check_columns(["label", "id"])
    reward.check_columns(["labels"])
    with pytest.raises(RewardError, match="'labels'"):
        reward.score(REQUEST)


def test_checking_builds_nothing(write):
    write("my_rewards.py", '''
        class Heavy:
            def __init__(self, model): raise AssertionError("built")
            def __call__(self, outputs, label): return [1.0 for _ in outputs]
        def metric(outputs): return {}
        ''')
    cfg = RewardConfig(fn="my_rewards:Heavy", kwargs={"model": "m"}, metric_fn="my_rewards:metric")
    check_reward_config(cfg, None)
    check_reward_config(cfg, ["label"])
    with pytest.raises(RewardError, match="'label'"):
        check_reward_config(cfg, ["other"])
    check_reward_config(RewardConfig(fn="classifier", kwargs={"model": "nowhere"}), None)


def test_python_objects_replace_what_the_configuration_names():
    def one(outputs, factor=1):
        return [factor for _ in outputs]

    recipe = RewardConfig(fn="classifier", kwargs={"model": "builtin:reviews-sentiment"})
    assert build_reward(recipe, reward_fn=one).score(REQUEST).scores == [1.0, 1.0]
    own = RewardConfig(kwargs={"factor": 4})
    assert build_reward(own, reward_fn=one).score(REQUEST).scores == [4.0, 4.0]
    several = build_reward(recipe, reward_fn={"a": one, "b": functools.partial(one, factor=2)})
    assert several.score(REQUEST).parts == {"a": [1.0, 1.0], "b": [2.0, 2.0]}
    with pytest.raises(ConfigError, match="reward/mean is a figure of all rewards"):
        build_reward(recipe, reward_fn={"mean": one, "x": one})
    with pytest.raises(RewardError, match="was a Python object"):
        build_reward(RewardConfig(fn="<python object>"))
    with pytest.raises(RewardError, match="pass metric_fn="):
        build_metric(RewardConfig(metric_fn="<python object>"))
    assert build_metric(RewardConfig()) is None
