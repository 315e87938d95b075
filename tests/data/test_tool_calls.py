"""Arguments of tool calls are taught as the JSON that the target says, however a template takes them."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_lightning.data import ChatRenderer, UnusableRow

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} FORM</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORMS = {
    "tojson": "{{ c.function.arguments | tojson }}",
    "concat": "{{ '' + c.function.arguments }}",
    "print": "{{ c.function.arguments }}",
    "either": ("{% set a = c.function.arguments %}{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}"),
}
CITY = {"city": "Oslo", "days": [1, True], "where": None}
TEXT = '{"city": "Oslo", "days": [1, true], "where": null}'


def taught(kit: Any, form: str, arguments: Any) -> str:
    function = {"name": "w"} if arguments is ... else {"name": "w", "arguments": arguments}
    call = {"type": "function", "function": function}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    renderer = ChatRenderer(kit.make_tokenizer(TEMPLATE.replace("FORM", FORMS.get(form, form))))
    ((_, (span,)),) = kit.texts(renderer, messages)
    return str(span)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("arguments", [CITY, TEXT], ids=["object", "text"])
def test_an_object_and_its_text_are_taught_as_json(kit: Any, form: str, arguments: Any) -> None:
    assert taught(kit, form, arguments) == f"<call>w {TEXT}</call><|im_end|>"


@pytest.mark.parametrize("form", ["tojson", "concat", "print", "either"])
@pytest.mark.parametrize("arguments", [None, {}, "{}", ...], ids=["null", "object", "text", "absent"])
def test_no_arguments_are_an_empty_object_as_servers_make_it(kit: Any, form: str, arguments: Any) -> None:
    assert taught(kit, form, arguments) == "<call>w {}</call><|im_end|>"


def test_a_template_that_walks_through_the_arguments_gets_an_object(kit: Any) -> None:
    form = "{% for k, v in c.function.arguments | items %}<p={{ k }}>{{ v }}</p>{% endfor %}"
    for arguments in ({"city": "Oslo"}, '{"city": "Oslo"}'):
        assert taught(kit, form, arguments) == "<call>w <p=city>Oslo</p></call><|im_end|>"
    assert taught(kit, form, None) == "<call>w </call><|im_end|>"
    with pytest.raises(UnusableRow, match="the chat template refuses it"):
        taught(kit, form, "Oslo")


def test_text_that_is_no_object_stays_text(kit: Any) -> None:
    assert taught(kit, "print", '{"city": ') == '<call>w {"city": </call><|im_end|>'
    assert taught(kit, "concat", "[1]") == "<call>w [1]</call><|im_end|>"


def test_a_prompt_shows_an_earlier_call_as_training_does(kit: Any) -> None:
    for form in FORMS.values():
        renderer = ChatRenderer(kit.make_tokenizer(TEMPLATE.replace("FORM", form)))
        call = {"type": "function", "function": {"name": "w", "arguments": CITY}}
        messages = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "42"},
            {"role": "assistant", "content": "It is 42."},
        ]
        (row,) = kit.rows(renderer, messages)
        prompt = renderer.encode_prompt(messages[:-1])
        assert row.input_ids[: len(prompt)] == prompt
        assert TEXT in renderer.tokenizer.decode(prompt)
