"""A policy that answers prompts outside of training: for ``ppocli generate``, ``ppocli chat`` and
``TrainedRun.generate``; and what ``PPOTrainer.generate`` takes and returns."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch

from ppocli.config import keys, problems, schema
from ppocli.data.chat_text import prompt_cells, prompt_texts
from ppocli.data.files import Row
from ppocli.data.shapes import Shapes, with_prompt
from ppocli.data.sources import training_spec
from ppocli.distributed.backend import Backend
from ppocli.errors import ConfigError, OutOfMemoryError
from ppocli.models.loading.language_model import LoadedLM, fit_vocabulary
from ppocli.models.loading.tokenizer import load_tokenizer
from ppocli.models.policy import Policy
from ppocli.ppo.policy_samples import in_steps
from ppocli.rewards.reward_records import RewardRequest
from ppocli.rewards.scoring import Reward, build_reward
from ppocli.sampling import decoding, sampler
from ppocli.sampling.decode_state import Decoder
from ppocli.sampling.prompting import BATCH, Answer, answer_prompts, check_lengths, prompt_ids
from ppocli.sampling.samples import SAMPLING_KEYS
from ppocli.training.build_models import ENGINES, sampling_specs

log = logging.getLogger("ppocli")

CHANGEABLE = (*SAMPLING_KEYS, "stop_sequences", "ignore_eos")
"""what may be changed of a run's ``generation`` when its policy is asked for responses"""


@dataclass(frozen=True)
class Player:
    """A loaded policy with its tokenizer. Made by :func:`load_player`."""

    name: str
    """how output and messages call it"""
    tokenizer: Any
    loaded: LoadedLM
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    servers: Any = None
    """what samples in place of our own loop; see :func:`served`"""
    records: bool = False
    """as of :class:`~ppocli.sampling.decode_state.Decoder`"""

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts can be rendered as a conversation."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def render(self, prompts: Sequence[Any], *, chat: bool, tools: Sequence[Any] | None = None
               ) -> list[str]:
        """The text of each prompt as the model sees it.

        Args:
            prompts: texts; with ``chat`` also lists of ``{"role": ..., "content": ...}``.
            chat: render them with the tokenizer's chat template, ready for the answer.
            tools: of each prompt, as in the column ``tools``.

        Raises:
            InputError: there is no chat template, it refuses a conversation, tools are none, or a
                text holds half of a UTF-16 pair.
        """
        cells = zip(prompts, tools or [None] * len(prompts), strict=True)
        rows = [Row(f"prompt {number}", {"prompt": prompt, "tools": its_tools})
                for number, (prompt, its_tools) in enumerate(cells, start=1)]
        spec = training_spec(schema.PromptsConfig(items=list(prompts), chat=chat, tools="tools"),
                             None)
        rows = [with_prompt(row, spec, Shapes(spec, [])) for row in rows]
        return prompt_texts(prompt_cells(rows, spec), rows, spec, self.tokenizer)

    def tokens(self, texts: Sequence[str], generation: schema.GenerationConfig, *,
               chat: bool = False) -> list[list[int]]:
        """The token ids of each text, checked to leave room for a response.

        Args:
            texts: from :meth:`render`, with the same ``chat``.

        Raises:
            ConfigError: a prompt without tokens, or one too long for the model.
        """
        ids = prompt_ids(self.tokenizer, texts, rendered=chat,
                         whole=self.loaded.decoder_start is not None)
        spec, *_ = sampling_specs(generation, self.tokenizer, self.loaded)
        check_lengths(self.loaded.lm, ids, spec)
        return ids

    def answers(self, prompts: Sequence[Sequence[int]], generation: schema.GenerationConfig, *,
                seed: int, num_samples: int = 1, first: int = 0, batch: int = BATCH,
                poll: Callable[[], None] = lambda: None,
                show: Callable[[str], None] | None = None) -> Iterator[list[Answer]]:
        """Sampled responses, a batch at a time; see :func:`answer_prompts`.

        Args:
            prompts: from :meth:`tokens`.

        Raises:
            DivergedError: the model's probabilities are not finite.
            OutOfMemoryError: a batch doesn't fit the device.
        """
        spec, *_ = sampling_specs(generation, self.tokenizer, self.loaded)
        decoder = Decoder(self.loaded.lm, spec, self.tokenizer, self.loaded.decoder_start,
                          poll=poll, records=self.records)
        made = answer_prompts(decoder, prompts, seed=seed, num_samples=num_samples, first=first,
                              batch=batch, show=show, servers=self.servers)
        try:
            yield from sampler.stepped(made, self.autocast)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"{self.name} ran out of memory with {batch} responses at once.",
                                   where="ppo.chunk_size", fix="set it lower, or "
                                   "generation.max_new_tokens") from error


