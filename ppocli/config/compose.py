"""From words to a checked configuration, ``check(compose(read_words(...)))``.

Hydra composes. A word that it refuses becomes a problem and is left out, and the rest is composed
again, so that all problems are reported at once. A file stops the composition at its first wrong
value.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NewType

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from ppocli.builtin.names import config_groups
from ppocli.config import config_yaml, hydra_bridge, keys, resume_policy, schema, secrets
from ppocli.config.checks import LENGTHS, SIZES
from ppocli.config.command_words import ACCEPT_CHANGES, COMMAND_LINE, Setting, Words
from ppocli.config.config_yaml import CONFIG_FILE, schema_node, typed
from ppocli.config.import_guard import TRUST
from ppocli.config.problems import Problem, find_problems, listed, raise_problems, unknown_key
from ppocli.config.text import (
    did_you_mean,
    each_text,
    first_line,
    parts_of,
    short_path,
    shown,
    unescaped,
)
from ppocli.errors import CheckpointError, ConfigError

_START_HINT = "start from a recipe, e.g. ppocli train +recipe=quickstart (ppocli recipes list)"
_ROWS = (("prompts.path", "prompts.items", "prompts.mix"),
         ("prompts.eval.path", "prompts.eval.items"))
"""keys that say where prompts come from, one of which is set"""
_OF_SWEEPS = ("hydra.sweep", "hydra.launcher", "hydra/sweep", "hydra/launcher")
"""beginnings of Hydra's own settings that have an effect"""


