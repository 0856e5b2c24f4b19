"""Render chat templates row after row, faster than transformers does it one by one.

transformers prepares every conversation for whatever a program may pass, and its sandbox asks
anew for each attribute whether it is safe. Rows of data are plain text mostly, and ask for the
same few attributes; what is known to be safe is answered at once, all else by the sandbox.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import BuiltinMethodType
from typing import Any

_DICT_ATTRIBUTES = frozenset(dir(dict))
# All but `format` and `format_map`, which the sandbox wraps; underscores are its business too.
_TEXT_METHODS = frozenset(
    name for name in dir(str) if not name.startswith("_") and not name.startswith("format")
)
_LOOP_NUMBERS = frozenset(("index", "index0", "revindex", "revindex0", "first", "last", "length"))

_PLAIN_TYPES = frozenset((str, int, float, bool, type(None)))

_REASONING = frozenset(("reasoning_content", "thinking", "reasoning"))

QuickRender = Callable[[Sequence[Mapping[str, Any]], "list[Any] | None"], str]


def quick_render(fast: Any) -> QuickRender | None:
    """Return a function (messages, tools) -> text for what `is_plain` accepts, None if none fits.

    `fast` is a transformers tokenizer with one chat template. The caller compares the function
    with `apply_chat_template` on some rows, for it builds on what is private to transformers.
    """
    if not isinstance(fast.chat_template, str):
        return None  # several templates, chosen by the tools of each row
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        template = _compile_jinja_template(fast.chat_template)
        quick = _environment_class()(
            trim_blocks=template.environment.trim_blocks,
            lstrip_blocks=template.environment.lstrip_blocks,
            extensions=[type(e) for e in template.environment.extensions.values()],
        )
        quick.filters.update(template.environment.filters)
        quick.tests.update(template.environment.tests)
        quick.globals.update(template.environment.globals)
        render = quick.from_string(fast.chat_template).render
        tokens = dict(fast.special_tokens_map)
    except Exception:  # another transformers, an odd template: rows are rendered its own way
        return None

    def rendered(messages: Sequence[Mapping[str, Any]], tools: list[Any] | None) -> str:
        return render(
            messages=list(messages),
            tools=tools,
            documents=None,
            add_generation_prompt=False,
            **tokens,
        )

    return rendered


def is_plain(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> bool:
    """Return whether transformers would hand these to a template as they are.

    It drops null fields of messages, copies thinking under other names, and replaces what JSON
    does not know; what has none of that needs no preparation.
    """
    for message in messages:
        if type(message) is not dict:
            return False
        for name, value in message.items():
            if value is None or name in _REASONING:
                return False
            if type(value) is not str and not _is_json(value):
                return False
    if tools is not None:
        return all(type(tool) is dict and _is_json(tool) for tool in tools) and bool(messages)
    return bool(messages)


def is_json(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> bool:
    """Return whether JSON knows all of these; transformers prints `<date>` for a date."""
    return _is_json(messages) and (tools is None or _is_json(tools))


def _is_json(value: Any) -> bool:
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return True
    if kind is dict:
        return all(type(k) is str and _is_json(v) for k, v in value.items())
    return kind is list and all(map(_is_json, value))


@cache
def _environment_class() -> Any:
    from jinja2.runtime import LoopContext, missing
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class QuickEnvironment(ImmutableSandboxedEnvironment):
        """The sandbox, with a short cut for fields of messages, methods of text and loops."""

        def getattr(self, obj: Any, attribute: str) -> Any:
            kind = type(obj)
            if kind is dict:
                if attribute not in _DICT_ATTRIBUTES:
                    found = obj.get(attribute, missing)
                    return (
                        found if found is not missing else self.undefined(obj=obj, name=attribute)
                    )
            elif (kind is str and attribute in _TEXT_METHODS) or (
                kind is LoopContext and attribute in _LOOP_NUMBERS
            ):
                return getattr(obj, attribute)
            elif isinstance(obj, Namespace) and not attribute.startswith("_"):
                found = getattr(obj, attribute, missing)
                if type(found) in _PLAIN_TYPES:
                    return found
            return super().getattr(obj, attribute)

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            # keywords hold what the compiler adds (_loop_vars), or what a template named itself
            if type(__obj) is BuiltinMethodType and type(__obj.__self__) is str:
                names = set(kwargs) - {"_loop_vars", "_block_vars"}
                if not names and __obj.__name__ in _TEXT_METHODS:
                    return __obj(*args)
            return super().call(__context, __obj, *args, **kwargs)

    return QuickEnvironment