def load_player(cfg: schema.ModelConfig, name: str, backend: Backend | None = None) -> Player:
    """Load a policy.

    Args:
        cfg: ``path`` is the policy's, as of :func:`~.model_config.policy_config`.
        backend: where and how precisely to compute (default: the CPU, in fp32).

    Raises:
        InputError: model or tokenizer are missing or unusable.
    """
    tokenizer, loaded = load_tokenizer(cfg), decoding.load_decodable(cfg)
    fit_vocabulary(tokenizer, loaded.lm, cfg)
    decoding.say_decoding(loaded.lm)
    if backend is None:
        return Player(name, tokenizer, loaded)
    loaded.lm.to(backend.device)
    return Player(name, tokenizer, loaded, backend.autocast, records=backend.cuda_graphs)


@contextmanager
def served(player: Player, cfg: schema.TrainConfig, backend: Backend) -> Iterator[Player]:
    """The player with the servers of ``cfg.rollout`` to sample, which have its weights meanwhile.

    Raises:
        ConfigError: servers can't have such a model.
        SamplerError: a server is missing, or serves something else.
    """
    cfg = replace(cfg, run_name=None)  # no run is there to go on with
    servers: Any = ENGINES["vllm"](sampler.SamplerSetup(cfg, backend, player.tokenizer,
                                                        player.loaded))
    with servers.acting(Policy(player.loaded.lm, None)):
        yield replace(player, servers=servers)


def changed_sampling(cfg: schema.TrainConfig, changes: Mapping[str, Any], *, draws: bool = False
                     ) -> schema.GenerationConfig:
    """The ``generation`` of ``cfg`` with ``changes``; what it sets for evaluation doesn't count.

    Args:
        changes: by name, of :data:`CHANGEABLE`.
        draws: whether lengths are drawn by ``length_sampler``, as in training.

    Raises:
        ConfigError: an unknown name, a value of another type, or one out of range.
    """
    if unknown := sorted(set(changes) - set(CHANGEABLE)):
        raise ConfigError(f"{unknown[0]!r} is not a sampling setting.",
                          fix=f"one of {', '.join(CHANGEABLE)}")
    for name, value in changes.items():
        _check_type(name, value)
    # a length that is set is not drawn
    sampler_of_lengths = (cfg.generation.length_sampler
                          if draws and "max_new_tokens" not in changes else None)
    generation = replace(cfg.generation, eval=schema.EvalGenerationConfig(),
                         length_sampler=sampler_of_lengths, **changes)
    problems.raise_problems([
        problem for problem in problems.find_problems(
            replace(cfg, generation=generation, reward=schema.RewardConfig()))
        if problem.key.startswith("generation.")])
    return generation


def _check_type(name: str, value: Any) -> None:
    key = keys.schema_keys()[f"generation.{name}"]
    types = {int: Integral, float: Real}.get(key.item, key.item)
    values = list(value) if key.kind == "list" and isinstance(value, list | tuple) else [value]
    right = all(isinstance(each, types) and isinstance(each, bool) == (key.item is bool)
                for each in values) and (key.kind != "list" or not isinstance(value, str))
    if not right and not (value is None and key.optional):
        raise ConfigError(f"{name} is {value!r}; it takes {key.expected}.", where=name)


