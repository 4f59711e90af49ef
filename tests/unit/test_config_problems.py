"""What is wrong with a configuration, all at once and with its source."""

from dataclasses import replace

import pytest
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


@pytest.mark.parametrize(("values", "text"), [
    ({"ppo__cliprange": 5.0}, "ppo.cliprange: 5 must be > 0 and < 1"),
    ({"ppo__cliprange": float("nan")}, "ppo.cliprange: nan must be a finite number"),
    ({"reward__timeout": 1e300}, "reward.timeout: 1e+300 must be > 0 and <= 1e+09"),
    ({"seed": 2**64}, "seed: 18446744073709551616 must be >= 0 and < 9.22337e+18"),
    ({"checkpoint__keep_last": 0}, "checkpoint.keep_last: 0 must be >= 1"),
    ({"hardware__device": "cud"}, "must be one of auto, cpu, cuda; did you mean cuda?"),
    ({"hardware__precision": "fp16"}, "fp16 must be one of fp32, bf16; fp16 holds nothing below"),
    ({"hardware__weights": "bf16"}, "computed with in bf16: set hardware.precision=bf16"),
    ({"hardware__precision": "bf16", "hardware__weights": "bf16", "hardware__zero_stage": 2},
     "DeepSpeed makes its own copies of fp32 weights"),
    ({"hardware__precision": "bf16", "hardware__weights": "bf16",
      "model__peft": {"type": "lora"}}, "the type of its base is model.dtype"),
    ({"hardware__precision": "bf16", "hardware__weights": "bf16",
      "ppo__optimizer__name": "adamw_8bit"}, "adamw_8bit keeps no master copies"),
    ({"ppo__optimizer__betas": [0.9, 1.5]}, "1.5 must be >= 0 and < 1"),
    ({"ppo__optimizer__betas": [0.9]}, "must be two numbers"),
    ({"ppo__total_episodes": None}, "say how long to train"),
    ({"ppo__num_steps": 3}, "100 episodes and 3 steps contradict each other"),
    ({"ppo__scheduler__name": "constant_with_warmup"}, "it is constant, with the key warmup_up"),
    ({"ppo__epochs": 2}, "100 episodes and 2 epochs contradict each other"),
    ({"ppo__mini_batch_size": 500}, "mini_batch_size 500 must be at most num_rollouts 128"),
    ({"ppo__micro_batch_size": 64}, "micro_batch_size 64 must be at most mini_batch_size 32"),
    ({"ppo__kl_controller": "adaptive", "ppo__init_kl_coef": 0.0}, "can never leave 0"),
    ({"model__reference": replace(TrainConfig().model.reference, kind="none")},
     "needs a reference"),
    ({"model__path": "???"}, "model.path: missing"),
    ({"reward__fn": None}, "reward.fn: missing"),
    ({"reward__fns": {"a": {"fn": "length"}}}, "one function or several, not both"),
    ({"reward__fn": None, "reward__fns": {"a": {"fn": "x", "wieght": 2}}},
     "unknown key wieght; did you mean weight?"),
    ({"reward__fn": None, "reward__fns": {"a": {"weight": 2}}}, "reward.fns.a: needs fn"),
    ({"reward__fn": None, "reward__fns": {"a": {"fn": "x", "weight": True}}}, "weight true"),
    ({"reward__kwargs": {"model": "???"}}, "reward.kwargs: model is missing"),
    ({"reward__ref_mean": 0.5}, "reward.scale=ref only, not none"),
    ({"checkpoint__metric": "loss"}, "must be reward_mean or metrics/NAME"),
    ({"checkpoint__metric": "metrics/x"}, "reward.metric_fn, which is not given"),
    ({"prompts__items": ["a"]}, "a source or inline prompts, not both"),
    ({"prompts__path": None, "prompts__items": []}, "at least one prompt"),
    ({"prompts__length_sampler": [5, 2]}, "[5, 2] must be [min, max]"),
    ({"prompts__length_sampler": [3]}, "[3] must be [min, max]"),
    ({"prompts__length_sampler": [0, 4]}, "prompts.length_sampler: 0 must be >= 1"),
    ({"prompts__eval__chat": True, "prompts__length_sampler": [1, 2]},
     "prompts.eval.length_sampler: would cut off the end of the chat template"),
    ({"prompts__template": "no place"}, "has no placeholder such as {prompt}"),
    ({"prompts__path": None, "prompts__first_words": 4}, "there are no prompts to apply it to"),
    ({"generation__ignore_eos": True, "reward__missing_eos_penalty": 1.0},
     "no response could end, and each would get the penalty"),
    ({"generation__min_new_tokens": 50}, "min_new_tokens 50 must be at most max_new_tokens 32"),
    ({"generation__eval": replace(TrainConfig().generation.eval, min_new_tokens=50)},
     "at evaluation min_new_tokens 50"),
    ({"generation__stop_sequences": [""]}, "must not hold an empty text"),
    ({"run_name": "a/b"}, "a/b must be a plain folder name"),
    ({"run_name": ".a"}, ".a must be a plain folder name that doesn't begin with a dot"),
    ({"output_dir": "M\udcfcsik"}, "is no UTF-8, which config.yaml could not hold"),
    ({"resume": "auto"}, "resume=auto needs run_name"),
    # contradictions of the algorithm
    ({"ppo__advantage": "grpo"}, "grpo compares samples of the same prompt: set ppo.n to 2"),
    ({"ppo__n": 3}, "num_rollouts 128 must be a multiple of n 3"),
    ({"ppo__n": 8}, "total_episodes 100 must be a multiple of n 8"),
    ({"ppo__advantage": "grpo", "ppo__n": 4, "generation__do_sample": False}, "are all alike"),
    ({"ppo__advantage": "rloo", "ppo__n": 4, "ppo__whiten_rewards": True},
     "rloo normalises the rewards of whole responses itself"),
    ({"ppo__group_std": False}, "group_std belongs to grpo"),
    ({"ppo__batch_std": True}, "batch_std belongs to grpo"),
    ({"ppo__advantage": "grpo", "ppo__n": 4, "ppo__batch_std": True, "ppo__group_std": False},
     "divides by a deviation and group_std=false by none"),
    ({"ppo__policy_loss": "dis", "ppo__dual_clip": 3.0}, "dis bounds its weights itself"),
    ({"ppo__advantage": "reinforce_pp", "ppo__critic_warmup_steps": 2}, "no critic to warm up"),
    ({"ppo__advantage": "reinforce_pp", "ppo__critic_epochs": 2}, "leave critic_epochs out"),
    ({"ppo__advantage": "reinforce_pp", "ppo__value_pretrain_steps": 2},
     "leave value_pretrain_steps out"),
    ({"ppo__critic_warmup_steps": 1, "ppo__value_pretrain_steps": 2},
     "both train the value function alone at first"),
    ({"ppo__value_pretrain_until": 0.3}, "say in ppo.value_pretrain_steps how many"),
    ({"ppo__critic_epochs": 1, "hardware__zero_stage": 2}, "set ppo.critic_epochs=null, or hard"),
    ({"ppo__value_pretrain_steps": 1, "hardware__zero_stage": 3}, "set ppo.value_pretrain_steps=0"),
    ({"ppo__critic_warmup_steps": 1, "hardware__zero_stage": 1, "ppo__optimizer__name": "sgd",
      "ppo__optimizer__momentum": 0.9}, "set ppo.critic_warmup_steps=0"),
    ({"ppo__advantage": "rloo", "ppo__n": 2, "ppo__lam_value": 1.0}, "lam_value belongs to gae"),
    ({"ppo__advantage": "rloo", "ppo__n": 2, "ppo__lam_alpha": 0.1}, "lam_alpha belongs to gae"),
    ({"ppo__advantage": "reinforce_pp", "ppo__optimizer__value_lr": 1e-3}, "no value head"),
    ({"ppo__advantage": "reinforce_pp", "model__value__kind": "model"}, "no value function"),
    ({"ppo__kl_in": "loss", "ppo__kl_estimator": "full", "hardware__zero_stage": 3},
     "and this one lies in parts"),
    ({"ppo__dynamic_sampling": 2}, "gae doesn't compare the samples of a prompt"),
    ({"ppo__advantage": "rloo", "ppo__n": 2, "ppo__dynamic_sampling": 2, "ppo__epochs": 1,
      "ppo__total_episodes": None}, "passes over them can't be planned"),
    ({"model__reference__sync_every": 2, "model__num_layers_unfrozen": 1},
     "kind shared has no weights of its own"),
    ({"model__reference__sync_every": 2, "model__reference__kind": "none",
      "ppo__init_kl_coef": 0.0}, "there is no reference to follow"),
    ({"model__reference__sync_every": 2, "model__reference__kind": "copy",
      "model__peft": {"type": "lora"}}, "a copy has no adapter"),
    ({"model__reference__sync_every": 2, "model__reference__path": "other"},
     "can't take the policy's"),
    ({"model__reference__sync_every": 2, "hardware__zero_stage": 3}, "lie in parts: use"),
    ({"model__reference__sync_alpha": 0.5}, "sync_every steps, which is not set"),
    ({"ppo__dual_clip": 1.0}, "ppo.dual_clip: 1 must be > 1"),
    ({"ppo__scheduler__name": "polynomial", "ppo__scheduler__kwargs": {"powr": 2}},
     "ppo.scheduler.kwargs.powr: the schedule polynomial has power; did you mean power?"),
    ({"ppo__value_scheduler__kwargs": {"power": 2}}, "the schedule linear has no arguments"),
    ({"ppo__scheduler__name": "inverse_sqrt", "ppo__scheduler__kwargs": {"timescale": True}},
     "True must be a number above 0"),
    ({"ppo__scheduler__name": "warmup_stable_decay"}, "ppo.scheduler.kwargs.num_decay_steps=100"),
    ({"ppo__scheduler__name": "warmup_stable_decay",
      "ppo__scheduler__kwargs": {"num_decay_steps": 9, "decay_type": "fast"}},
     "fast must be cosine, linear, 1-sqrt"),
    ({"ppo__optimizer__name": "sgd", "ppo__optimizer__betas": [0.9, 0.95]},
     "sgd has no betas: leave it at [0.9, 0.999]"),
    ({"ppo__optimizer__name": "adafactor", "ppo__optimizer__eps": 1e-6},
     "adafactor has no eps: leave it at 1e-08"),
    ({"ppo__optimizer__momentum": 0.9}, "adamw has no momentum: leave it at 0"),
    ({"ppo__optimizer__name": "adafactor", "hardware__zero_stage": 2}, "ZeRO shards its state"),
    ({"ppo__optimizer__name": "adamw_8bit", "hardware__zero_stage": 1}, "ZeRO shards its state"),
    ({"tracking__trackers": ["a/own.py:A", "b/own.py:A"]}, "in files of different names"),
    # adapters
    ({"model__peft": {"r": 8}}, "model.peft: type is missing"),
    ({"model__peft": {"type": "lore"}},
     "lore must be one of lora, prefix, prompt; did you mean lora?"),
    ({"model__peft": {"type": "lora", "lora_alfa": 8}}, "did you mean lora_alpha"),
    ({"model__peft": {"type": "lora", "r": "many"}},
     "model.peft.r: 'many' must be of the type int"),
    ({"model__peft": {"type": "lora", "lora_dropout": 1.0}},
     "model.peft.lora_dropout: 1.0 must be >= 0"),
    ({"model__peft": {"type": "lora", "init_lora_weights": "pissa"}}, "pissa must be one of true"),
    ({"model__peft": {"type": "lora", "inference_mode": True}}, "is filled in by ppocli"),
    ({"model__peft": {"type": "lora", "task_type": "SEQ_CLS"}},
     "SEQ_CLS must be CAUSAL_LM or SEQ_2_SEQ"),
    ({"model__peft": {"type": "lora"}, "model__num_layers_unfrozen": 1},
     "the whole base is frozen"),
    ({"model__peft": {"type": "prefix", "num_virtual_tokens": 4},
      "model__gradient_checkpointing": True}, "which gradient checkpointing doesn't use"),
    ({"model__peft": {"type": "lora", "use_dora": True}, "hardware__zero_stage": 3},
     "DoRA reads the norms"),
    ({"model__quantization": "4bit"}, "4bit weights can't be trained"),
    # critics and references
    ({"ppo__value_optimizer__name": "sgd", "ppo__value_optimizer__betas": [0.9, 0.9]},
     "sgd has no betas"),
    ({"ppo__value_optimizer__name": "sgd", "hardware__zero_stage": 2}, "drives one optimizer"),
    ({"model__value__path": "x"}, "set model.value.kind=model"),
    ({"model__value__kind": "branch"}, "a branch needs layers of its own"),
    ({"model__value__num_layers_unfrozen": 1}, "a head has no layers of its own"),
    ({"model__value__freeze_attention": True}, "a head has no attention of its own"),
    ({"model__reference__path": "x", "model__reference__kind": "shared"},
     "is made from the policy"),
    ({"model__reference__device": "gpu7"}, "must be cpu, cuda or cuda:N"),
    ({"model__reference__device": "cpu", "model__num_layers_unfrozen": 1}, "lies with the policy"),
    ({"model__reference__device": "cpu", "ppo__kl_estimator": "full"}, "must lie on one device"),
    # samples of another policy
    ({"ppo__importance__level": "token", "ppo__old_logprobs": "sampler"}, "need no correction"),
    ({"ppo__importance__level": "token", "ppo__logprobs_from": "decode"}, "compared with itself"),
    ({"ppo__importance__reject": {"token_k1": 2}, "ppo__logprobs_from": "decode"},
     "compared with itself"),
    ({"ppo__importance__cap": 3.0}, "no weights to cap"),
    ({"ppo__importance__reject": {"token_k4": 2}}, "did you mean token_k"),
    ({"ppo__importance__reject": {"token_k1": 0.5}}, "0.5 must be above 1"),
    ({"ppo__importance__reject": {"token_k1": [2, 1]}}, "the smallest ratio and a larger one"),
    ({"ppo__importance__reject": {"seq_mean_k3": [0.1, 1]}}, "the largest value alone"),
    ({"ppo__importance__reject": {"seq_mean_k3": "high"}}, "high must be a number above 0"),
    ({"ppo__staleness": 1, "ppo__logprobs_from": "decode"}, "an earlier policy's"),
    ({"ppo__old_logprobs": "sampler", "ppo__logprobs_from": "forward"}, "is the trained policy's"),
    ({"ppo__staleness": 1, "ppo__dynamic_sampling": 3, "ppo__advantage": "grpo", "ppo__n": 4},
     "wait unscored"),
    ({"ppo__staleness": -1}, "ppo.staleness: -1 must be >= 0"),
    ({"ppo__ptx__coef": 0.1}, "ppo.ptx.data.path: ppo.ptx.coef mixes examples in, and none"),
    # environments
    ({"env__max_turns": 3}, "this belongs to env.fn"),
    ({**PLAYED, "env__tools": ["played:add"]}, "these are played by env.fn=tools"),
    ({"env__fn": "tools", "prompts__chat": True}, "there are none: env.tools="),
    ({**TOOLS, "prompts__chat": True, "reward__fn": None}, "tools give no reward"),
    (TOOLS, "set prompts.chat=true"),
    ({**PLAYED, "env__on_error": "drop"}, "set reward.on_invalid=skip"),
    ({**PLAYED, "prompts__eval__chat": True}, "an environment speaks as prompts.chat"),
    ({**PLAYED, "prompts__chat": True, "prompts__eval__tools": "tools"}, "tools of its own"),
    ({"prompts__tools": "tools"}, "prompts.tools: is told to the chat template"),
    ({**PLAYED, "ppo__staleness": 1}, "samples that wait keep no episodes"),
    ({**PLAYED, "env__max_tokens": 8}, "doesn't fit an episode of 8"),
    ({"ppo__gae_unit": "turn"}, "only an environment"),
    # servers
    ({"rollout__engine": "vlm"}, "did you mean vllm"),
    ({"rollout__engine": "vllm"}, "rollout.urls"),
    ({"rollout__urls": ["http://h"]}, "rollout.engine=vllm"),
    ({**SERVED, "rollout__urls": ["localhost:8000"]}, "rollout.urls"),
    ({**SERVED, "rollout__urls": ["http://h", "http://h/"]}, "each server once"),
    ({**SERVED, "rollout__token_env": "a b"}, "token_env"),
    ({**SERVED, "ppo__logprobs_from": "decode"}, "ppo.logprobs_from"),
    ({**SERVED, "model__peft": {"type": "prefix", "num_virtual_tokens": 2}}, "model.peft.type"),
    ({**SERVED, "hardware__zero_stage": 3, "hardware__gather_for_generation": False},
     "hardware.gather_for_generation"),
    ({**SERVED, "rollout__launch": True}, "rollout.python=PATH"),
    ({**SERVED, "rollout__ahead": 1, "ppo__staleness": 1}, "ppo.staleness"),
    # trackers
    ({"tracking__trackers": ["wanbd"]}, "tracking.trackers: wanbd must be one of tensorboard, "
     "wandb, trackio or an import path; did you mean wandb?"),
    ({"tracking__trackers": ["wandb", "wandb"]}, "once"),
    ({"tracking__trackers": ["tensorboard"], "tracking__project": "films"},
     "is among the trackers"),
    # penalties
    ({"reward__min_response_length": 3}, "min_response_length needs min_response_penalty"),
    ({"reward__min_response_penalty": 3.0}, "min_response_penalty needs min_response_length"),
    ({"reward__overlong_penalty": 1.0}, "overlong_penalty needs overlong_buffer"),
    ({"reward__overlong_buffer": 33}, "overlong_buffer 33 must be at most max_new_tokens 32"),
    ({"reward__min_response_length": 33, "reward__min_response_penalty": 1.0},
     "min_response_length 33 must be at most max_new_tokens 32"),
    ({"reward__penalty_mode": "replace"}, "replace is used with missing_eos_penalty or"),
])
def test_each_problem_is_named(values, text):
    lines = said(changed(**values))
    assert len(lines) == 1
    assert text in lines[0]


