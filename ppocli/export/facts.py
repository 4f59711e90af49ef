"""What a model card can tell of a policy: gathered from its run's folder, without secrets."""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

from ppocli.builtin.names import BUILTIN_PREFIX
from ppocli.config import bounded, hub, resolved, schema, secrets
from ppocli.evaluation.request import read_result
from ppocli.runs.listing import last_part
from ppocli.runs.record import RunRecord, eval_samples, first_of_each_prompt, read_run
from ppocli.runs.target import Target
from ppocli.storage.atomic import read_json
from ppocli.storage.model_files import ADAPTER_CONFIG, is_adapter, quiet_transformers
from ppocli.storage.run_folder import RunFolder
from ppocli.text import each_text

_NUM_SAMPLES = 4
_LICENSE_KEYS = ("license", "license_name", "license_link")
_OWN_LICENSE = "apache-2.0"
"""of the models that ship with ppocli, which is under it"""
_PLACES = frozenset({"run", "name", "path", "tokenizer_path", "fn", "step_fn", "metric_fn",
                     "targets"})
"""keys of eval.json under which a folder of this machine may stand"""


@dataclass(frozen=True)
class Facts:
    """All that is known of what is exported. ``run`` is None for a model that came from elsewhere:
    then the rest is empty, but for what an earlier export tells."""

    name: str
    step: int | None = None
    run: RunRecord | None = None
    license: dict[str, str] = field(default_factory=dict)
    """of the model that was fine-tuned: ``license`` and, for one that is not on the Hub's list,
    ``license_name`` and ``license_link``; empty when not known"""
    before: dict[str, float] = field(default_factory=dict)
    """figures of the evaluation before training"""
    after: dict[str, float] = field(default_factory=dict)
    """figures of the evaluation of exactly the exported weights"""
    evaluation: dict[str, Any] | None = None
    """the newest eval.json of these weights under the run's own settings"""
    samples: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    """rows of samples.jsonl: responses to the same prompt before training and after"""
    versions: dict[str, str] = field(default_factory=dict)
    """of the packages that trained it: the summary's, else the checkpoint's"""
    command: str | None = None
    """a command line that trains it again"""
    earlier: Path | None = None
    """the export that is exported once more: its folder tells what it was trained with"""

    @property
    def config(self) -> schema.TrainConfig | None:
        """How the policy was trained."""
        return None if self.run is None else self.run.config


def gather(target: Target, *, network: bool) -> Facts:
    """Read what is known of a target.

    Args:
        network: whether the Hub may be asked for the base model's license.
    """
    if target.run_dir is None:
        return Facts(target.label)
    run = read_run(target.run_dir)
    step, model = target.step or 0, run.config.model
    versions = (run.summary or {}).get("versions")
    if not versions and target.checkpoint is not None:
        versions = (read_json(target.checkpoint / "MANIFEST.json") or {}).get("versions")
    return Facts(
        name=run.name, step=target.step, run=run,
        license=license_of(model.path, model.revision, network=network), before=_figures(run, 0),
        after=_figures(run, step), samples=_samples(run, step),
        evaluation=without_folders(own_evaluation(target, target.run_dir, run.config)),
        versions=dict(versions) if isinstance(versions, dict) else {},
        command=resolved.training_command(run.config))


def _figures(run: RunRecord, step: int) -> dict[str, float]:
    """The evaluation's figures in the row of a step, under the names that summary.json has."""
    row: dict[str, Any] = next((row for row in run.rows if row["step"] == step), {})
    return {name.removeprefix("eval/"): float(value) for name, value in row.items()
            if name.startswith("eval/") and value is not None}


def _samples(run: RunRecord, step: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The first responses to different prompts, of step 0 and of ``step``."""
    if step == 0:
        return []
    old, new = map(first_of_each_prompt, eval_samples(run.folder, 0, step))
    return [(old[prompt], new[prompt]) for prompt in old if prompt in new
            and "response" in new[prompt]][:_NUM_SAMPLES]  # a reward model has none


def license_of(model: str, revision: str | None, *, network: bool) -> dict[str, str]:
    """The license of ``model.path``: what its README.md, else its config.json says.

    Args:
        network: ask the Hub for the README of a Hub model.
    """
    if model.startswith(BUILTIN_PREFIX):
        return {"license": _OWN_LICENSE}
    name = hub_name(model)
    told: dict[str, Any] = {}
    for file in ("README.md", "config.json"):
        path = Path(model).expanduser() / file if name is None else _from_hub(
            name, file, revision, network=network and file == "README.md")
        if path.is_file() and not told.get("license"):
            told = (split_card(path.read_text(encoding="utf-8", errors="replace"))[0]
                    if file == "README.md" else read_json(path) or {})
    known = {key: told[key] for key in _LICENSE_KEYS if isinstance(told.get(key), str)}
    return known if "license" in known else {}


def _from_hub(name: str, file: str, revision: str | None, *, network: bool) -> Path:
    """A file of a Hub model: where allowed and possible from the Hub, else from the cache; one that
    isn't there."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, file, revision=revision,
                                    local_files_only=not (network and hub.hub_reachable())))
    except Exception:  # nothing that can go wrong on the way there is a reason not to export
        return Path(os.devnull)


def hub_name(path: str | None) -> str | None:
    """The Hub name that a path of a run's configuration is; None for folders, which are absolute
    there, lists, addresses, built-ins and Python objects."""
    if path == resolved.PYTHON_OBJECT or "://" in (path or "") or (
            path or "/").startswith((".", "/", "~", "{", BUILTIN_PREFIX)):
        return None
    return path


