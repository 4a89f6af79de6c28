"""What the chat template makes of conversations is what transformers makes of them."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from vecd.gateway.tokenization import chat_template
from vecd.gateway.tokenization.chat_template import ChatTemplate, Refused

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
LLAMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% else %}
{% set loop_messages = messages %}{% endif %}{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate') }}{% endif %}
{% generation %}{{ message['content'] | trim + ' ' + eos_token }}{% endgeneration %}{% endfor %}"""
PARTS = """{% for message in messages %}{{ message.role }}:{% for part in message.content %}
{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{% if tools is not none %}tools{% endif %}
{{ {'a<': message.role} | tojson }}{% break %}{% endfor %}{{ strftime_now('%%') }}"""
BOTH = """{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}
{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"""
CHAT = [{"role": "user", "content": " a "}, {"role": "assistant", "content": "b<"}, {"role": "user", "content": "c"}]


def render(source: str, *conversations: list[dict[str, Any]], does_continue: bool = False, **kwargs: Any) -> list[str]:
    return ChatTemplate(source, TOKENS).render(list(conversations), kwargs, continue_final_message=does_continue)


def of_transformers(source: str, *conversations: list[dict[str, Any]], **kwargs: Any) -> list[str]:
    render_templates: Any = render_jinja_template  # annotated as if it returned one string
    rendered: list[str]
    rendered, _ = render_templates(list(conversations), chat_template=source, **{**TOKENS, **kwargs})
    return rendered


@pytest.mark.parametrize("source", [CHATML, LLAMA, BOTH])
@pytest.mark.parametrize("kwargs", [{}, {"add_generation_prompt": True}, {"eos_token": "<end>"}])
def test_it_renders_what_transformers_does(source, kwargs):
    assert render(source, CHAT, CHAT[:1], **kwargs) == of_transformers(source, CHAT, CHAT[:1], **kwargs)


@pytest.mark.parametrize("source", [CHATML, LLAMA])
def test_the_last_message_is_continued_as_with_transformers(source):
    chat = [*CHAT[:2], {"role": "user", "content": "c  "}]
    assert render(source, chat, does_continue=True) == of_transformers(source, chat, continue_final_message=True)


def test_parts_are_given_to_templates_that_take_them():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    as_parts = [{"role": "user", "content": parts}]
    assert render(PARTS, as_parts) == of_transformers(PARTS, as_parts)
    one_part = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert render(PARTS, [{"role": "user", "content": "a"}]) == of_transformers(PARTS, one_part)
    assert render(BOTH, as_parts) == of_transformers(BOTH, as_parts)
    joined = [{"role": "user", "content": "a\nb"}]
    assert render(CHATML, as_parts) == of_transformers(CHATML, joined)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (LLAMA, "^refuses the conversation: Conversation roles must alternate$"),
        ("{{ raise_exception('bad: ' + messages[0].content) }}", "^refuses the conversation$"),
        ("{{ messages[0].content.no.such }}", r"^fails on the conversation \(UndefinedError\)$"),
        ("{{ messages[0].__class__.__mro__ }}", r"^fails on the conversation \(SecurityError\)$"),
        ("{{ messages.append(1) }}", r"^fails on the conversation \(SecurityError\)$"),
        ("{% for i in range(10 ** 6) %}{% endfor %}", r"^fails on the conversation \(OverflowError\)$"),
        ("{{ 1 / 0 }}", r"^fails on the conversation \(ZeroDivisionError\)$"),
    ],
)
def test_a_conversation_that_a_template_does_not_take_is_refused_without_a_quote(source, says):
    with pytest.raises(Refused, match=says):
        render(source, [{"role": "user", "content": "secret"}, {"role": "user", "content": "secret"}])


def test_what_is_rendered_is_bounded(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_CHARS", 10)
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "x" * 10}]) == ["x" * 10]
    with pytest.raises(Refused, match="more than 10 characters"):
        render("{{ messages[0].content }}", *[[{"role": "user", "content": "x" * 6}]] * 2)


def test_a_message_that_is_left_out_cannot_be_continued():
    with pytest.raises(Refused, match="leaves out the end of the last message"):
        render("{{ messages[0].content }}", CHAT, does_continue=True)
    assert render(CHATML, [{"role": "user", "content": ""}], does_continue=True) == ["<|im_start|>user\n"]
