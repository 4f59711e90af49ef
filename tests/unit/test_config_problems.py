"""What is wrong with a configuration, all at once and with its source."""

from dataclasses import replace

from sessions import set_keys

from ppocli.config.keys import schema_keys
from ppocli.config.problems import find_problems
from ppocli.config.schema import TrainConfig


def changed(**values) -> TrainConfig:
    """A sound configuration with values at dotted keys written with ``__``."""
    return set_keys(TrainConfig(), {
        "model.path": "builtin:reviews", "reward.fn": "length", "ppo.total_episodes": 100,
        "prompts.path": "prompts.txt",
        **{name.replace("__", "."): value for name, value in values.items()}})


def said(config, **options) -> list[str]:
    return [str(problem) for problem in find_problems(config, **options)]


def named(config) -> list[tuple[str, str]]:
    return [(problem.key, problem.code) for problem in find_problems(config)]


def test_a_sound_configuration_has_no_problems():
    assert said(changed()) == []
    assert said(changed(ppo__num_rollouts=100, ppo__mini_batch_size=33, ppo__micro_batch_size=7,
                        ppo__total_episodes=1, eval__every_steps=1000)) == [], "odd sizes"
    assert said(changed(**PLAYED, reward__fn=None)) == [], "an environment needs no reward"
    assert said(changed(tracking__trackers=["tensorboard", "wandb", "trackio"],
                        tracking__project="films")) == []
    assert said(changed(tracking__trackers=["tensorboard", "mine.py:Csv", "pkg.mine:Csv",
                                            "pkg.mine.Csv"])) == []


PLAYED = {"env__fn": "played:Words"}
TOOLS = {"env__fn": "tools", "env__tools": ["played:add"]}
SERVED = {"rollout__engine": "vllm", "rollout__urls": ["http://h"]}


