"""Rewards by rule: short enough to be read, copied and changed.

Each is a class. Its constructor gets ``reward.kwargs`` and checks them before anything is loaded;
each call gets a chunk of samples and returns one number per sample. A plain function
``def my_reward(responses): return [...]`` works as well.
"""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from itertools import accumulate
from typing import Any

from ppocli.errors import RewardError
from ppocli.rewards.resolve import wrong_argument
from ppocli.rewards.reward_records import differences

NUMBER = re.compile(r"(?<!\d)-?\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][+-]?\d{1,3}(?!\d))?")
WORD = re.compile(r"\w+(?:['\u2019]\w+)*")


class Length:
    """1 for a response of the target length, falling linearly to 0 at length 0 and at twice the
    target.

    Args:
        target: target length, above 0.
        unit: ``tokens`` (sampled ids, including the end-of-sequence token) or ``words``.

    Raises:
        RewardError: an argument is out of range.
    """

    def __init__(self, target: float, unit: str = "tokens") -> None:
        if isinstance(target, bool) or not isinstance(target, (int, float)) or not target > 0:
            raise wrong_argument("target", target, "a number above 0")
        if unit not in ("tokens", "words"):
            raise wrong_argument("unit", unit, "tokens or words")
        self.target, self.unit = target, unit

    def __call__(self, responses: list[str], response_ids: list[list[int]]) -> list[float]:
        """[N] closeness to the target, in [0, 1]."""
        lengths = map(len, response_ids if self.unit == "tokens" else map(WORD.findall, responses))
        return [max(0.0, 1.0 - abs(length - self.target) / self.target) for length in lengths]


class Keyword:
    """The share of the words that a response contains, or whether it matches a pattern.

    Args:
        words: whole words or phrases; each that occurs at least once counts.
        pattern: a regular expression instead; 1 if it matches, else 0.
        ignore_case: whether upper and lower case are the same.

    Raises:
        RewardError: neither or both of ``words`` and ``pattern``, or a broken pattern.
    """

    def __init__(self, words: Sequence[str] | None = None, pattern: str | None = None,
                 ignore_case: bool = True) -> None:
        if (words is None) == (pattern is None):
            raise RewardError("keyword needs either words or a pattern.",
                              where="reward.kwargs", fix="reward.kwargs.words=[great,moving]")
        flags = re.IGNORECASE if ignore_case else re.NOFLAG
        if words is not None:
            if not (checked := _words("words", words)):
                raise wrong_argument("words", words, "at least one word")
            self.patterns = [re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", flags)
                             for word in checked]
            return
        try:
            self.patterns = [re.compile(pattern or "", flags)]
        except (re.error, TypeError) as error:
            raise wrong_argument("pattern", pattern, f"a regular expression ({error})") from error

    def __call__(self, responses: list[str]) -> list[float]:
        """[N] shares, in [0, 1]."""
        return [sum(1 for pattern in self.patterns if pattern.search(response))
                / len(self.patterns) for response in responses]


class WordList:
    """Balance of good and bad words: (good - bad) / (good + bad), 0 without any.

    Args:
        positive: words that count for a response; case is ignored.
        negative: words that count against it.

    Raises:
        RewardError: no words at all, or a word in both lists.
    """

    def __init__(self, positive: Sequence[str] = (), negative: Sequence[str] = ()) -> None:
        self.positive = {_folded(word) for word in _words("positive", positive, single=True)}
        self.negative = {_folded(word) for word in _words("negative", negative, single=True)}
        if not self.positive | self.negative:
            raise RewardError("word_list has no words.", where="reward.kwargs",
                              fix="reward.kwargs.positive=[good,fine] reward.kwargs.negative=[bad]")
        if both := sorted(self.positive & self.negative):
            raise wrong_argument("negative", both[0], "a word that isn't in positive too")

    def __call__(self, responses: list[str]) -> list[float]:
        """[N] balances, in [-1, 1]."""
        scores = []
        for response in responses:
            words = list(map(_folded, WORD.findall(response)))
            good = sum(word in self.positive for word in words)
            bad = sum(word in self.negative for word in words)
            scores.append((good - bad) / (good + bad) if good + bad else 0.0)
        return scores


class StepWordList(WordList):
    """The change of the balance of words by each step; the sum over steps is the whole balance.

    Args:
        positive, negative: as of :class:`WordList`.

    Raises:
        RewardError: as :class:`WordList`.
    """

    def __call__(self, steps: list[list[str]]) -> list[list[float]]:  # type: ignore[override]
        """[N] lists of one number per step."""
        return [differences(super(StepWordList, self).__call__(list(accumulate(pieces))))
                for pieces in steps]


def zero(responses: list[str]) -> list[float]:
    """[N] zeros, where only the KL to the reference teaches: distillation."""
    return [0.0] * len(responses)


def words(responses: list[str]) -> list[list[str]]:
    """Steps of one word each, for ``reward.step_fn``. White space and punctuation belong to the
    word after them, as in the tokens of most vocabularies."""
    return [re.findall(rf"\W*{WORD.pattern}", response) for response in responses]


class Answer:
    """1 if the last number of a response is the right one, else 0.

    Args:
        column: column of the prompts with the right answer. Its last number counts, so that GSM8K's
            worked solutions can be used.
        after: text after which the response's number is read, such as ``####``; 0 without it.

    Raises:
        RewardError: the prompts have no such column, or an answer has no number.
    """

    def __init__(self, column: str = "answer", after: str = "") -> None:
        for name, value in (("column", column), ("after", after)):
            if not isinstance(value, str):
                raise wrong_argument(name, value, "a text")
        self.column, self.after = column, after

    def __call__(self, responses: list[str], log_extra: Callable[[str, Sequence[Any]], None],
                 **columns: Any) -> list[float]:
        """[N] 1 or 0; the number read in each response is logged as ``pred``."""
        if self.column not in columns:
            raise RewardError(f"The prompts have no column {self.column!r}.",
                              where="reward.kwargs.column", fix="name the column with the answers")
        expected = [_last_number(str(answer)) for answer in columns[self.column]]
        if None in expected:
            answer = columns[self.column][expected.index(None)]
            raise RewardError(f"{answer!r} holds no number to compare with.",
                              where=f"prompts, column {self.column}", fix="name another column: "
                              "reward.kwargs.column")
        texts = [response.rpartition(self.after)[2] if self.after in response else ""
                 for response in responses] if self.after else responses
        numbers = list(map(_last_number, texts))
        log_extra("pred", [None if number is None else f"{number.normalize():f}"
                           for number in numbers])
        return [float(number == right) for number, right in zip(numbers, expected, strict=True)]


def _last_number(text: str) -> Decimal | None:
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def _folded(word: str) -> str:
    return word.lower().replace("\u2019", "'")


def _words(name: str, words: Any, *, single: bool = False) -> list[str]:
    is_list = isinstance(words, Sequence) and not isinstance(words, str)
    if not is_list or not all(isinstance(word, str) and word.strip() for word in words):
        raise wrong_argument(name, words, "a list of words")
    if single and (odd := [word for word in words if not WORD.fullmatch(word)]):
        raise wrong_argument(name, odd[0], "a single word of letters and digits (the reward "
                             "keyword finds phrases)")
    return list(words)
