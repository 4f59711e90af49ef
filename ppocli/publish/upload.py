"""An exported folder to the Hub. Every failure leaves the folder complete on this machine."""

from pathlib import Path

from ppocli.config.text import first_line, pasted, short_path
from ppocli.errors import HubError
from ppocli.publish.card import CARD, with_location
from ppocli.publish.model_folder import check_unchanged
from ppocli.publish.provenance import masked
from ppocli.runs import atomic, model_files

_STALE = ["config.json", "model*.safetensors", "model.safetensors.index.json", "eval.json",
          model_files.ADAPTER_CONFIG, model_files.ADAPTER_WEIGHTS, model_files.ADAPTER_BASE,
          model_files.VALUE_HEAD, model_files.VALUE_TRUNK, "additional_chat_templates/*.jinja"]
"""files of an earlier export that this one may not have: transformers would load the wrong weights,
or put an adapter on weights that it was merged into"""


def push(folder: Path, repo: str, *, public: bool) -> str:
    """Push an export; return the address of the repository.

    Args:
        repo: ``USER/NAME``; a plain ``NAME`` belongs to the token's user. Created if missing.
        public: the visibility that the repository has, or gets.

    Raises:
        HubError: the Hub can't be reached or refuses, or the repository has another visibility.
        InputError: the folder is no export, or was changed after it was verified.
    """
    from huggingface_hub import HfApi

    files, api, place = check_unchanged(folder), HfApi(), pasted(short_path(str(folder)))
    fix = f"ppocli export {place} --to-hub {repo}" + " --public" * public
    try:
        repo = api.create_repo(repo, private=not public, exist_ok=True).repo_id
        if bool(api.repo_info(repo).private) == public:
            fix = f"add --{'private' if public else 'public'}, or change the repository's settings"
            raise ValueError(f"the repository is {'private' if public else 'public'}")
        text = (folder / CARD).read_text(encoding="utf-8")
        atomic.write_atomic(folder / CARD, masked(with_location(text, repo)))
        api.upload_folder(repo_id=repo, folder_path=folder, allow_patterns=files,
                          delete_patterns=_STALE,
                          commit_message="Upload a model exported by ppocli")
    except Exception as error:  # whatever the client, the connection or the Hub raises
        status = getattr(getattr(error, "response", None), "status_code", None)
        cause = masked(getattr(error, "server_message", None) or first_line(error)).rstrip(".")
        if status in (401, 403):
            fix = f"log in with a token that may write (hf auth login, or HF_TOKEN), then: {fix}"
        raise HubError(f"The push to {repo} did not go through: "
                       f"{cause}{f' (HTTP {status})' if status else ''}. Your export is complete "
                       f"in {place}.", where=api.endpoint, fix=fix) from error
    return f"{api.endpoint}/{repo}"
