"""Penalties on the score of a whole response: for never ending, for being short, for length."""

from __future__ import annotations

from collections.abc import Sequence


def overlong_penalties(lengths: Sequence[int], *, longest: int, buffer: int, factor: float = 1.0
                       ) -> list[float]:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13), as amounts to be
    subtracted: 0 up to ``longest - buffer`` tokens, then rising by a straight line to ``factor`` at
    ``longest`` tokens and beyond.

    Args:
        lengths: response tokens of each sample.
        longest: the paper's L_max.
        buffer: the paper's L_cache, above 0.
        factor: largest penalty (verl's ``overlong_buffer.penalty_factor``).
    """
    return [factor * min(max(length - (longest - buffer), 0) / buffer, 1.0) for length in lengths]


def penalised(scores: Sequence[float], *, unended: Sequence[float | None],
              short: Sequence[float | None], replace: bool) -> list[float]:
    """Scores after the penalties of responses that never ended or are too short.

    Subtracted, as TRL's ``missing_eos_penalty``, both if both apply; or, as torchtune's
    ``reward_penalty`` and summarize-from-feedback, put in place of the score, the larger one if
    both apply.

    Args:
        unended, short: amount of each sample's penalty, None where it does not apply.
    """
    found = []
    for score, amounts in zip(scores, zip(unended, short, strict=True), strict=True):
        given = [amount for amount in amounts if amount is not None]
        if not given:
            found.append(score)
        else:
            found.append(-max(given) if replace else score - sum(given))
    return found
