"""Chat templates that the user gives, and values for what a template reads."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jinja2.defaults
import jinja2.meta

from ppocli.errors import InputError
from ppocli.text import first_line, suggestion

FILE, VALUES = "model.chat_template", "model.chat_template_kwargs"
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
          "raise_exception", "strftime_now", *jinja2.defaults.DEFAULT_NAMESPACE}
"""what transformers tells every template"""
_MARKS = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
"""blocks that transformers adds to Jinja"""


def read_template(path: str) -> str:
    """The chat template in a file.

    Raises:
        InputError: it can't be read, is malformed, or no chat template.
    """
    fix = "give a file that holds a Jinja template of messages, each with role and content"
    try:
        template = Path(path).read_text("utf-8")
        reads = _variables(template)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The chat template can't be read: {first_line(error)}", where=FILE,
                         fix=fix) from error
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"The chat template is malformed: {error.message}",
                         where=f"{FILE}, {path}:{error.lineno}", fix="mend that line") from error
    if "messages" not in reads:
        raise InputError(f"{path} reads no messages: it is no chat template.", where=FILE, fix=fix)
    return template


def with_values(own: Any, values: Mapping[str, Any], special: Collection[str]) -> Any:
    """A tokenizer's template, or each of several by name, with lines in front by which it sets
    ``values`` itself unless its caller does: whoever loads what was trained with it renders
    conversations as training did.

    Args:
        special: names of special tokens, which are not for the user to set.

    Raises:
        InputError: no template, a malformed one, or none that reads such a name; or Jinja can't say
            a value.
    """
    if not own:
        raise InputError("The tokenizer has no chat template that could read values.",
                         where=VALUES, fix=f"leave them out, or {FILE}=FILE")
    templates = own if isinstance(own, dict) else {"": own}
    try:
        known = set().union(*map(_variables, templates.values())) - {*_GIVEN, *special}
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"The tokenizer's chat template is malformed: {error.message}",
                         where=f"{VALUES}, line {error.lineno} of the template",
                         fix=f"{FILE}=FILE, with one that isn't") from error
    for name, value in values.items():
        if name not in known:
            raise InputError(f"The chat template reads no {name!r}, but "
                             f"{', '.join(sorted(known)) or 'messages alone'}. "
                             f"{suggestion(str(name), known)}".rstrip(), where=f"{VALUES}.{name}",
                             fix="take it out")
        if not _can_be_said(value):
            raise InputError(f"A template can't say {value!r}.", where=f"{VALUES}.{name}",
                             fix="give texts, finite numbers, true, false, null, or lists or "
                             "mappings of them")
    # transformers takes out the line break behind a block
    lines = "".join(f"{{%- set {name} = {name} | default({value!r}) %}}\n"
                    for name, value in values.items())
    # a model that was trained with them has the lines
    found = {name: template if template.startswith(lines) else lines + template
             for name, template in templates.items()}
    return found if isinstance(own, dict) else found[""]


def _can_be_said(value: Any) -> bool:
    """Whether Jinja reads a value as Python spells it."""
    try:
        return bool(jinja2.Environment().compile_expression(repr(value))() == value)
    except jinja2.TemplateError:
        return False


def _variables(template: str) -> set[str]:
    """What a template reads beside what it sets itself."""
    jinja = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    return jinja2.meta.find_undeclared_variables(jinja.parse(_MARKS.sub("", template)))
