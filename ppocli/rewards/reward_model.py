"""Built-in reward ``reward_model``: the scalar output of a model trained on preferences.

    reward.fn=reward_model reward.kwargs.model=/path/to/reward-model
"""

from __future__ import annotations

from ppocli.errors import RewardError
from ppocli.rewards.classifier import pick_texts
from ppocli.rewards.sequence import (
    INPUTS,
    check_choice,
    check_positive_int,
    load_sequence_model,
    sequence_logits,
)


class RewardModel:
    """Score of the text under an ``AutoModelForSequenceClassification`` with a single output.

    The reward model keeps its own tokenizer and sees text, so it may come from another family than
    the policy. A decoder's score is read at the last token of the text.

    Args:
        model: folder, Hub name or ``builtin:NAME``.
        on: what is scored: the ``sample`` (prompt + response), the ``response`` alone, or the
            ``pair`` of both.
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

    def __init__(self, model: str, *, on: str = "sample", batch_size: int = 32,
                 max_length: int | None = None, truncation_side: str = "left",
                 device: str = "auto", dtype: str = "fp32", revision: str | None = None,
                 trust_remote_code: bool = False) -> None:
        check_choice("on", on, INPUTS)
        check_positive_int("batch_size", batch_size)
        self.loaded = load_sequence_model(
            model, device=device, dtype=dtype, max_length=max_length, revision=revision,
            truncation_side=truncation_side, trust_remote_code=trust_remote_code)
        if len(self.loaded.labels) != 1:
            raise RewardError(
                f"{model} has {len(self.loaded.labels)} outputs "
                f"({', '.join(self.loaded.labels)}); a reward model has one.",
                where="reward.kwargs.model",
                fix=f"reward.fn=classifier reward.kwargs.label={self.loaded.labels[-1]}")
        self.on = on
        self.batch_size = batch_size

    def __call__(self, samples: list[str], prompts: list[str],
                 responses: list[str]) -> list[float]:
        """[N] raw scores."""
        texts, pairs = pick_texts(self.on, samples, prompts, responses)
        logits = sequence_logits(self.loaded, texts, pairs, batch_size=self.batch_size)
        return logits[:, 0].tolist()
