"""Real sessions on tiny models, for tests of the engine in this process."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from helpers import mask_of, refused, save_lm, write_prompts

from ppocli.config.schema import TrainConfig
from ppocli.data.data_set import PromptBatch, joined
from ppocli.distributed.backend import open_ranks
from ppocli.distributed.ranks import StopFlag
from ppocli.models.layout import Sequences
from ppocli.models.memory import Estimate, estimate, models_of
from ppocli.ppo.experience import Experience, PPOState
from ppocli.ppo.ppo_task import PPOTask
from ppocli.ppo.rollout import Rollout, RolloutExtras
from ppocli.ppo.session import Session, build_session
from ppocli.ppo.step import collect_rollout, plan_updates, to_experience, update_of
from ppocli.sampling import token_graph
from ppocli.sampling.decode_state import Decoder
from ppocli.sampling.sampler import decode
from ppocli.sampling.samples import Generation, SamplingSpec
from ppocli.training import optimize as phase
from ppocli.training.checkpoint_writing import write_checkpoint
from ppocli.training.loop import initial_state
from ppocli.training.resume import read_checkpoint
from ppocli.training.state import Generators, PhaseClock, TrainState
from ppocli.training.task import (
    OptimizeResult,
    Plan,
    PythonObjects,
    StepContext,
    TaskSetup,
    build_task,
)


def count_good(outputs, **_: Any) -> list[float]:
    """A reward with spread on random text: how often some words occur."""
    return [float(sum(w in ("good", "great", "warm", "a") for w in o.split())) for o in outputs]


def count_letters(outputs, **_: Any) -> list[float]:
    """A reward with spread on any text: a tenth of its length."""
    return [len(output) / 10 for output in outputs]


def set_keys(cfg: Any, values: dict[str, Any]) -> Any:
    """Set dotted keys on a configuration; unknown names fail."""
    for key, value in values.items():
        node = cfg
        *parents, last = key.split(".")
        for name in parents:
            node = getattr(node, name)
        assert is_dataclass(node)
        assert last in {f.name for f in fields(node)}, key
        setattr(node, last, value)
    return cfg


FIXED = {"ppo.step_kl": None, "ppo.init_kl_coef": 0.05, "ppo.lam": 0.95}
"""a rate and a coefficient that stay what a test sets"""


def small_config(folder: Path, **keys: Any) -> TrainConfig:
    """A configuration on a tiny model and prompts below ``folder``; dots in names as ``__``."""
    lm = folder / "lm"
    if not lm.exists():
        save_lm(lm)
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        write_prompts(prompts)
    values = {"model.path": str(lm), "prompts.path": str(prompts), "ppo.num_steps": 2,
              "ppo.num_rollouts": 16, "ppo.mini_batch_size": 8, "generation.max_new_tokens": 10,
              "hardware.device": "cpu", "ppo.optimizer.lr": 1e-3,
              "ppo.scheduler.name": "constant", **FIXED}
    values.update({key.replace("__", "."): value for key, value in keys.items()})
    if values.get("ppo.advantage", "gae") == "gae":
        values.setdefault("ppo.kl_in", "reward")
    return set_keys(TrainConfig(), values)


@contextmanager
def session_of(cfg: TrainConfig, reward: Any = count_good) -> Iterator[Session]:
    """A built session; the accelerator's global state is cleared afterwards."""
    with open_ranks(cfg) as backend:
        yield build_session(cfg, backend, PythonObjects(reward_fn=reward))


def refused_session(cfg: TrainConfig, error: type[Exception], *said: str,
                    reward: Any = count_good) -> Any:
    """The error of this kind, saying these words, that building a session has to end in."""
    with refused(error, *said) as caught, session_of(cfg, reward):
        pass
    return caught.value


def rollout_of(session: Session, start: int = 0, count: int | None = None):
    """One rollout from episode ``start``."""
    count = count or session.cfg.ppo.num_rollouts
    return collect_rollout(session, session.context(), start, count)


def record_on_cpu(monkeypatch: Any) -> list[Any]:
    """Let tokens be fed on a CPU as by recorded graphs, whose work is done anew there; returns the
    list of all that will have been recorded."""
    work: list[Any] = []
    monkeypatch.setattr(token_graph, "DEVICES", ("cpu",))
    monkeypatch.setattr(token_graph, "_recordable", {})
    monkeypatch.setattr(token_graph, "waits_refused", nullcontext)
    monkeypatch.setattr(token_graph, "recorded", lambda feed, before: (
        work.append(feed) or SimpleNamespace(replay=feed)))
    return work


