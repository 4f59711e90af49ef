"""Built-in rewards that are frozen sequence-classification models.

    reward.fn=reward_model reward.kwargs.model=/path/to/reward-model
    reward.fn=classifier reward.kwargs.model=lvwerra/distilbert-imdb reward.kwargs.label=POSITIVE
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate, chain

import torch
from torch.nn.utils.rnn import pad_sequence

from ppocli.config.text import pasted, suggestion
from ppocli.data.data_set import rows_of
from ppocli.errors import RewardError
from ppocli.rewards import scorers
from ppocli.rewards.resolve import wrong_argument
from ppocli.rewards.reward_records import differences
from ppocli.rewards.scorers import MODEL_KEY, Chats, SampleReader, Tools, check_choice

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SCORE_MEAN, SCORE_STD = "score_mean", "score_std"
"""in config.json of a model that ``ppocli reward-model`` has trained: mean and standard deviation
of the scores on its training data"""


class SequenceReward:
    """A sequence-classification model with its tokenizer; an adapter is merged into its base.

    Args:
        model: a folder, a Hub name, or ``builtin:NAME``.
        on: its input: the ``sample`` (prompt + response), the ``response`` alone, or the ``pair``
            of both as two segments.
        chat, end: as of :class:`~ppocli.rewards.scorers.SampleReader`.
        batch_size: texts per forward pass.
        max_length: longest input in tokens (None: what the model allows).
        truncation_side: which end of a longer input is cut, ``left`` or ``right``.
        device: ``auto`` (CUDA if there is any), ``cpu``, ``cuda``, ``cuda:1``, ...
        dtype: ``fp32`` or ``bf16``.
        revision: branch, tag or commit of a Hub model.
        trust_remote_code: run Python code that the model's repository ships.

    Raises:
        InputError: missing or broken files, no vocabulary, or weights that the files lack, such as
            a classification head, which transformers would fill with random numbers.
        RewardError: an argument is out of range.
    """

    def __init__(self, model: str, *, on: str = "sample", chat: bool | str = "auto",
                 end: str | None = None, batch_size: int = 32, max_length: int | None = None,
                 truncation_side: str = "left", device: str = "auto", dtype: str = "fp32",
                 revision: str | None = None, trust_remote_code: bool = False) -> None:
        check_choice("on", on, ("sample", "response", "pair"))
        check_choice("dtype", dtype, tuple(DTYPES))
        check_choice("truncation_side", truncation_side, ("left", "right"))
        for name, value in (("batch_size", batch_size),
                            ("max_length", 1 if max_length is None else max_length)):
            if type(value) is not int or value < 1:
                raise wrong_argument(name, value, "a positive whole number")
        self.name, self.batch_size = model, batch_size
        self.device = torch.device(device if device != "auto" else
                                   "cuda" if torch.cuda.is_available() else "cpu")
        self.model, self.tokenizer, limit = scorers.load_scorer(
            model, DTYPES[dtype], revision=revision, trust_remote_code=trust_remote_code)
        self.tokenizer.truncation_side = truncation_side
        self.model.to(self.device).eval().requires_grad_(False)
        config = self.model.config
        self.labels = tuple(str(config.id2label[i]) for i in range(config.num_labels))
        if max_length is not None and limit is not None and max_length > limit:
            raise RewardError(
                f"max_length={max_length} is longer than {model} can read ({limit}).",
                where="reward.kwargs.max_length", fix=f"reward.kwargs.max_length={limit}")
        self.max_length = max_length or limit
        self.check_outputs()
        self.reader = SampleReader(
            model, self.tokenizer, config, on=on, chat=chat, end=end, max_length=self.max_length,
            decoder=hasattr(self.model, "score"))

    def check_outputs(self) -> None:
        """Refuse a model with unsuitable outputs; this class accepts all."""

    def logits(self, samples: list[str], prompts: list[str], responses: list[str],
               chats: Chats = None, tools: Tools = None) -> torch.Tensor:
        """[N, labels] float32 on CPU: raw outputs of the model, a decoder's at the last attended
        token. Batches are of texts of like length, on which outputs don't depend (1e-5 in fp32)."""
        encoded = self.reader.read(samples, prompts, responses, chats, tools)
        ids = encoded["input_ids"]
        order = sorted(range(len(ids)), key=list(map(len, ids)).__getitem__)
        logits = torch.empty(len(ids), len(self.labels), dtype=torch.float32)
        for start in range(0, len(order), self.batch_size):
            rows = order[start:start + self.batch_size]
            with torch.no_grad():
                outputs = self.model(**self._padded(rows_of(encoded, rows)))
            logits[rows] = outputs.logits.to("cpu", torch.float32)
        return logits

    def _padded(self, rows: dict[str, list[list[int]]]) -> dict[str, torch.Tensor]:
        """One batch of tensors [B, T] on the model's device, padded."""
        side, pad = self.tokenizer.padding_side, self.tokenizer.pad_token_id or 0
        if hasattr(self.model, "score"):
            side, pad = "right", self._absent_id(rows["input_ids"])
        batch = dict[str, torch.Tensor]()
        for name, values in rows.items():
            batch[name] = pad_sequence(
                list(map(torch.tensor, values)), batch_first=True, padding_side=side,
                padding_value=pad if name == "input_ids" else 0).to(self.device)
        return batch

    def _absent_id(self, rows: list[list[int]]) -> int:
        """An id that no row has, as the one that pads from now on.

        Decoders with a `score` head find a row's last token by comparing ids with
        config.pad_token_id (transformers: modeling_layers.GenericForSequenceClassification). With
        pad == eos, or no pad at all, that misses a final EOS or fails. The embedding of padding is
        never attended to.
        """
        present = set(chain.from_iterable(rows))
        pad = next(i for i in range(len(present) + 1) if i not in present)
        self.model.config.get_text_config().pad_token_id = pad
        return pad


