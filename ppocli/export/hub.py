"""An exported folder to the Hub. Every failure leaves the folder and names the command that tries
again."""

import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppocli.config.hub import hub_reachable, offline_variable
from ppocli.errors import HubError
from ppocli.export.card import CARD, user_text, with_location, with_user_text
from ppocli.export.facts import Mask
from ppocli.export.folder import RECORD, check_whole
from ppocli.export.request import ExportRequest, shown
from ppocli.storage import atomic, model_files
from ppocli.text import Say, format_bytes

_WAITS = (1.0, 4.0)
"""seconds before a step is tried again after a dropped connection or a failure of the Hub"""
_PATIENCE = 15.0
"""seconds after which a step isn't tried again: huggingface_hub has waited long enough itself"""
_PASSING = (408, 429, 500, 502, 503, 504)
"""HTTP status of requests that may succeed a little later"""
_MEANINGS = {401: "your token is not accepted", 403: "your token may not write there",
             404: "there is no such repository or branch, or your token may not see it",
             429: "too many requests"}
_STALE = ["config.json", "model.safetensors", "model-*-of-*.safetensors",
          "model.safetensors.index.json", model_files.ADAPTER_CONFIG, model_files.ADAPTER_WEIGHTS,
          model_files.ADAPTER_BASE, model_files.VALUE_HEAD, model_files.VALUE_TRUNK, "eval.json",
          "additional_chat_templates/*.jinja"]
"""files of an earlier export that this one may not have: transformers would load the wrong ones,
and put an adapter on weights that it was merged into"""
_PULL_REQUEST = re.compile(r"refs/pr/\d+")


def push(folder: Path, wanted: ExportRequest, name: str, mask: Mask, say: Say) -> str:
    """Push a whole export; return the address of the repository, branch or pull request.

    Args:
        wanted: where to.
        name: of the repository, where ``wanted`` names none; the owner is the token's user.

    Raises:
        HubError: with the cause, where the export lies, and the command to try again.
        InputError: the folder is no export, or was changed after it was verified.
    """
    record = check_whole(folder)
    session = _Session(folder, wanted, name, mask, say)
    try:
        return session.run([*record["files"], CARD, RECORD])
    except KeyboardInterrupt:
        say(f"Your export is complete in {shown(folder)}. To push it: {session.command}")
        raise


