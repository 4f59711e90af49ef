"""``ppocli completion``: scripts for bash, zsh and fish, printed or put into place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ppocli.cli.output import ending
from ppocli.errors import ConfigError, DiskError


def _shells() -> list[str]:
    return ["bash", "zsh", "fish"]


def completion(
        shell: Annotated[str | None, typer.Argument(
            metavar="[SHELL]", autocompletion=_shells, show_default=False,
            help="bash, zsh or fish (default: the one that this runs in).")] = None,
        install: Annotated[bool, typer.Option(
            "--install", help="Put it where the shell finds it.")] = False) -> None:
    """Print the script that completes ppocli's commands, keys and runs after TAB.

    \b
    Examples:
      ppocli completion --install
      source <(ppocli completion bash)
      ppocli completion zsh > ~/.zfunc/_ppocli
    """
    ending(lambda: install_script(shell) if install else show(shell))


SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_PPOCLI_COMPLETE"

# Typer's own script hands over words that bash has broken at = and :, so that ppocli could not tell
# `KEY=` from `KEY `; this one hands over the line, and cuts what bash keeps from the answers.
_BASH = r"""
_ppocli_completion() {
    local line=${COMP_LINE:0:COMP_POINT} kept offer
    local -a offers
    mapfile -t offers < <(_PPOCLI_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \
        _TYPER_COMPLETE_ARGS=$line "$1" 2>/dev/null)
    # bash replaces only what follows the last of its word breaks
    kept=${line##*[[:space:]]}
    while [[ -n $kept ]]; do
        [[ ${kept: -1} == [=:] && $COMP_WORDBREAKS == *"${kept: -1}"* ]] && break
        kept=${kept%?}
    done
    COMPREPLY=()
    for offer in "${offers[@]}"; do
        offer=${offer%%$'\t'*}
        [[ $offer == "$kept"* ]] && COMPREPLY+=("${offer#"$kept"}")
    done
    # a value follows at once
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o default -o nosort -F _ppocli_completion ppocli
"""


def completion_script(shell: str) -> str:
    """The script that makes a shell ask ppocli for completions."""
    if shell == "bash":
        return _BASH.strip()
    from typer.completion import get_completion_script

    return get_completion_script(prog_name="ppocli", complete_var=_VARIABLE, shell=shell)


def find_shell(given: str | None = None) -> str:
    """The shell that is named, else the one that ppocli runs in, else that of ``$SHELL``.

    Raises:
        ConfigError: it isn't one that we know.
    """
    from ppocli.config.keys import did_you_mean

    found = given or _around_us() or Path(os.environ.get("SHELL", "")).name
    if found not in SHELLS:
        what = f"there is no completion for {found!r}{did_you_mean(found, SHELLS)}" if found \
            else "the shell could not be told"
        raise ConfigError(what, where="SHELL",
                          fix="name one of bash, zsh, fish: ppocli completion bash")
    return found


def _around_us() -> str | None:
    import shellingham

    try:
        name = str(shellingham.detect_shell()[0])
    except (shellingham.ShellDetectionFailure, OSError):
        return None
    return name if name in SHELLS else None  # a plain sh, as of a script, tells nothing


def show(shell: str | None) -> None:
    """Print the script of a shell."""
    print(completion_script(find_shell(shell)))


def install_script(shell: str | None) -> None:
    """Put the script of a shell where it finds it, and print the file's path.

    Raises:
        DiskError: a file in the home folder can't be written.
    """
    from ppocli.cli.output import say

    name = find_shell(shell)
    try:
        path = _install_bash() if name == "bash" else _install_other(name)
    except OSError as error:
        raise DiskError(f"the completion can't be installed: {error}", where=str(Path.home()),
                        fix=f"ppocli completion {name} > FILE, and have the shell read it"
                        ) from error
    say(f"completion for {name} takes effect in new shells; the script:")
    print(path)


def _install_bash() -> Path:
    home = Path.home()
    path = home / ".bash_completions/ppocli.sh"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(completion_script("bash") + "\n", encoding="utf-8")
    line = f"source '{path}'"
    start = home / ".bashrc"
    lines: Sequence[str] = start.read_text(encoding="utf-8").splitlines() if start.exists() else ()
    if line not in lines:
        with start.open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")
    return path


def _install_other(name: str) -> Path:
    from typer.completion import install as install_completion

    return install_completion(shell=name, prog_name="ppocli", complete_var=_VARIABLE)[1]
