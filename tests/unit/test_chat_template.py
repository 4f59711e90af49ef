"""Chat templates of the user's, and values for what a template reads."""

import pytest
from helpers import refused, save_lm, save_talker
from played import chat_tokenizer

from ppocli.config.schema import ModelConfig, TrainConfig
from ppocli.errors import InputError
from ppocli.launch.input_checks import missing_inputs
from ppocli.models.loading.tokenizer import load_tokenizer, read_template, with_values

THINKS = ("{%- macro turn(m) -%}<{{ m.role }}{{ tone }}> {{ m.content }}\n{% endmacro -%}\n"
          "{%- for m in messages %}{{ turn(m) }}{% if loop.last %}{% break %}{% endif %}"
          "{% endfor %}{% if add_generation_prompt %}{% generation %}<assistant>"
          "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
          "{% endgeneration %}{% endif %}")
ASKED = [{"role": "user", "content": "is it\ngood ?"}]
VALUES = {"enable_thinking": False, "tone": ", \"kind\" %}'\n\\n"}


def rendered(template: str, **values) -> str:
    return chat_tokenizer(template).apply_chat_template(ASKED, tokenize=False,
                                                        add_generation_prompt=True, **values)


@pytest.mark.parametrize("front", ["", "\n.", "    .", "\n    {# so #}\n.",
                                   "{%+ generation +%}.{%+ endgeneration %}"])
def test_a_template_sets_the_values_itself_unless_its_caller_does(front):
    own = with_values(given := front + THINKS, VALUES, ["eos_token"])
    assert rendered(given) != rendered(own) == rendered(given, **VALUES)
    other = {"enable_thinking": True, "tone": ""}
    assert rendered(own, **other) == rendered(given, **other)
    assert with_values(own, VALUES, []) == own


@pytest.mark.parametrize(("template", "values", "words"), [
    (THINKS, {"enable_thinkin": False}, ["no 'enable_thinkin', but enable_thinking, tone",
                                         "Did you mean 'enable_thinking'?"]),
    (THINKS, {"messages": []}, ["reads no 'messages'"]),
    ("{{ messages }}{{ eos_token }}", {"eos_token": "x"}, ["but messages alone"]),
    (None, {"tone": 1}, ["reads no 'tone'"])])
def test_values_that_no_template_takes_are_refused(template, values, words):
    with refused(InputError, *words, "model.chat_template_kwargs"):
        with_values(template, values, ["eos_token"])


@pytest.mark.parametrize(("said", "words"), [
    (None, ["can't be read", "No such file"]), (b"\xff", ["can't be read", "utf-8"]),
    ("a\n{% for m in messages %}", ["malformed", "t.jinja:2"]), ("hello", ["no chat template"])])
def test_what_is_no_chat_template_is_refused(said, words, tmp_path):
    path = tmp_path / "t.jinja"
    if said is not None:
        path.write_bytes(said if isinstance(said, bytes) else said.encode())
    with refused(InputError, *words, "model.chat_template"):
        read_template(str(path))
    cfg = TrainConfig(model=ModelConfig(path="builtin:reviews", chat_template=str(path)))
    assert [one.where.split(",")[0] for one in missing_inputs(cfg)] == ["model.chat_template"]


def test_a_tokenizer_gets_the_template_that_is_asked_for(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text(THINKS)
    plain = ModelConfig(path=str(save_lm(tmp_path / "plain")), chat_template=str(file))
    assert load_tokenizer(plain).chat_template == THINKS
    plain.chat_template_kwargs = VALUES
    talker = ModelConfig(path=str(save_talker(tmp_path / "talker")), chat_template=str(file),
                         chat_template_kwargs=VALUES)
    found = load_tokenizer(talker)
    assert found.chat_template == load_tokenizer(plain).chat_template == with_values(
        THINKS, VALUES, [])