@pytest.mark.parametrize("peft", [
    None, {}, {"type": "lora"}, {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8},
    {"type": "lora", "target_modules": ["c_attn"], "use_rslora": True},
    {"type": "lora", "use_dora": True}, {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 4},
    {"type": "prompt", "num_virtual_tokens": 4, "prompt_tuning_init": "RANDOM"}])
def test_what_peft_takes_is_taken(peft):
    assert said(changed(model__peft=peft)) == []


def on_data(task: str, **values) -> TrainConfig:
    """A sound configuration of a training on a data set, with values as above."""
    lowest = {"sft": "loss", "reward_model": "accuracy"}[task]
    return set_keys(TrainConfig(), {
        "model.path": "builtin:reviews", "task.fn": task, "data.path": "data.jsonl",
        "checkpoint.metric": lowest,
        **{name.replace("__", "."): value for name, value in values.items()}})


@pytest.mark.parametrize(("task", "values", "text"), [
    ("sft", {"ppo__lam": 0.9}, "ppo.lam: ppocli sft has no use for it: leave it out"),
    ("sft", {"reward_model__epochs": 2}, "reward_model.epochs: ppocli sft has no use for it"),
    ("reward_model", {"generation__top_k": 5}, "ppocli reward-model has no use for it"),
    ("reward_model", {"data__train_on": "all"}, "data.train_on: ppocli reward-model has no use"),
    ("sft", {"data__path": None}, "data.path: missing; it must be given: data.path=FILE|FOLDER"),
    ("sft", {"sft__epochs": 2, "sft__num_updates": 9}, "2 epochs and 9 updates contradict each"),
    ("sft", {"data__val": "1.5"}, "1.5 must be a path, or a share between 0 and 1"),
    ("sft", {"data__val": "data.jsonl"}, "made on the training data itself"),
    ("sft", {"data__template": "none"}, "'none' has no placeholder such as {prompt}"),
    ("sft", {"sft__micro_batch_size": 64}, "micro_batch_size 64 must be at most mini_batch_size"),
    ("reward_model", {"checkpoint__metric": "acuracy"}, "did you mean accuracy?"),
    ("sft", {"generation__eval__top_k": [1, 2]}, "[1, 2] are several values, which ppocli train "
                                                 "alone compares: give one"),
])
def test_a_problem_of_a_training_on_data_is_named(task, values, text):
    assert said(on_data(task)) == []
    lines = said(on_data(task, **values))
    assert len(lines) == 1
    assert text in lines[0]


def test_every_optimizer_takes_what_it_uses():
    for name, over in (("adamw", {"betas": [0.8, 0.9], "eps": 1e-6}), ("sgd", {"momentum": 0.9}),
                       ("adafactor", {}), ("adamw_8bit", {"betas": [0.8, 0.9]})):
        keys = {f"ppo__optimizer__{key}": value for key, value in over.items()}
        assert said(changed(ppo__optimizer__name=name, ppo__optimizer__weight_decay=0.1,
                            ppo__optimizer__value_lr=1e-3, **keys)) == []


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