def own_sampling(loaded: LoadedLM) -> dict[str, Any]:
    """What a model's generation_config.json says about sampling, as changes for
    :func:`changed_sampling`. A temperature of 0 means greedy there."""
    declared = loaded.generation_config.to_diff_dict()
    changes = {name: declared[name] for name in SAMPLING_KEYS if declared.get(name) is not None}
    if changes.get("temperature", 1.0) <= 0:
        del changes["temperature"]
        changes["do_sample"] = False
    return changes


def build_judge(cfg: schema.RewardConfig, columns: Sequence[str]) -> Reward:
    """The reward that scores responses; the files of the user's code are logged.

    Raises:
        RewardError: it can't be imported or built, or asks for columns that there aren't.
    """
    reward = build_reward(cfg)
    reward.check_columns(columns)
    for path in reward.code_files:
        log.info("running code from %s", path)
    return reward


def scores_of(reward: Reward, player: Player, prompts: Sequence[str], answers: Sequence[Answer],
              columns: Mapping[str, Sequence[Any]], messages: Sequence[Any] = ()
              ) -> list[float | None]:
    """The score of each answer; None where ``reward.on_invalid=skip`` drops the sample.

    Args:
        prompts: texts from :meth:`Player.render`, all of them; as are the ``columns``.
        messages: the conversations that were rendered: texts or lists of messages.

    Raises:
        RewardError: the function raised, or returned something unusable.
    """
    places = [answer.prompt for answer in answers]
    texts = [prompts[i] for i in places]
    # a decoder's response is read without its prompt
    before: Any = [[]] * len(places) if player.loaded.decoder_start is not None else prompt_ids(
        player.tokenizer, texts, rendered=bool(messages), whole=False) if reward.has_steps else ()
    scores = reward.score(in_steps(reward, RewardRequest(
        prompts=texts, prompt_ids=before, responses=[answer.text for answer in answers],
        response_ids=[answer.ids for answer in answers],
        columns={name: [cells[i] for i in places] for name, cells in columns.items()},
        tokenizer=player.tokenizer, ended=[answer.finished for answer in answers],
        messages=[[{"role": "user", "content": cell}] if isinstance(cell, str) else cell
                  for cell in (messages[i] for i in places if messages)])))
    return [score if valid else None
            for score, valid in zip(scores.scores, scores.valid, strict=True)]


# In a loop of the user's own ----------------------------------------------------------------------

def called(cfg: schema.TrainConfig, arguments: Mapping[str, Any]
           ) -> tuple[schema.GenerationConfig, list[int] | None]:
    """Generation arguments of one call as ``generation``, and the ids that end a response if they
    say so.

    Args:
        arguments: of :data:`CHANGEABLE`; or as TRL's scripts have them for
            transformers' ``generate``: ``top_k=0.0``, ``min_length=-1``, ``pad_token_id``,
            ``eos_token_id`` (-1: none).

    Raises:
        ConfigError: an unknown argument, or a value that makes no sense.
    """
    changes = {**arguments}
    changes.pop("pad_token_id", None)  # lengths say where a response ends
    if (changes.pop("min_length", None) or 0) > 0:
        raise ConfigError("min_length counts the prompt's tokens too.", where="min_length",
                          fix="min_new_tokens=N counts those of the response")
    if isinstance(changes.get("top_k"), float) and changes["top_k"].is_integer():
        changes["top_k"] = int(changes["top_k"])
    ends = changes.pop("eos_token_id", None)
    if "eos_token_id" in arguments:
        ends = [i for i in (ends if isinstance(ends, list) else [ends]) if i is not None and i >= 0]
    return changed_sampling(cfg, changes, draws=True) if changes else cfg.generation, ends
