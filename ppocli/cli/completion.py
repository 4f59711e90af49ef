"""What the shell offers after TAB, and ``ppocli completion``. No Hydra, no torch.

Typer has the scripts and speaks with the shells. bash breaks words at ``=`` and ``:``, and Typer
hands on the last piece alone: :func:`complete_word` puts the words together again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ppocli.builtin.names import config_groups, recipe_files
from ppocli.cli.output import say
from ppocli.errors import ConfigError, DiskError, PpocliError

HYDRA_FLAGS = {
    "-m": "run every combination of KEY=A,B", "--multirun": "run every combination of KEY=A,B",
    "--cfg": "print the composed configuration", "--resolve": "with --cfg: resolve references",
    "--package": "with --cfg: a part of it", "--info": "where configuration comes from",
    "--config-dir": "a folder with your own recipes or config groups",
    "--config-name": "another primary config", "--hydra-help": "Hydra's own help"}
SHELLS = ("bash", "zsh", "fish")
_CFG = ("job", "hydra", "all", "deepspeed")
_FLAG_VALUES = {"--cfg": _CFG, "-c": _CFG,
                "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")}
_BREAKS = frozenset("=:")
# bash keeps a colon before the cursor; a value follows KEY= at once
_BASH_HOOK = """\
    [[ ${COMP_WORDS[COMP_CWORD]} == : ]] && COMPREPLY=("${COMPREPLY[@]#:}")
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
    return 0
"""


# What is offered ----------------------------------------------------------------------------------

def complete_setting(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Settings KEY=VALUE and recipes, with what keys mean for shells that show it."""
    from ppocli.config.keys import schema_keys

    before = [ctx.params.get("run"), *(ctx.params.get("overrides") or ())]
    keys = schema_keys()
    offers = complete_word([word for word in before if word], incomplete)
    if not getattr(ctx.command, "takes_recipes", False):
        offers = [offer for offer in offers if not offer.startswith(("+", "recipe="))]
    return [(offer, key.metadata["doc"] if offer.endswith("=") and (key := keys.get(offer[:-1]))
             else "") for offer in offers]