class RewardModel(SequenceReward):
    """Score of the text under an ``AutoModelForSequenceClassification`` with a single output.

    The reward model uses its own tokenizer and chat template, so it may belong to another family
    than the policy. A decoder's score is read at the last token of the text. For a model trained by
    ``ppocli reward-model``, each text ends in the token that ended the answers in training, whether
    the response ended in it or was cut off.

    Args:
        model: folder, Hub name or ``builtin:NAME``.
        on: the text to score: the ``sample`` (prompt + response), the ``response`` alone, or the
            ``pair`` of both.
        chat: whether the model's own chat template renders conversations (``auto``: if it has one
            and prompts are conversations).
        end: text after each sample, "" for none (default: the end of texts in training, if the
            model's files have it).
        batch_size: texts per forward pass.
        max_length: longest input in tokens (default: what the model allows).
        truncation_side: which end of a longer text is cut; ``left`` keeps the response.
        device: ``auto`` (CUDA where there is any), ``cpu``, ``cuda``, ``cuda:N``.
        dtype: ``fp32`` or ``bf16``.
        revision: branch, tag or commit of a Hub model.
        trust_remote_code: run Python code that the model's repository ships.

    Raises:
        InputError: the model is missing, broken, or its scoring head was never trained.
        RewardError: the model has several outputs, or an argument is out of range.
    """

    def check_outputs(self) -> None:
        """Refuse a model with several outputs.

        Raises:
            RewardError: there are several.
        """
        if len(self.labels) != 1:
            raise RewardError(
                f"{self.name} has {len(self.labels)} outputs ({', '.join(self.labels)}); a reward "
                "model has one.", where=MODEL_KEY,
                fix=f"reward.fn=classifier {pasted(f'reward.kwargs.label={self.labels[-1]}')}")

    @property
    def stored_scale(self) -> tuple[float, float] | None:
        """Mean and standard deviation of the scores on the model's training data; None if its
        configuration doesn't have them."""
        mean, std = (getattr(self.model.config, name, None) for name in (SCORE_MEAN, SCORE_STD))
        return (mean, std) if isinstance(mean, float) and isinstance(std, float) and std > 0 \
            else None

    def __call__(self, samples: list[str], prompts: list[str], responses: list[str],
                 chats: Chats = None, tools: Tools = None) -> list[float]:
        """[N] raw scores."""
        return self.logits(samples, prompts, responses, chats, tools)[:, 0].tolist()