class _Session:
    """One push, step by step; ``wanted`` grows more exact on the way."""

    def __init__(self, folder: Path, wanted: ExportRequest, name: str, mask: Mask, say: Say
                 ) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        if not (sys.stderr and sys.stderr.isatty()):
            disable_progress_bars()
        self.folder, self.wanted, self.name, self.mask, self.say = folder, wanted, name, mask, say
        self.api = HfApi(library_name="ppocli")
        self.endpoint = self.api.endpoint

    @property
    def command(self) -> str:
        """The command to try again."""
        return self.wanted.push_command(self.folder)

    def run(self, files: list[str]) -> str:
        """All steps; returns the address."""
        if (variable := offline_variable()) is not None:
            raise self._failed(f"{variable}={os.environ[variable]} forbids it",
                               fix=f"env -u {variable} {self.command}")
        if not hub_reachable():
            raise self._failed(f"the Hub can't be reached ({self.endpoint})")
        repo = self._repository(self._user())
        branch = self._branch(repo)
        self._finish_card(repo, branch)
        size = sum((self.folder / name).stat().st_size for name in files)
        self.say(f"uploading {len(files)} files ({format_bytes(size)}) to {repo}"
                 + (f", {branch}" if branch else ""))
        self._step("uploading", lambda: self.api.upload_folder(
            repo_id=repo, folder_path=str(self.folder), revision=branch, allow_patterns=files,
            delete_patterns=_STALE, commit_message="Upload a model exported by ppocli"))
        address = f"{self.endpoint}/{repo}"
        if branch is None:
            return address
        if _PULL_REQUEST.fullmatch(branch):
            return f"{address}/discussions/{branch.rsplit('/', 1)[-1]}"
        return f"{address}/tree/{branch}"

    def _user(self) -> str:
        from huggingface_hub.errors import LocalTokenNotFoundError

        try:
            found = self._step("asking the Hub who you are", self.api.whoami,
                               expected=LocalTokenNotFoundError)
        except LocalTokenNotFoundError:
            raise self._failed("there is no token", fix="log in with hf auth login (or set "
                               f"HF_TOKEN), then: {self.command}") from None
        if ((found.get("auth") or {}).get("accessToken") or {}).get("role") == "read":
            raise self._failed("your token may only read", fix="make one that may write "
                               f"({self.endpoint}/settings/tokens), then: {self.command}")
        return str(found["name"])

    def _repository(self, user: str) -> str:
        """The full name of the repository; it is there afterwards, with the visibility asked."""
        from huggingface_hub.errors import RepositoryNotFoundError

        repo = self.wanted.repo_id or self.name
        repo = repo if "/" in repo else f"{user}/{repo}"
        self.wanted = replace(self.wanted, repo_id=repo)
        private = self.wanted.private is not False
        try:
            info = self._step("looking for the repository", lambda: self.api.repo_info(repo),
                              expected=RepositoryNotFoundError)
        except RepositoryNotFoundError:
            self._step("creating the repository", lambda: self.api.create_repo(
                repo, private=private, exist_ok=True))
            self.say(f"created {repo} ({'private' if private else 'public'})")
            return repo
        if bool(info.private) == private:
            return repo
        there, asked = ("public", "private") if private else ("private", "public")
        why = f"asked for {asked}" if self.wanted.private is not None else "the default is private"
        anyway = replace(self.wanted, private=not private).push_command(self.folder)
        raise self._failed(f"the repository is there already and is {there}, and {why}",
                           fix=f"push to the {there} repository: {anyway}; or make it {asked} "
                           f"first at {self.endpoint}/{repo}/settings; or take another --repo-id")

    def _branch(self, repo: str) -> str | None:
        """The revision to push to, made where missing. A pull request is opened before the upload
        and named from then on, so that trying again can't open a second one."""
        wanted = self.wanted.revision
        if self.wanted.create_pr:
            pull = self._step("opening a pull request", lambda: self.api.create_pull_request(
                repo, title="Upload a model exported by ppocli",
                description="Made by `ppocli export --to-hub --create-pr`."), waits=())
            self.wanted = replace(self.wanted, create_pr=False, revision=pull.git_reference)
            self.say(f"opened {pull.url} (a draft until you publish it there)")
            return str(pull.git_reference)
        if wanted is not None and not _PULL_REQUEST.fullmatch(wanted) and wanted != "main":
            self._step("creating the branch", lambda: self.api.create_branch(
                repo, branch=wanted, exist_ok=True))
        return wanted

    def _finish_card(self, repo: str, branch: str | None) -> None:
        """Name the repository in README.md, and take over what was written on the Hub's, unless
        something else is written here."""
        card = self.folder / CARD
        old = card.read_text(encoding="utf-8")
        new = with_location(old, repo)
        theirs, ours = self._text_on_the_hub(repo, branch), user_text(old)
        if theirs is not None and theirs != ours:
            if ours is None:
                new = with_user_text(new, theirs)
                self.say(f"{CARD}: kept the text that was written on the Hub")
            else:
                self.say(f"{CARD}: the text written here replaces the one on the Hub, which its "
                         "history keeps")
        if new != old:
            atomic.write_atomic(card, self.mask(new))

    def _text_on_the_hub(self, repo: str, branch: str | None) -> str | None:
        """What a user wrote on the README.md there."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.errors import EntryNotFoundError
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        def fetch() -> str:
            # not hf_hub_download, which calls a dropped connection a missing file
            response = get_session().get(hf_hub_url(repo, CARD, revision=branch,
                                                    endpoint=self.endpoint),
                                         headers=build_hf_headers(library_name="ppocli"))
            hf_raise_for_status(response)
            return str(response.text)

        with suppress(EntryNotFoundError):
            return user_text(self._step("reading the README there", fetch,
                                        expected=EntryNotFoundError))
        return None

    def _step(self, doing: str, action: Callable[[], Any], waits: tuple[float, ...] = _WAITS,
              expected: type[Exception] | tuple[()] = ()) -> Any:
        """Do something on the Hub; dropped connections and failures of the Hub are waited out.

        Args:
            waits: seconds before each further try; none for what must not be done twice.
            expected: an answer of the Hub that the caller knows what to do about.
        """
        started = time.monotonic()
        for wait in (*waits, None):
            try:
                return action()
            except expected:
                raise
            except Exception as error:
                status = _status(error)
                late = time.monotonic() - started > _PATIENCE
                passes = _is_transport(error) if status is None else status in _PASSING
                if wait is None or late or not passes:
                    fix = (f"take a token that may ({self.endpoint}/settings/tokens; hf auth "
                           f"login, or HF_TOKEN), then: {self.command}"
                           if status in (401, 403) else None)
                    raise self._failed(f"{self._cause(error)} ({doing})", fix) from error
                self.say(f"{doing}: {self._cause(error)}; trying again in {wait:g} s")
                time.sleep(wait)
        raise AssertionError("the last turn returns or raises")

    def _cause(self, error: Exception) -> str:
        if (status := _status(error)) is None:
            said = self.mask(" ".join(str(error).split()))[:200] or type(error).__name__
            return (f"the connection failed ({said})" if _is_transport(error)
                    else f"{type(error).__name__}: {said}")
        said = self.mask(" ".join(str(getattr(error, "server_message", None) or "").split()))[:200]
        meaning = _MEANINGS.get(status) or ("the Hub failed" if status >= 500
                                            else "the Hub refused")
        return f"{meaning} (HTTP {status}{': ' + said if said else ''})"

    def _failed(self, cause: str, fix: str | None = None) -> HubError:
        repo = self.wanted.repo_id or "the Hub"
        return HubError(f"The push to {repo} did not go through: {cause}. "
                        f"Your export is complete in {shown(self.folder)}.",
                        where=self.endpoint, fix=fix or f"try again: {self.command}")


def _status(error: Exception) -> int | None:
    """The HTTP status of an answer that was an error; None for everything else."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _is_transport(error: BaseException) -> bool:
    """A connection that wasn't made or broke, in the words of any client that huggingface_hub may
    use: httpx (1.x), httpx2 (2.x), hf_xet (Python's own)."""
    return isinstance(error, (ConnectionError, TimeoutError)) or any(
        kind.__name__ == "TransportError" and kind.__module__.split(".")[0] in ("httpx", "httpx2")
        for kind in type(error).__mro__)