@dataclass(frozen=True, slots=True)
class Composed:
    """The result of composing the words of one run, right or not.

    ``config`` has the default in place of a value that was refused, and ``???`` where a mandatory
    one is missing; ``refused`` lists why. ``sources`` is where each key that is set was set.
    """

    config: schema.TrainConfig
    refused: tuple[Problem, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    name: str = "run"
    """name of a run without ``run_name``, before its time stamp: its recipe, if it has one"""
    resume_from: Path | None = None
    """folder of the run to resume, of ``resume=FOLDER``"""
    accept_changes: bool = False
    """manual changes in the config.yaml of a resumed run count"""
    typed: frozenset[str] = frozenset()
    """all texts among the values on the command line, and the keys that it sets to true"""
    trusts: bool = False
    """``--trust``: code that the run's configuration names may run"""
    notes: tuple[str, ...] = ()
    """lines for the user: which typed values have no effect"""

    @property
    def hint(self) -> str | None:
        """How to begin, for words that set nothing at all."""
        return None if self.sources else _START_HINT

    def values(self) -> schema.TrainConfig:
        """The values, which need not make a whole run.

        Raises:
            ConfigError: keys that don't exist, values of a wrong type.
        """
        raise_problems(self.refused)
        return self.config

    def problems(self, handed_in: frozenset[str] = frozenset()) -> list[Problem]:
        """Everything that keeps the values from being a run's; ``handed_in`` as for
        :func:`find_problems`."""
        # a key whose value was refused still holds its default: don't report that as missing too
        refused = {problem.key for problem in self.refused}
        return [*self.refused, *(p for p in find_problems(self.config, self.sources, handed_in)
                                 if not refused.intersection(p.key.split(", ")))]


Checked = NewType("Checked", Composed)
"""a configuration without problems; of :func:`check`"""


def compose(words: Words) -> Composed:
    """Compose the configuration of one run.

    Raises:
        ConfigError: words that make no run, secrets, unknown recipes and options of groups, or a
            file that can't be read or has a wrong value.
        CheckpointError: ``resume=FOLDER`` names something else than a run folder.
    """
    if words.is_sweep or words.only_prints:
        raise ConfigError("These words ask for a sweep, or only print a configuration; one run is "
                          "needed.", where=COMMAND_LINE, fix="leave out -m and --cfg")
    run = resumed_run(words)
    with hydra_bridge.hydra_for(words, base_node(run)):
        return compose_here(words, run)


def check(composed: Composed, handed_in: frozenset[str] = frozenset()) -> Checked:
    """Refuse a configuration with problems.

    Args:
        handed_in: keys that are set elsewhere (see :func:`find_problems`).

    Raises:
        ConfigError: everything that is wrong with the words, the recipe and the config files.
    """
    raise_problems(composed.problems(handed_in), composed.hint)
    return Checked(composed)


def base_node(run: Path | None) -> DictConfig:
    """The schema, with the settings of a run that is resumed as its defaults."""
    node = schema_node()
    if run is not None:
        node.merge_with(config_yaml.plain_values(config_yaml.read_config(run / CONFIG_FILE)))
    return node


def compose_here(words: Words, run: Path | None = None) -> Composed:
    """As :func:`compose`, inside of :func:`hydra_for`, for words of one run.

    Args:
        run: the folder of a run that is resumed; :func:`base_node` has its settings.
    """
    words = words if run is None else words.without("resume")
    loader = hydra_bridge.config_loader()
    overrides = OverridesParser.create().parse_overrides(
        [_without_plus(word, loader) for setting in words.settings for word in _for_hydra(setting)])
    _check_overrides(overrides)
    # Hydra would merge an empty mapping into a section, and change nothing
    problems = [Problem(each.key_or_group, keys.why_unknown(each.key_or_group), COMMAND_LINE,
                        "wrong-type") for each in overrides
                if each.value() == {} and each.key_or_group in keys.schema_sections()]
    while True:
        try:
            node = loader.load_configuration(
                hydra_bridge.PRIMARY, [str(each.input_line) for each in overrides], RunMode.RUN)
            break
        except ConfigCompositionException as error:
            if (refused := _refused_override(error, overrides)) is None:
                raise_problems(_file_problems(error, loader.files))
                raise
            problems.append(_word_problem(error, refused, loader.files))
            overrides.remove(refused)
    OmegaConf.set_struct(node, False)
    del node["hydra"]
    settings = [(key, value) for each in overrides for key, value in _settings_of(each)
                if keys.key_for(key) is not None]
    sources = dict.fromkeys(keys.schema_keys(), short_path(str(run / CONFIG_FILE))) if run else {}
    sources |= {key: file for key, _, file in loader.files}
    sources |= dict.fromkeys((key for key, _ in settings), COMMAND_LINE)
    sources |= {parent: source for key, source in sources.items()
                if (parent := keys.free_mapping_of(key)) is not None}
    problems += settle(node, sources)
    _apply_precedence(node, {key for key, source in sources.items() if source == COMMAND_LINE})
    config = typed(node)
    if run is not None:
        config = resume_policy.keeping_settled(config, config_yaml.read_config(run / CONFIG_FILE),
                                               {setting.key for setting in words.settings})
    lost = _overruled(loader.files, node, words, sources)
    return Composed(
        config, tuple(problems), sources, Path(words.value("recipe") or "run").name, run,
        words.flag(ACCEPT_CHANGES) is not None,
        frozenset(key if value is True else value
                  for setting in settings for key, value in parts_of(*setting)
                  if value is True or (isinstance(value, str) and value != MISSING)),
        words.flag(TRUST) is not None,
        (lost,) * (lost != ""))


def print_composition(words: Words) -> None:
    """Print what ``--cfg job`` asks for: a configuration, or a part of it, as YAML.

    Raises:
        ConfigError: something is wrong with the words or the files.
    """
    if words.is_sweep:
        words = hydra_bridge.first_job(words)
        words = words.without(*words.of_sweep)
    part, names = words.flag("--package"), [*keys.schema_keys(), *keys.schema_sections()]
    composed = compose(words.without("--cfg"))
    if part is not None and part not in names:
        raise ConfigError(f"--package {part}: there is no such part of the configuration"
                          + did_you_mean(part, names), where=COMMAND_LINE)
    value: Any = asdict(composed.values())
    for name in part.split(".") if part else ():
        value = value[name]
    for note in composed.notes:
        sys.stderr.write(f"{note}\n")
    sys.stdout.write(config_yaml.yaml_text(value) if isinstance(value, dict) else f"{value}\n")
    if composed.sources and (problems := composed.problems()):
        sys.stderr.write(f"ppocli train refuses this: {listed(map(str, problems))}\n")


def _for_hydra(setting: Setting) -> list[str]:
    """The words that make Hydra set a value. In texts, ``\\n`` is a line break, ``\\t`` a tab;
    ``KEY={}`` empties a mapping, which Hydra alone would merge."""
    key, value = setting.key, setting.value or ""
    if re.search(r"\\[nt]", value) and keys.takes_escapes(key):
        parsed = OverridesParser.create().parse_override(f"x={value}").value()
        setting = replace(setting, value=config_yaml.literal_value(
            each_text(parsed, unescaped), config_yaml.quoted))
    schema_key = keys.key_for(key)
    empties = value.replace(" ", "") == "{}" and schema_key and schema_key.kind == "mapping"
    return [f"{key}=???", str(setting)] if empties else [str(setting)]


def _apply_precedence(node: DictConfig, typed_keys: set[str]) -> None:
    """Change the values of files and defaults that contradict typed ones: another length of the
    run, larger batches than they are cut from, lengths beyond the longest response, another source
    of prompts. Two typed values stay, and are refused later."""
    for keys_of_rows in _ROWS:
        if any(key in typed_keys and OmegaConf.select(node, key) not in (None, {})
               for key in keys_of_rows):
            for key in keys_of_rows:
                if key not in typed_keys:
                    OmegaConf.update(node, key, keys.schema_keys()[key].default, merge=False)
    for section, lengths in LENGTHS.items():
        if any(f"{section}.{name}" in typed_keys and node[section][name] is not None
               for name in lengths):
            node[section].update({name: None for name in lengths
                                  if f"{section}.{name}" not in typed_keys})
    changed = set(typed_keys)
    pairs = () if node.env.fn is not None else tuple(
        ("generation.max_new_tokens", f"reward.{name}")
        for name in ("min_response_length", "overlong_buffer"))
    for most, key in (*SIZES, *pairs):
        limit = OmegaConf.select(node, most)
        if most in changed and key not in typed_keys and \
                (OmegaConf.select(node, key) or 0) > limit > 0:
            OmegaConf.update(node, key, limit)
            changed.add(key)


def _overruled(files: Sequence[hydra_bridge.Entry], node: DictConfig, words: Words,
               sources: Mapping[str, str]) -> str:
    """A sentence that lists values of a typed option of a group (``ppo=trlx``) that a recipe
    replaces; "" if there are none."""
    options = {f"/{each.key}/{each.value}.yaml": f"{each.key}={each.value}"
               for each in words.settings if each.key in config_groups()}
    lost: dict[str, list[str]] = {}
    for key, value, file in files:
        now = OmegaConf.select(node, key)
        for end, option in options.items():
            if f"/{file}".endswith(end) and sources[key] not in (file, COMMAND_LINE) \
                    and now != value:
                lost.setdefault(f"{sources[key]} goes over {option}: ", []).append(
                    f"{key}={shown(now)} (not {shown(value)})")
    return "; ".join(f"{start}{', '.join(texts)}" for start, texts in lost.items()) + (
        "; a key that is typed goes over both" if lost else "")


def _without_plus(word: str, loader: hydra_bridge.Loader) -> str:
    """``word`` without a plus before a key that doesn't exist, which Hydra would add."""
    key = word.partition("=")[0].lstrip("+")
    adds = word.startswith("+") and key != "recipe" and keys.key_for(key) is None \
        and not key.startswith("hydra.") and not loader.get_group_options(key.partition("@")[0])
    return word.lstrip("+") if adds else word


def _settings_of(override: Override) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of what a word sets, down to the keys of the schema."""
    name, value = override.key_or_group, override.value()
    if isinstance(value, dict) and value and name not in keys.schema_keys():
        yield from config_yaml.leaves(f"{name}.", value)
    else:
        yield name, value


def _check_overrides(overrides: Sequence[Override]) -> None:
    """Refuse secrets, words of sweeps, and settings of Hydra that would have no effect."""
    for override in overrides:
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: several values, but this is a single run",
                              where=COMMAND_LINE, fix="add -m to run each of them; "
                              "a list is key=[a,b], a text with commas key='\"a,b\"'")
        key = override.key_or_group
        if key.startswith(("hydra.", "hydra/")) and not key.startswith(_OF_SWEEPS):
            raise ConfigError(f"{key} has no effect here: of Hydra's own settings, only those "
                              "of sweeps are read", where=COMMAND_LINE, fix="leave it out; "
                              "output_dir and run_name say where a run goes, --config-dir where "
                              "recipes and groups are")
    secrets.refuse_secrets((each.key_or_group, each.value(), COMMAND_LINE) for each in overrides)


def _refused_override(error: ConfigCompositionException, overrides: Sequence[Override]
                      ) -> Override | None:
    """The word that Hydra refused; None if a file or the choice of groups is to blame."""
    text = str(error)
    key = re.match(r"(?:Could not|Override) [^']*'([^']+)'(?!.*defaults list)", text)
    return next((each for each in overrides if (key and each.key_or_group == key[1])
                 or text == f"Error merging override {each.input_line}"), None)


def _word_problem(error: ConfigCompositionException, override: Override,
                  files: Sequence[hydra_bridge.Entry]) -> Problem:
    key, value, text = override.key_or_group, override.value(), str(error)
    if isinstance(value, dict) and key not in keys.schema_keys():
        key = str(getattr(error.__cause__, "full_key", key))  # the wrong one inside
        value = dict(_settings_of(override)).get(key)
    if (schema_key := keys.key_for(key)) is None:
        task = next((str(entry.value) for entry in reversed(files) if entry.key == "task.fn"), None)
        return unknown_key(key, COMMAND_LINE, task)
    if text.startswith("Could not append"):
        problem = "there is such an item already, + can't add it: leave the + out"
    elif text.startswith("Could not delete"):
        problem = "can't be removed: " + (f"it is not {shown(value)}" if "The value of" in text
                                          else "there is no such item")
    elif override.is_delete():
        problem = "a key can't be removed; leave it out, or set it to another value"
    else:
        problem = keys.why_wrong(schema_key, key, value)
    return Problem(key, problem, COMMAND_LINE, "wrong-type")


def _file_problems(error: ConfigCompositionException, files: Sequence[hydra_bridge.Entry]
                   ) -> list[Problem]:
    """All keys in files that don't exist; without any, the first value of a wrong type."""
    unknown = [unknown_key(key, file) for key, _, file in files if keys.key_for(key) is None]
    wrong = re.sub(r"\[.*", "", str(getattr(error.__context__, "full_key", None) or ""))
    key, entry = keys.key_for(wrong), next((each for each in reversed(files) if each.key == wrong),
                                           None)
    return unknown or ([] if key is None or entry is None else [
        Problem(wrong, keys.why_wrong(key, wrong, entry.value), entry.file, "wrong-type")])


def settle(node: DictConfig, sources: Mapping[str, str]) -> Iterator[Problem]:
    """Convert values that OmegaConf's types can't describe, and find interpolations that can't be
    resolved; the key of each problem gets its default."""
    for name, key in keys.schema_keys().items():
        value, code = None, "wrong-type"
        try:
            if OmegaConf.is_config(value := OmegaConf.select(node, name)):
                value = OmegaConf.to_container(value, resolve=True)
            if key.kind == "sweep":
                text_alone = each_text(key.converted(value), config_yaml.escape_interpolations)
                OmegaConf.update(node, name, text_alone, merge=False)
            continue
        except InterpolationResolutionError as error:
            text, code = f"can't be resolved: {first_line(error)}", "unresolved"
        except OmegaConfBaseException:
            text = keys.why_wrong(key, name, value)
        except ValueError as error:
            text = f"{shown(value)} can't be read: {error}"
        yield Problem(name, text, sources.get(name, COMMAND_LINE), code)
        OmegaConf.update(node, name, key.default)


def resumed_run(words: Words) -> Path | None:
    """The run folder of ``resume=FOLDER``; None for the other values of that key.

    Raises:
        CheckpointError: there is no such folder, or its config.yaml was changed by hand.
        ConfigError: words that can't be combined with it.
    """
    if (folder_text := words.value("resume")) in (None, "auto", "never"):
        return None
    run = Path(folder_text).expanduser().absolute()
    if not run.is_dir():
        raise CheckpointError(f"resume={folder_text}: there is no such folder", where=str(run),
                              fix="give a run folder, e.g. resume=runs/NAME; to start afresh leave "
                                  "resume out")
    resume_policy.settings_before(run, accept_changes=words.flag(ACCEPT_CHANGES) is not None)
    refused = [setting.key for setting in words.settings
               if setting.key in (*config_groups(), "recipe")]
    name, folder = words.value("run_name"), words.value("output_dir")
    refused += ["run_name"] * (name not in (None, "null", run.name)) + ["output_dir"] * (
        folder is not None and Path(folder).expanduser().resolve() != run.resolve().parent)
    if refused:
        raise ConfigError(
            f"{', '.join(refused)} can't be set when a run is resumed: its own folder and "
            "config.yaml are the base", where=COMMAND_LINE, fix="override single keys, e.g. "
            "ppo.total_episodes=4000; to rename the run, move its folder: mv RUN NAME")
    return run