def rolled(cfg: TrainConfig, reward: Any = count_good, start: int = 0) -> Rollout:
    """One rollout of a session that is built for it."""
    with session_of(cfg, reward) as session:
        return rollout_of(session, start)


def own_logits(lm: Any, rollout: Rollout, row: int) -> tuple[Any, Any]:
    """What transformers' pass over one sample without padding says of each token of its response,
    and those tokens."""
    prompt = rollout.prompts.tokens[row][rollout.prompts.mask[row]]
    response = rollout.response_tokens[row][rollout.response_mask[row]]
    with torch.no_grad():
        logits = lm(input_ids=torch.cat([prompt, response])[None]).logits[0]
    return logits[-len(response) - 1:-1].double(), response


def own_logprobs(lm: Any, rollout: Rollout, row: int, temperature: float = 1.0) -> Any:
    """Logprobs of a response's tokens by :func:`own_logits`, in float64."""
    logits, response = own_logits(lm, rollout, row)
    return torch.log_softmax(logits / temperature, -1).gather(-1, response[:, None])[:, 0]


def assert_own_logprobs(lm: Any, rollout: Rollout, temperature: float = 1.0) -> None:
    """Logprobs of a rollout, and those of an equal reference, are those of :func:`own_logits`."""
    for row in range(len(rollout)):
        wanted = own_logprobs(lm, rollout, row, temperature)
        for found in (rollout.logprobs, rollout.ref_logprobs):
            torch.testing.assert_close(found[row, :len(wanted)].double(), wanted, rtol=0, atol=2e-5)


def estimate_of(cfg: TrainConfig, prompt_tokens: int, config: Any = None, *, cuda: bool = False,
                ranks: int = 1, device_bytes: int | None = None) -> Estimate:
    """What is told beforehand of a run on one host, whose longest prompt has so many tokens."""
    return estimate(cfg, models_of(cfg, config), prompt_tokens=prompt_tokens, cuda=cuda,
                    ranks=ranks, ranks_on_host=ranks, device_bytes=device_bytes)


def fresh_state(session: Session) -> PPOState:
    """PPO's own state before the first step."""
    coef = session.cfg.ppo.init_kl_coef
    return PPOState(kl_coef=coef, init_kl_coef=coef)


def experience_of(session: Session, start: int = 0) -> Experience:
    """What one rollout from episode ``start`` is learnt from."""
    rollout = rollout_of(session, start)
    return to_experience(rollout, fresh_state(session), session.cfg)


def hand_rollout(scores: list[float], lengths: list[int], finished: list[bool],
                 dense: list[list[float]] | None = None, **parts: list[float | None]) -> Rollout:
    """Samples of those lengths without a model, a critic or KL; everything else is zero."""
    count, width = len(scores), max(lengths)
    mask = mask_of(lengths, width)
    zeros = torch.zeros(count, width)
    prompts = PromptBatch(torch.ones(count, 1, dtype=torch.long),
                          torch.ones(count, 1, dtype=torch.bool), ["p"] * count, {},
                          list(range(count)), list(range(count)))
    sequences = Sequences.of_responses(prompts.tokens, prompts.mask,
                                       torch.ones(count, width, dtype=torch.long), mask)
    return Rollout(prompts, sequences, zeros, zeros, zeros, zeros, scores,
                   torch.ones(count, dtype=torch.bool), torch.tensor(finished), False,
                   ["r"] * count, parts or {"score": scores}, extras=RolloutExtras(
                       dense=None if dense is None else torch.tensor(dense)))


def optimize(session: Session, experience: Experience, stop: StopFlag | None = None, *,
             step: int = 0, updates: int = 0) -> OptimizeResult:
    """The optimize phase on an experience, after so many steps and updates."""
    plan = plan_updates(session, experience, step)
    state = TrainState(digests={}, judged_by="", step=step, updates=updates)
    return phase.optimize(PPOTask(session), plan, state, stop or StopFlag())


