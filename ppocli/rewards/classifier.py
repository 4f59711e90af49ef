"""Built-in reward ``classifier``: the score that a text-classification model gives one label.

    reward.fn=classifier reward.kwargs.model=lvwerra/distilbert-imdb reward.kwargs.label=POSITIVE
"""

from ppocli.config.text import suggestion
from ppocli.errors import RewardError
from ppocli.rewards.reading import check_choice
from ppocli.rewards.reward_model import Chats, SequenceReward


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
        chat, end: as of :class:`~ppocli.rewards.reward_model.RewardModel`.
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
        self.output = output

    def __call__(self, samples: list[str], prompts: list[str], responses: list[str],
                 chats: Chats = None) -> list[float]:
        """[N] scores of the label, in [0, 1] for ``output=probability``."""
        logits = self.logits(samples, prompts, responses, chats)
        if self.output == "probability":
            multi_label = self.model.config.problem_type == "multi_label_classification"
            single = multi_label or len(self.labels) == 1
            logits = logits.sigmoid() if single else logits.softmax(dim=-1)
        return logits[:, self.position].tolist()


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
    near = suggestion(str(label).lower(), (name.lower() for name in labels))
    near = next((f"Did you mean {n!r}?" for n in labels if f"{n.lower()!r}" in near), "")
    raise RewardError(f"{model} has no label {label!r}. {near}".rstrip(),
                      where="reward.kwargs.label", fix=f"its labels: {', '.join(labels)}" + (
                          "; a reward model, as one of a single output most often is: "
                          "reward.fn=reward_model" if len(labels) == 1 else ""))
