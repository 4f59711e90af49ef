"""Built-in reward ``http``: scores computed by another process, GPU or machine.

    reward.fn=http reward.kwargs.url=http://127.0.0.1:8123/score

:mod:`ppocli.rewards.reward_records` describes requests and answers; ``ppocli serve-reward`` is a
server.
"""

import logging
import re
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any

from ppocli.config.schema_training import LONGEST_WAIT
from ppocli.config.secrets import VARIABLE, why_no_url
from ppocli.config.text import counted
from ppocli.config.user_code import shorten
from ppocli.errors import RewardError
from ppocli.rewards import resolve, reward_records, styles
from ppocli.rewards.http_client import Client, from_environment, retry_after
from ppocli.rewards.reward_records import (
    RewardRequest,
    WireError,
    decode_scores,
    encode_request,
    opening,
)

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""seconds before the first retry, doubled before each further one, and at most"""
LEAST_ANSWER, A_SAMPLE, A_NUMBER = 2**20, 2**12, 64
"""maximum bytes of an answer: always, plus those per sample (its score and logs), plus those per
token (its number)"""
_REMEDIES = {
    401: "give the token that it asks for: reward.kwargs.token_env=VARIABLE",
    403: "give the token that it asks for: reward.kwargs.token_env=VARIABLE",
    404: "correct the path of reward.kwargs.url; ppocli serve-reward listens at /score",
    413: "send fewer samples at once: reward.kwargs.batch_size=N"}
_HEADER = re.compile(rf"\s*([A-Za-z0-9-]+)\s*:\s*({VARIABLE.pattern})\s*")


class HttpReward:
    """Scores from a server for batches of samples.

    After connection errors and the statuses 429 and 5xx, a request is tried again, with growing
    pauses. After a timeout it isn't: the server may still be at work on it.

    Args:
        url: address that batches are posted to, http:// or https://.
        timeout: maximum seconds of a request, from the connection to the end of the answer.
        retries: number of further tries of a request.
        concurrency: requests at once; a chunk is split between them.
        batch_size: maximum samples per request (default: the chunk in ``concurrency`` parts).
        token_env: name of the environment variable that holds a token (``Authorization: Bearer``).
        headers: further headers, each as ``Name: VARIABLE``, an environment variable's name.

    Raises:
        RewardError: a wrong argument, a variable that isn't set, or a server that isn't there.
    """

    waits = True
    """scoring waits instead of computing here, so it may run during generation"""
    reward_style = styles.WHOLE_REQUEST

    def __init__(self, url: str, *, timeout: float = 60.0, retries: int = 3, concurrency: int = 1,
                 batch_size: int | None = None, token_env: str | None = None,
                 headers: Sequence[str] = ()) -> None:
        _check_url(url)
        for name, value, lowest in (("retries", retries, 0), ("concurrency", concurrency, 1),
                                    ("batch_size", batch_size, 1)):
            if value is not None and (type(value) is not int or value < lowest):
                raise resolve.wrong_argument(name, value, f"a whole number from {lowest}")
        is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        if not (is_number and 0 < timeout <= LONGEST_WAIT):
            raise resolve.wrong_argument("timeout", timeout,
                                         f"seconds above 0, at most {LONGEST_WAIT:g}")
        self.url, self.told_as = url, f"http {url}"
        self.retries, self.concurrency, self.batch_size = retries, concurrency, batch_size
        self._client = Client(url, timeout=float(timeout), keep=concurrency,
                              headers=_secret_headers(token_env, headers))
        # any answer will do: a missing server is an error before models are loaded
        self._patiently("GET", any_status=True)

    def __call__(self, request: RewardRequest) -> list[Any]:
        """[N] scores from the server, in the order of the samples."""
        count = len(request)
        size = self.batch_size or -(-count // self.concurrency)
        parts = [slice(start, min(start + size, count)) for start in range(0, count, size)]
        # its threads are daemons: a server that hangs must not keep the process from ending
        with ThreadPool(min(self.concurrency, len(parts))) as pool:
            answers = list(pool.imap(partial(self._scores, request), parts))
        request.logs.take([log for scores, logs in answers for log in logs or [{}] * len(scores)])
        flat = [score for scores, _ in answers for score in scores]
        per_step = any(isinstance(scores, reward_records.StepScores) for scores, _ in answers)
        return reward_records.StepScores(flat) if per_step else flat

    def _scores(self, request: RewardRequest, part: slice) -> tuple[list[Any], list[Any]]:
        """The answer for a part of the samples: their scores, and their logs."""
        count = part.stop - part.start
        tokens = sum(len(ids) for ids in request.response_ids[part])
        most = LEAST_ANSWER + A_NUMBER * tokens + A_SAMPLE * count
        answer = self._patiently("POST", encode_request(request, part), most)
        try:
            if len(answer.content) > most:
                raise WireError(f"more than {most} bytes for {count} samples")
            scores, logs = decode_scores(answer.content)
        except WireError as problem:
            raise RewardError(f"{self.url} answered {answer.status_code} with {problem}.",
                              where="reward.kwargs.url",
                              fix='it must answer {"scores": [...]}, one per sample') from None
        if len(scores) != count:
            raise RewardError(
                f"{self.url} answered {answer.status_code} with {counted(len(scores), 'score')} "
                f"for {count} samples (sample {part.start} to {part.stop - 1} of {len(request)}): "
                f"{shorten(opening(answer.content))}", where="reward.kwargs.url",
                fix="it must answer one score per sample, in their order")
        return scores, logs

    def _patiently(self, method: str, body: bytes = b"", most: int = 0, *,
                   any_status: bool = False) -> Any:
        """The answer; a request that may succeed later is tried again."""
        for attempt in range(self.retries + 1):
            pause = min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE)
            try:
                answer = self._client.ask(method, self.url, body, most)
            except TimeoutError as error:
                if any_status:
                    return None  # slow, but there
                raise RewardError(str(error), where="reward.kwargs.timeout", fix="make it faster, "
                                  "give smaller parts (reward.kwargs.batch_size=N), or raise "
                                  "reward.kwargs.timeout") from error
            except ConnectionError as error:
                failed = str(error)
                cause: Exception | None = error
                fix = "start it (ppocli serve-reward), or correct reward.kwargs.url"
            else:
                status = answer.status_code
                if any_status or status == 200:
                    return answer
                failed = f"{self.url} answered {status}: {shorten(opening(answer.content))}"
                cause, fix = None, _REMEDIES.get(status, "look into the server's own messages")
                if elsewhere := answer.headers.get("Location"):
                    fix = f"it points to {elsewhere}: correct reward.kwargs.url"
                pause = max(pause, retry_after(answer, LONGEST_PAUSE))
                if status < 500 and status != 429:  # too many requests
                    raise RewardError(failed, where="reward.kwargs.url", fix=fix)
            if attempt < self.retries:
                log.warning("%s; trying again in %g s (%d of %d)", failed, pause, attempt + 1,
                            self.retries)
                time.sleep(pause)
        tries = f" ({self.retries + 1} times in a row)" if self.retries else ""
        raise RewardError(failed + tries, where="reward.kwargs.url", fix=fix) from cause


def _check_url(url: object) -> None:
    if (wrong := why_no_url(url)) == "a secret":
        raise RewardError("reward.kwargs.url holds a secret (not shown).",
                          where="reward.kwargs.url", fix="send it as a header: "
                          "reward.kwargs.token_env=NAME-OF-A-VARIABLE")
    if wrong:
        raise resolve.wrong_argument("url", url, "an address such as http://127.0.0.1:8123/score")


def _secret_headers(token_env: str | None, headers: Sequence[str]) -> dict[str, str]:
    """Header -> value from the environment."""
    if not isinstance(headers, (list, tuple)) or not all(isinstance(text, str) for text in headers):
        raise RewardError("reward.kwargs.headers is not a list of texts (not shown).",
                          where="reward.kwargs.headers", fix="give 'Name: VARIABLE' for each: "
                          "reward.kwargs.headers=[\"Name: VARIABLE\"]")
    sources = [("headers", text, "") for text in headers]
    if token_env is not None:
        sources.insert(0, ("token_env", f"Authorization: {token_env}", "Bearer "))
    values = {}
    for key, text, prefix in sources:
        if (matched := _HEADER.fullmatch(text)) is None:
            what = "the name of a variable" if prefix else "of the form 'Name: VARIABLE'"
            raise RewardError(f"What reward.kwargs.{key} holds is not {what} (not shown).",
                              where=f"reward.kwargs.{key}", fix="put the value into a variable of "
                              "the environment and give the variable's name")
        header, variable = matched.groups()
        values[header] = prefix + from_environment(variable, header, f"reward.kwargs.{key}",
                                                   RewardError)
    return values