def backward(task: Any, plan: Plan, group: Any) -> dict[str, float]:
    """Leave the gradient of one planned update on the parameters; its terms."""
    task.trained.clear()
    _, terms, _ = phase._backward(task, plan, group, poisoned=False)
    return dict(zip(task.terms, terms.tolist(), strict=True))


def grads_of(module: Any) -> dict[str, Any]:
    """A copy of the gradients that lie on a module's parameters, by name."""
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()
            if parameter.grad is not None}


def experience_tensors(experience: Experience) -> dict[str, Any]:
    """Its tensors, those of its samples too, as ``experience/NAME``."""
    found = {field.name: getattr(record, field.name) for record in (experience, experience.extras)
             for field in fields(record)}
    found |= {"responses": experience.sequences.action_tokens,
              "response_mask": experience.sequences.mask}
    return {f"experience/{name}": value.contiguous() for name, value in found.items()
            if isinstance(value, torch.Tensor)}


def gradients(session: Session, experience: Experience) -> tuple[dict[str, Any], dict[str, float]]:
    """The gradients of one update of all samples by name, and its terms."""
    terms = backward(PPOTask(session), plan_updates(session, experience, 0),
                     update_of(session, experience, torch.arange(len(experience.sequences))))
    return grads_of(session.policy), terms


def wake_the_value_head(session: Session) -> None:
    """A head at 0 hands nothing down, and would hide the gradient of the layers below it."""
    session.policy.value_head.outer.weight.data.fill_(0.05)


@contextmanager
def data_task_of(lm: Path, rows: Any, val: Any, keys: dict[str, Any], **over: Any) -> Iterator[Any]:
    """The task of a training on a data set, on rows in place of its files, with keys and others
    over them; dots in names of the latter as ``__``."""
    cfg = set_keys(TrainConfig(), {
        "model.path": str(lm), "hardware.device": "cpu", "hardware.gemm": "default", **keys,
        **{key.replace("__", "."): value for key, value in over.items()}})
    with open_ranks(cfg) as backend:
        yield build_task(TaskSetup(cfg, backend, PythonObjects(data=rows, val_data=val)))


def idle_context() -> StepContext:
    """What a step needs of a caller that never stops it."""
    return StepContext(StopFlag(), PhaseClock(torch.device("cpu")))


def planned(task: Any, state: TrainState | None = None) -> tuple[Any, Plan]:
    """The next batch of a task, in the state before the first step or in this one, and its plan."""
    state = initial_state(task) if state is None else state
    batch = task.collect(state, idle_context())
    return batch, task.plan(state, batch)


def generate(lm: Any, tokens: Any, mask: Any, spec: SamplingSpec, noise: Any, *,
             limits: Any = None, at_once: int | None = None, chunk: int | None = None,
             ready: Any = lambda _: None, **how: Any) -> Generation:
    """Responses in the way that suits the model, each chunk shown to ``ready`` when it is there."""
    parts: list[Generation] = []
    for part in decode(Decoder(lm, spec, **how), tokens, mask, noise, limits=limits,
                       at_once=at_once, chunk=chunk):
        ready(part)
        parts.append(part)
    return parts[0] if len(parts) == 1 else joined([
        replace(part, frozen_states=None) for part in parts])


def state_now(session: Session) -> TrainState:
    """The loop's state before the first step, with the global random generators as they are."""
    return TrainState(digests={}, judged_by="", generators=Generators.now(session.backend.device))


def save_session(session: Session, folder: Path) -> None:
    """A checkpoint of the session in a folder that is there, written by all ranks in step."""
    write_checkpoint(PPOTask(session), folder, state_now(session))


def load_session(session: Session, folder: Path) -> None:
    """What :func:`save_session` wrote, into the session."""
    read_checkpoint(PPOTask(session), folder)


def assert_same_responses(found: Any, wanted: Any, atol: float = 2e-5) -> None:
    """Two decodings, however they were made: the same tokens, and figures as near as rounding."""
    for name in ("tokens", "mask", "finished"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    for name in ("logprobs", "values"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=0, atol=atol)


def prompt_and_response(*given: Any) -> Sequences:
    """One response behind each prompt: prompts and mask padded on the left, responses and mask on
    the right, and a decoder's start token."""
    return Sequences.of_responses(*given)


def weights_of(session: Session) -> dict[str, Any]:
    """A copy of all weights of the policy."""
    return {n: t.detach().clone() for n, t in session.policy.state_dict().items()}
