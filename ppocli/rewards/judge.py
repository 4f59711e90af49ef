"""Built-in reward ``judge``: a language model behind an OpenAI-compatible server scores responses
by a rubric.

    reward.fn=judge reward.kwargs.url=http://127.0.0.1:8000/v1 reward.kwargs.model=NAME
    reward.kwargs.rubric="How helpful is the response?"

Replies are kept in a file by the content of their question. No question is asked twice, also not
by a run that is resumed, which gets the same scores again.
"""

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path

from ppocli.config.user_code import shorten
from ppocli.errors import RewardError
from ppocli.rewards.remote import HttpReward
from ppocli.rewards.resolve import wrong_argument
from ppocli.rewards.reward_records import RewardRequest, opening

log = logging.getLogger(__name__)

TEMPLATE = """{rubric}

<prompt>
{prompt}
</prompt>

<response>
{response}
</response>

Think about it briefly. Then end with a line of its own: "Score: N", N a number from {low} to \
{high}."""
MOST_BYTES = 2**20
"""of a reply"""


class Judge(HttpReward):
    """The score that a model gives each response, from ``low`` to ``high``. A response for which no
    reply ends in a score within that range has none (``reward.on_invalid``).

    Args:
        url: of the server's API, such as ``http://127.0.0.1:8000/v1``.
        model: the model's name there.
        rubric: what is judged, and how.
        template: the question, with ``{rubric}``, ``{prompt}``, ``{response}``, ``{low}`` and
            ``{high}``.
        low, high: the range of scores.
        max_tokens: longest reply.
        cache: file of the replies (default: one for each server and model in ``~/.cache/ppocli``).
        timeout, retries, concurrency, token_env, headers: as of
            :class:`~ppocli.rewards.remote.HttpReward`. A reply without a score is asked for again
            ``retries`` times, the first time greedily.

    Raises:
        RewardError: a wrong argument, a variable that isn't set, or a server that can't be reached.
    """

    def __init__(self, url: str, model: str, rubric: str, *, template: str = TEMPLATE,
                 low: float = 0, high: float = 10, max_tokens: int = 512, cache: str | None = None,
                 timeout: float = 60.0, retries: int = 3, concurrency: int = 8,
                 token_env: str | None = None, headers: Sequence[str] = ()) -> None:
        if not low < high:
            raise wrong_argument("high", high, f"a number above low={low}")
        if "{response}" not in template:
            raise wrong_argument("template", template, "a text with {response}")
        super().__init__(f"{str(url).rstrip('/')}/chat/completions", timeout=timeout,
                         retries=retries, concurrency=concurrency, token_env=token_env,
                         headers=headers)
        self.display_name = f"judge {model}"
        self.model, self.max_tokens, self.low, self.high = model, max_tokens, low, high
        self.fields = {"rubric": rubric, "low": f"{low:g}", "high": f"{high:g}"}
        self.template = template
        self.pattern = re.compile(rf"\W*(?:score\W*)?(-?\d+(?:\.\d+)?)(?:\s*/\s*{high:g})?\W*",
                                  re.IGNORECASE)
        name = hashlib.sha256(f"{url} {model}".encode()).hexdigest()[:12]
        self.cache = Path(cache) if cache else (
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            / "ppocli" / f"judge-{name}.jsonl")
        self._lock = threading.Lock()
        self._replies = self._kept()

    def __call__(self, request: RewardRequest) -> list[float | None]:
        """[N] scores; the replies are logged as column ``judge``."""
        questions = [self._question(prompt, response) for prompt, response in zip(
            request.prompts, request.responses, strict=True)]
        distinct = list(dict.fromkeys(questions))
        # its threads are daemons: a server that hangs must not keep the process from ending
        with ThreadPool(max(1, min(self.concurrency, len(distinct)))) as pool:
            replies = dict(zip(distinct, pool.imap(self._reply, distinct), strict=True))
        request.logs.extra("judge", [replies[question] for question in questions])
        scores = [self.score_in(replies[question]) for question in questions]
        if missing := scores.count(None):
            log.warning("%s gave no score from %g to %g for %d of %d responses, last: %s",
                        self.display_name, self.low, self.high, missing, len(scores),
                        shorten(replies[questions[scores.index(None)]]))
        return scores

    def score_in(self, reply: str) -> float | None:
        """The score in the last line of a reply; None without one, or outside the range."""
        lines = reply.strip().splitlines()
        matched = self.pattern.fullmatch(lines[-1]) if lines else None
        score = float(matched[1]) if matched else None
        return score if score is not None and self.low <= score <= self.high else None

    def _question(self, prompt: str, response: str) -> str:
        fields = self.fields | {"prompt": prompt, "response": response}
        return re.sub(r"\{(rubric|prompt|response|low|high)\}", lambda m: fields[m[1]],
                      self.template)

    def _reply(self, question: str) -> str:
        """The reply to a question: the one that is kept, or the first of several with a score."""
        key = hashlib.sha256(json.dumps([self.url, self.model, question]).encode()).hexdigest()
        if key in self._replies:
            return self._replies[key]
        for attempt in range(self.retries + 1):
            reply = self._fetch_reply(question, attempt)
            if self.score_in(reply) is not None:
                break
        with self._lock:
            self._replies[key] = reply
            self.cache.parent.mkdir(parents=True, exist_ok=True)
            with self.cache.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "reply": reply}) + "\n")
        return reply

    def _fetch_reply(self, question: str, attempt: int) -> str:
        body = {"model": self.model, "messages": [{"role": "user", "content": question}],
                "max_tokens": self.max_tokens, "temperature": 1.0 if attempt else 0.0,
                "seed": attempt}
        answer = self._request("POST", json.dumps(body).encode(), MOST_BYTES)
        try:
            return str(json.loads(answer.content)["choices"][0]["message"]["content"] or "")
        except (ValueError, LookupError, TypeError):
            raise RewardError(
                f"{self.url} answered 200 with {shorten(opening(answer.content))}, which is no "
                "chat completion.", where="reward.kwargs.url",
                fix="give the address of an OpenAI-compatible API, such as "
                "http://127.0.0.1:8000/v1") from None

    def _kept(self) -> dict[str, str]:
        """The replies in the file. A last line that a crash cut off is left out."""
        replies = {}
        if self.cache.exists():
            for line in self.cache.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                    replies[row["key"]] = row["reply"]
                except (ValueError, KeyError, TypeError):
                    continue
        return replies