# values, the key that is named, and the code where it is no contradiction
RULES = [
    ({"ppo__cliprange": 5.0}, "ppo.cliprange", "out-of-range"),
    ({"reward__timeout": 1e300}, "reward.timeout", "out-of-range"),
    ({"hardware__precision": "fp16"}, "hardware.precision", "out-of-range"),
    ({"hardware__weights": "bf16"}, "hardware.weights, hardware.precision"),
    ({"ppo__optimizer__betas": [0.9, 1.5]}, "ppo.optimizer.betas", "out-of-range"),
    ({"ppo__optimizer__betas": [0.9]}, "ppo.optimizer.betas"),
    ({"ppo__total_episodes": None}, "ppo.total_episodes, ppo.num_steps"),
    ({"ppo__num_steps": 3}, "ppo.total_episodes, ppo.num_steps"),
    ({"ppo__scheduler__name": "constant_with_warmup"}, "ppo.scheduler.name", "out-of-range"),
    ({"ppo__epochs": 2}, "ppo.total_episodes, ppo.epochs"),
    ({"ppo__mini_batch_size": 500}, "ppo.mini_batch_size, ppo.num_rollouts"),
    ({"ppo__micro_batch_size": 64}, "ppo.micro_batch_size, ppo.mini_batch_size"),
    ({"model__reference": replace(TrainConfig().model.reference, kind="none")},
     "model.reference.kind, ppo.init_kl_coef"),
    ({"model__path": "???"}, "model.path", "missing"),
    ({"reward__fn": None}, "reward.fn"),
    ({"reward__fns": {"a": {"fn": "length"}}}, "reward.fn, reward.fns"),
    ({"reward__fn": None, "reward__fns": {"a": {"fn": "x", "wieght": 2}}}, "reward.fns.a"),
    ({"reward__kwargs": {"model": "???"}}, "reward.kwargs", "missing"),
    ({"reward__ref_mean": 0.5}, "reward.ref_mean, reward.scale"),
    ({"checkpoint__metric": "loss"}, "checkpoint.metric"),
    ({"checkpoint__metric": "metrics/x"}, "checkpoint.metric, reward.metric_fn"),
    ({"prompts__items": ["a"]}, "prompts.path, prompts.items"),
    ({"prompts__mix": {"a": {"path": "x"}}}, "prompts.path, prompts.mix"),
    *(({"prompts__path": None, "prompts__mix": {"a": entry}}, "prompts.mix.a") for entry in (
        {}, "x.jsonl", {"weight": 2}, {"path": "x", "weight": 0}, {"path": "x", "weight": "2"},
        {"path": "x", "colum": "q"}, {"path": "x", "limit": 0}, {"path": "x", "limit": "few"},
        {"path": "x", "columns": "a"}, {"path": "x", "kwargs": 3},
        {"path": "x", "template": "no place"})),
    ({"prompts__length_sampler": [5, 2]}, "prompts.length_sampler"),
    ({"prompts__template": "no place"}, "prompts.template"),
    ({"generation__min_new_tokens": 50}, "generation.min_new_tokens, generation.max_new_tokens"),
    ({"generation__length_sampler": [5, 4]}, "generation.length_sampler"),
    ({"generation__length_sampler": [4, 33]},
     "generation.length_sampler, generation.max_new_tokens"),
    ({"generation__stop_sequences": [""]}, "generation.stop_sequences"),
    ({"run_name": "a/b"}, "run_name"),
    ({"resume": "auto"}, "resume, run_name"),
    # contradictions of the algorithm
    ({"ppo__advantage": "grpo"}, "ppo.advantage, ppo.n"),
    ({"ppo__n": 3}, "ppo.num_rollouts, ppo.n"),
    ({"ppo__n": 8}, "ppo.total_episodes, ppo.n"),
    ({"ppo__group_std": False}, "ppo.group_std, ppo.advantage"),
    ({"ppo__advantage": "grpo", "ppo__n": 4, "ppo__batch_std": True, "ppo__group_std": False},
     "ppo.batch_std, ppo.group_std"),
    ({"ppo__critic_warmup_steps": 1, "ppo__value_pretrain_steps": 2},
     "ppo.critic_warmup_steps, ppo.value_pretrain_steps"),
    ({"ppo__kl_in": "loss", "ppo__kl_estimator": "full", "hardware__zero_stage": 3},
     "ppo.kl_estimator, hardware.zero_stage"),
    ({"ppo__advantage": "rloo", "ppo__n": 2, "ppo__dynamic_sampling": 2, "ppo__epochs": 1,
      "ppo__total_episodes": None}, "ppo.dynamic_sampling, ppo.epochs"),
    ({"model__reference__sync_every": 2, "model__num_layers_unfrozen": 1},
     "model.reference.sync_every, model.reference.kind"),
    ({"model__reference__sync_every": 2, "model__reference__kind": "none",
      "ppo__init_kl_coef": 0.0}, "model.reference.sync_every, model.reference.kind"),
    ({"ppo__scheduler__name": "polynomial", "ppo__scheduler__kwargs": {"powr": 2}},
     "ppo.scheduler.kwargs.powr"),
    ({"ppo__optimizer__name": "sgd", "ppo__optimizer__betas": [0.9, 0.95]},
     "ppo.optimizer.betas, ppo.optimizer.name"),
    ({"ppo__optimizer__name": "adafactor", "hardware__zero_stage": 2},
     "ppo.optimizer.name, hardware.zero_stage"),
    # adapters
    ({"model__peft": {"r": 8}}, "model.peft"),
    ({"model__peft": {"type": "lora", "lora_alfa": 8}}, "model.peft.lora_alfa"),
    ({"model__peft": {"type": "lora", "init_lora_weights": "pissa"}},
     "model.peft.init_lora_weights"),
    ({"model__peft": {"type": "lora", "inference_mode": True}}, "model.peft.inference_mode"),
    ({"model__peft": {"type": "prefix", "num_virtual_tokens": 4}}, "model.peft"),
    ({"model__quantization": "4bit"}, "model.quantization, model.peft"),
    # critics and references
    ({"model__value__kind": "branch"}, "model.value.num_layers_unfrozen, model.value.kind"),
    ({"model__value__path": "x"}, "model.value.path, model.value.kind"),
    ({"model__reference__path": "x", "model__reference__kind": "shared"},
     "model.reference.path, model.reference.kind"),
    ({"model__reference__device": "cpu", "model__num_layers_unfrozen": 1},
     "model.reference.device, model.reference.kind"),
    # samples of another policy
    ({"ppo__importance__reject": {"token_k4": 2}}, "ppo.importance.reject.token_k4"),
    ({"ppo__old_logprobs": "sampler", "ppo__logprobs_from": "forward"},
     "ppo.old_logprobs, ppo.logprobs_from"),
    ({"ppo__ptx__coef": 0.1}, "ppo.ptx.data.path"),
    # environments
    ({**PLAYED, "env__tools": ["played:add"]}, "env.tools, env.fn"),
    ({"env__fn": "tools", "prompts__chat": True}, "env.tools"),
    ({**TOOLS, "prompts__chat": True, "reward__fn": None}, "reward.fn"),
    (TOOLS, "prompts.chat, env.fn"),
    ({**PLAYED, "env__on_error": "drop"}, "env.on_error, reward.on_invalid"),
    ({**PLAYED, "env__max_tokens": 8}, "generation.max_new_tokens, env.max_tokens"),
    # servers
    ({"rollout__engine": "vlm"}, "rollout.engine"),
    ({"rollout__engine": "vllm"}, "rollout.urls"),
    ({"rollout__urls": ["http://h"]}, "rollout.urls, rollout.engine"),
    ({**SERVED, "rollout__urls": ["localhost:8000"]}, "rollout.urls"),
    ({**SERVED, "rollout__urls": ["http://h", "http://h/"]}, "rollout.urls"),
    ({**SERVED, "ppo__logprobs_from": "decode"}, "rollout.engine, ppo.logprobs_from"),
    ({**SERVED, "hardware__zero_stage": 3, "hardware__gather_for_generation": False},
     "hardware.gather_for_generation"),
    # trackers
    ({"tracking__trackers": ["wanbd"]}, "tracking.trackers", "out-of-range"),
    # penalties
    ({"reward__min_response_length": 33, "reward__min_response_penalty": 1.0},
     "reward.min_response_length, generation.max_new_tokens"),
]