def is_encoder_decoder(folder: Path) -> bool:
    """Whether the model in ``folder``, or the base of the adapter there, has an encoder beside its
    decoder."""
    if is_adapter(folder):
        return (read_json(folder / ADAPTER_CONFIG) or {}).get("task_type") == "SEQ_2_SEQ_LM"
    return bool((read_json(folder / "config.json") or {}).get("is_encoder_decoder"))


def split_card(text: str) -> tuple[dict[str, Any], str]:
    """The metadata on top of a model card and the text below it; broken metadata count as none."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    text = text.removeprefix("\ufeff")
    if (block := REGEX_YAML_BLOCK.search(text)) is None:
        return {}, text
    try:
        data = yaml.safe_load(bounded.check_yaml(block[2]))
    except yaml.YAMLError:
        data = None
    return data if isinstance(data, dict) else {}, text[block.end():]


def own_evaluation(target: Target, run_dir: Path, config: schema.TrainConfig
                   ) -> dict[str, Any] | None:
    """The newest ``eval/*/eval.json`` of exactly these weights under the run's own reward,
    prompts and sampling, whatever its random numbers and the number of responses; else None.

    Only where one could be it are the weights loaded, to compare their digest.
    """
    paths = sorted(run_dir.glob("eval/*/eval.json"), reverse=True,
                   key=lambda path: (path.stat().st_mtime_ns, path.parent.name))
    prompts = RunFolder(run_dir).started_with().get("evaluation prompts")
    found = [value for path in paths if (value := read_result(path.parent)) is not None
             and value.get("step") == target.step and _own_settings(value, config, prompts)]
    if not found:
        return None
    digest, sampling = _loaded(target, config)
    return next((value for value in found if value["model"].get("digest") == digest
                 and value.get("generation") == sampling), None)


def _own_settings(evaluation: dict[str, Any], config: schema.TrainConfig, digest: str | None
                  ) -> bool:
    """Whether reward, prompts (of that digest, where it is known) and the base of the KL are those
    of the run."""
    own = json.loads(json.dumps(asdict(config), default=str))
    with suppress(KeyError, TypeError, ValueError):  # a file that no evaluation wrote
        reward, prompts, model = (dict(evaluation["settings"][part])
                                  for part in ("reward", "prompts", "model"))
        # which object it was is not known
        return (resolved.PYTHON_OBJECT not in json.dumps([reward, prompts])
                and reward == {name: own["reward"].get(name) for name in reward}
                and _asked(prompts) == _asked(own["prompts"])
                and digest in (None, prompts.get("digest"))
                and all(model.get(name) == own["model"][name]
                        for name in ("path", "revision", "tokenizer_path")))
    return False


def _asked(prompts: dict[str, Any]) -> dict[str, Any]:
    """Settings of prompts without what says how many responses there are to each, and without those
    that say nothing, which are absent where an evaluation is older than a key."""
    def said(section: dict[str, Any], *without: str) -> dict[str, Any]:
        return {name: value for name, value in section.items()
                if value is not None and name not in without}
    return said(prompts, "digest", "count") | {"eval": said(prompts["eval"], "repeat")}


def _loaded(target: Target, config: schema.TrainConfig) -> tuple[str, dict[str, Any]]:
    """Digest of the weights and the run's sampling at evaluation, as an evaluation tells them."""
    from ppocli.models.loading import adapters, language_model, model_config
    from ppocli.models.loading.tokenizer import load_tokenizer
    from ppocli.models.vocabulary import Vocabulary, set_vocabulary
    from ppocli.tasks.building import sampling_specs

    quiet_transformers()
    own = model_config.policy_config(config.model, target.model)
    loaded, tokenizer = language_model.load_lm(own), load_tokenizer(own)
    set_vocabulary(loaded.lm, Vocabulary.of(tokenizer, loaded.lm))
    spec = sampling_specs(config.generation, tokenizer, loaded)[1]
    return adapters.tensors_digest(loaded.lm.state_dict()), json.loads(json.dumps(asdict(spec)))


def without_folders(value: Any, key: str = "") -> Any:
    """The contents of eval.json with folders of this machine cut down to their last part."""
    if isinstance(value, dict):
        # digests of the files of rewards, by path
        return {last_part(name) if key == "code" else name: without_folders(item, name)
                for name, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item, key) for item in value]
    return last_part(value) if isinstance(value, str) and key in _PLACES else value


class Mask:
    """Replaces values of token-like environment variables, texts shaped like tokens, and passwords
    in URLs by ``***``, and the home folder by ``~``.

    Args:
        environment: variables whose names may look like those of secrets.
        tokens: further texts that must not be shown.
        home: the folder written as ``~``.
    """

    def __init__(self, environment: Mapping[str, str], *, tokens: tuple[str, ...] = (),
                 home: Path | None = None) -> None:
        self._hidden = secrets.secret_values(environment) | set(tokens)
        homes = {str(home), os.path.realpath(home)} - {"/", "."} if home is not None else set()
        self._homes = [re.compile(re.escape(folder) + r"(?![\w.-])")
                       for folder in sorted(homes, key=len, reverse=True)]

    @classmethod
    def of_this_process(cls) -> Self:
        """With this process's environment, the token of ``hf auth login``, the user's home."""
        from huggingface_hub import get_token

        home = os.path.expanduser("~")  # "~" itself for a user without one
        return cls(os.environ, tokens=tuple(filter(None, [get_token()])),
                   home=None if home == "~" else Path(home))

    def __call__(self, text: str) -> str:
        """``text`` with nothing in it that is to stay here."""
        text = secrets.without_secrets(text, self._hidden)
        for pattern in self._homes:
            text = pattern.sub("~", text)
        return text

    def tree(self, value: Any) -> Any:
        """Plain data (mappings, lists, texts, numbers) with every text in it masked."""
        return each_text(value, self, self.tree)