class StepRewardModel(RewardModel):
    """Score of each step of a response (``reward.step_separator``, ``reward.step_fn``): that of the
    text through the step, under an ``AutoModelForSequenceClassification`` with a single output.

    Args:
        model: folder, Hub name or ``builtin:NAME``.
        difference: score each step after the first by its change of the score, so that the sum over
            the steps is the score of the whole text.
        on, chat, end, batch_size, max_length, truncation_side, device, dtype, revision,
            trust_remote_code: as of :class:`RewardModel`.

    Raises:
        InputError, RewardError: as :class:`RewardModel`.
    """

    def __init__(self, model: str, *, difference: bool = False, on: str = "sample",
                 chat: bool | str = "auto", end: str | None = None, batch_size: int = 32,
                 max_length: int | None = None, truncation_side: str = "left",
                 device: str = "auto", dtype: str = "fp32", revision: str | None = None,
                 trust_remote_code: bool = False) -> None:
        super().__init__(model, on=on, chat=chat, end=end, batch_size=batch_size,
                         max_length=max_length, truncation_side=truncation_side, device=device,
                         dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
        self.difference = difference

    def __call__(self, samples: list[str], prompts: list[str],  # type: ignore[override]
                 responses: list[str], steps: list[list[str]], chats: Chats = None,
                 tools: Tools = None) -> list[list[float]]:
        """[N] lists of one number per step."""
        until = [list(accumulate(one)) for one in steps]
        if not any(until):
            return [[] for _ in steps]
        before = [prompt for prompt, one in zip(prompts, until, strict=True) for _ in one]
        flat = [text for one in until for text in one]
        if chats is not None and all(chat[-1]["content"] == response for chat, response in zip(
                chats, responses, strict=True)):  # steps of an episode go through all its turns
            chats = [[*chat[:-1], {**chat[-1], "content": text}]
                     for chat, one in zip(chats, until, strict=True) for text in one]
        else:
            chats = None
        if tools is not None:
            tools = [cell for cell, one in zip(tools, until, strict=True) for _ in one]
        whole = [prompt + text for prompt, text in zip(before, flat, strict=True)]
        scores = self.logits(whole, before, flat, chats, tools)[:, 0]
        rows = [row.tolist() for row in scores.split([len(one) for one in steps])]
        return [differences(row) for row in rows] if self.difference else rows


class TextClassifier(SequenceReward):
    """Probability or logit of one label, picked by its name and never by its position.

    Args:
        model: folder, Hub name or ``builtin:NAME`` of any ``AutoModelForSequenceClassification``
            with its own tokenizer.
        label: name of the label in the model's ``id2label``; case matters only where two labels
            differ in nothing else.
        output: ``probability`` (softmax over the labels; sigmoid for a multi-label or one-label
            model) or ``logit``, the label's raw output.
        on: the text to classify: the ``sample`` (prompt + response), the ``response`` alone, or the
            ``pair`` of both for models trained on pairs.
        chat, end: as of :class:`RewardModel`.
        batch_size: texts per forward pass.
        max_length: longest input in tokens (default: what the model allows).
        truncation_side: which end of a longer text is cut.
        device: ``auto`` (CUDA if there is any), ``cpu``, ``cuda``, ``cuda:N``.
        dtype: ``fp32`` or ``bf16``.
        revision: branch, tag or commit of a Hub model.
        trust_remote_code: run Python code that the model's repository ships.

    Raises:
        InputError: the model is missing, broken or has untrained weights.
        RewardError: no such label, or an argument out of range.
    """

    def __init__(self, model: str, label: str = "POSITIVE", *, output: str = "probability",
                 on: str = "sample", chat: bool | str = "auto", end: str | None = None,
                 batch_size: int = 64, max_length: int | None = None,
                 truncation_side: str = "right", device: str = "auto", dtype: str = "fp32",
                 revision: str | None = None, trust_remote_code: bool = False) -> None:
        check_choice("output", output, ("probability", "logit"))
        super().__init__(model, on=on, chat=chat, end=end, batch_size=batch_size,
                         max_length=max_length, truncation_side=truncation_side, device=device,
                         dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
        self.position = label_position(label, self.labels, model)
        one_by_one = (len(self.labels) == 1
                      or self.model.config.problem_type == "multi_label_classification")
        self.of_logits: Callable[[torch.Tensor], torch.Tensor] = (
            torch.clone if output == "logit" else
            torch.sigmoid if one_by_one else partial(torch.softmax, dim=-1))

    def __call__(self, samples: list[str], prompts: list[str], responses: list[str],
                 chats: Chats = None, tools: Tools = None) -> list[float]:
        """[N] scores of the label, in [0, 1] for ``output=probability``."""
        scores = self.of_logits(self.logits(samples, prompts, responses, chats, tools))
        return scores[:, self.position].tolist()


def label_position(label: str, labels: tuple[str, ...], model: str) -> int:
    """Output position of ``label``: an exact match, else the only one that differs in case.

    Raises:
        RewardError: lists the labels and names the nearest.
    """
    exact = [i for i, name in enumerate(labels) if name == label]
    loose = [i for i, name in enumerate(labels) if name.lower() == str(label).lower()]
    for matches in (exact, loose):
        if len(matches) == 1:
            return matches[0]
    raise RewardError(f"{model} has no label {label!r}. {suggestion(str(label), labels)}".rstrip(),
                      where="reward.kwargs.label", fix=f"its labels: {', '.join(labels)}" + (
                          "; a reward model, as one of a single output most often is: "
                          "reward.fn=reward_model" if len(labels) == 1 else ""))