def test_each_problem_is_named():
    for values, key, *code in RULES:
        assert named(changed(**values)) == [(key, *(code or ["contradiction"]))], values


def on_data(task: str, **values) -> TrainConfig:
    """A sound configuration of a training on a data set, with values as above."""
    lowest = {"sft": "loss", "reward_model": "accuracy"}[task]
    return set_keys(TrainConfig(), {
        "model.path": "builtin:reviews", "task.fn": task, "data.path": "data.jsonl",
        "checkpoint.metric": lowest,
        **{name.replace("__", "."): value for name, value in values.items()}})


RULES_OF_DATA = [
    ("sft", {"ppo__lam": 0.9}, "ppo.lam"),
    ("sft", {"reward_model__epochs": 2}, "reward_model.epochs"),
    ("reward_model", {"generation__top_k": 5}, "generation.top_k"),
    ("reward_model", {"data__train_on": "all"}, "data.train_on"),
    ("sft", {"data__path": None}, "data.path"),
    ("sft", {"sft__epochs": 2, "sft__num_updates": 9}, "sft.epochs, sft.num_updates"),
    ("sft", {"data__val": "1.5"}, "data.val"),
    ("sft", {"data__template": "none"}, "data.template"),
    ("sft", {"sft__micro_batch_size": 64}, "sft.micro_batch_size, sft.mini_batch_size"),
    ("reward_model", {"checkpoint__metric": "acuracy"}, "checkpoint.metric"),
]


def test_a_problem_of_a_training_on_data_is_named():
    for task in ("sft", "reward_model"):
        assert said(on_data(task)) == []
    for task, values, key, *code in RULES_OF_DATA:
        assert named(on_data(task, **values)) == [(key, *(code or ["contradiction"]))], values


def test_python_objects_stand_in_for_keys():
    config = changed(reward__fn=None, prompts__path=None, prompts__first_words=3,
                     checkpoint__metric="metrics/x")
    handed_in = frozenset({"reward.fn", "prompts.path", "reward.metric_fn"})
    assert said(config, handed_in=handed_in) == []


def test_a_wrong_value_is_not_also_a_contradiction():
    assert len(said(changed(ppo__mini_batch_size=-5, ppo__micro_batch_size=3))) == 1


def test_every_key_has_a_doc_and_its_default_is_allowed():
    for key in schema_keys().values():
        assert key.doc, key.name
    problems = {problem.key for problem in find_problems(TrainConfig())}
    assert problems == {"model.path", "reward.fn", "ppo.total_episodes, ppo.num_steps"}