def complete_target(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Runs; and settings, where RUN may be left out before them."""
    found = [(run, "") for run in complete_run(incomplete)]
    takes_settings = any(param.name == "overrides" for param in ctx.command.params)
    return complete_setting(ctx, incomplete) if not found and incomplete and takes_settings \
        else found


def complete_word(words: Sequence[str], incomplete: str) -> list[str]:
    """Completions of the last word of ``ppocli train``.

    Args:
        words: those before it; bash may have broken them at ``=`` and ``:``.
        incomplete: its beginning; where bash has broken it, only what follows the break.
    """
    whole, kept = _joined(words, incomplete)
    previous = whole[-1] if whole else ""
    if not kept and previous in _FLAG_VALUES:
        return [value for value in _FLAG_VALUES[previous] if value.startswith(incomplete)]
    # bash may stand right behind KEY=, and Typer has dropped the =
    if not kept and not incomplete and "=" not in previous and (offers := _values(previous, "")):
        return offers
    word = kept + incomplete
    key, equals, value = word.partition("=")
    offers = [f"{key}={option}" for option in _values(key, value)] if equals else \
        sorted(name for name in _names() if name.startswith(word))
    return [offer[len(kept):] for offer in offers if offer.startswith(kept)]


def complete_recipe(incomplete: str) -> list[str]:
    """Names of recipes."""
    return list(recipe_files())


def complete_run(incomplete: str) -> list[str]:
    """Run folders below ``runs`` that begin so, or their names, the newest first."""
    from ppocli.runs.target import list_runs, written

    found = sorted(list_runs(Path("runs")), key=written, reverse=True)
    paths = [str(folder) for folder in found if str(folder).startswith(incomplete)]
    return paths or [folder.name for folder in found if folder.name.startswith(incomplete)]


def complete_metrics(incomplete: str) -> list[str]:
    """Names of figures with commas between them: short ones, and those of the newest run."""
    from ppocli.report.curves import SHORT
    from ppocli.runs.record import read_run

    done, comma, last = incomplete.rpartition(",")
    names = list(SHORT)
    with suppress(PpocliError, OSError):  # no run yet, or a damaged one
        names += [name for run in complete_run("")[:1] for name in read_run(Path(run)).names]
    return [f"{done}{comma}{name}" for name in dict.fromkeys(names) if name.startswith(last)]


def complete_key(incomplete: str) -> list[str]:
    """Keys and sections of the configuration."""
    from ppocli.config.keys import schema_keys, schema_sections

    return [*schema_sections(), *schema_keys()]


def _joined(words: Sequence[str], incomplete: str) -> tuple[list[str], str]:
    """Words as they were typed, and the beginning of the last one that bash has broken off."""
    whole: list[str] = []
    open_end = False
    for word in words:
        is_break = word != "" and set(word) <= _BREAKS
        if whole and (is_break or open_end):
            whole[-1] += word
        else:
            whole.append(word)
        open_end = is_break
    open_end = open_end or incomplete in _BREAKS
    return (whole[:-1], whole[-1]) if open_end and whole else (whole, "")


def _names() -> Iterator[str]:
    from ppocli.config.keys import schema_keys

    yield from ("+recipe=", "recipe=")
    for name in (*config_groups(), *schema_keys()):
        yield f"{name}="


def _values(key: str, value: str) -> list[str]:
    from ppocli.config.keys import schema_keys

    done, comma, last = value.rpartition(",")  # a sweep: a,b,...
    name = key.lstrip("+")
    schema_key = schema_keys().get(name)
    if name == "recipe":
        options = list(recipe_files())
    elif name in config_groups():
        options = config_groups()[name]
    elif name == "resume":
        options = ["never", "auto", *complete_run("")]
    elif name in ("model.path", "prompts.path", "prompts.eval.path"):
        options = _builtin(name)
    elif name == "reward.fn":
        from ppocli.rewards.resolve import BUILTIN_REWARDS

        options = list(BUILTIN_REWARDS)
    else:
        choices = schema_key.metadata["choices"] if schema_key else None
        options = list(choices or (("true", "false") if schema_key and schema_key.item is bool
                                   else ()))
        if schema_key and schema_key.kind == "list":
            options = [f"[{option}]" for option in options]
    return [f"{done}{comma}{option}" for option in options if option.startswith(last)]


def _builtin(key: str) -> list[str]:
    from ppocli.builtin.names import BUILTIN_PREFIX, list_builtins

    names = [name for name, about in list_builtins().items() if not about.startswith("classifier")]
    return [BUILTIN_PREFIX + name for name in names
            if name.endswith("prompts") == key.startswith("prompts.")]


# The scripts --------------------------------------------------------------------------------------

def completion(
        shell: Annotated[str | None, typer.Argument(
            metavar="[SHELL]", autocompletion=lambda: SHELLS, show_default=False,
            help="bash, zsh or fish (default: the current shell).")] = None,
        install: Annotated[bool, typer.Option(
            "--install", help="Install it where the shell finds it.")] = False) -> None:
    """Print the script that completes ppocli's commands, keys and runs after TAB.

    \b
    Examples:
      ppocli completion --install
      source <(ppocli completion bash)
      ppocli completion zsh > ~/.zfunc/_ppocli
    """
    from typer.completion import get_completion_script
    from typer.completion import install as install_script

    name = find_shell(shell)
    typers = {"prog_name": "ppocli", "complete_var": "_PPOCLI_COMPLETE", "shell": name}
    script = get_completion_script(**typers)
    if name == "bash":
        script = script.replace("    return 0\n", _BASH_HOOK).replace(
            "complete -o default", "complete -o default -o nosort")
    if not install:
        print(script)
        return
    try:
        path = install_script(**typers)[1]
        path.write_text(script + "\n", encoding="utf-8")
    except OSError as error:
        raise DiskError(f"the completion can't be installed: {error}", where=str(Path.home()),
                        fix=f"ppocli completion {name} > FILE, and have the shell read it"
                        ) from error
    say(f"completion for {name} takes effect in new shells; the script:")
    print(path)


def find_shell(given: str | None = None) -> str:
    """The shell that is named, else the one that ppocli runs in, else that of ``$SHELL``.

    Raises:
        ConfigError: it isn't one that we know.
    """
    from ppocli.text import did_you_mean

    found = given or _shell_around() or Path(os.environ.get("SHELL", "")).name
    if found not in SHELLS:
        what = f"there is no completion for {found!r}{did_you_mean(found, SHELLS)}" if found \
            else "the shell could not be determined"
        raise ConfigError(what, where="SHELL",
                          fix="name one of bash, zsh, fish: ppocli completion bash")
    return found


def _shell_around() -> str | None:
    import shellingham

    try:
        name = str(shellingham.detect_shell()[0])
    except (shellingham.ShellDetectionFailure, OSError):
        return None
    return name if name in SHELLS else None  # a plain sh, as of a script, tells nothing
