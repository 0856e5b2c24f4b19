"""Render chat templates row after row, faster than transformers does it one by one.

transformers prepares every conversation for whatever a program may pass, and its sandbox asks
anew for each attribute whether it is safe. Rows of data are plain text mostly, and templates ask
for the same few attributes: these are compiled to be read in place, all else asks the sandbox.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
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
        from jinja2.runtime import new_context
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
        compiled = quick.from_string(fast.chat_template)
        known = {**compiled.globals, "documents": None, "add_generation_prompt": False}
        known.update(fast.special_tokens_map)
    except Exception:  # another transformers, an odd template: rows are rendered its own way
        return None

    def rendered(messages: Sequence[Mapping[str, Any]], tools: list[Any] | None) -> str:
        # as `compiled.render`, which copies the globals through a ChainMap for every row
        names = {**known, "messages": list(messages), "tools": tools}
        context = new_context(quick, None, compiled.blocks, names, shared=True, globals=known)
        return "".join(compiled.root_render_func(context))

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
    from jinja2 import nodes
    from jinja2.compiler import CodeGenerator
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class QuickCode(CodeGenerator):
        """Python of a template that asks the sandbox only about what is not surely safe.

        Fields of messages, methods of text and numbers of loops are read in place.
        """

        def visit_Getattr(self, node: Any, frame: Any) -> None:
            name = node.attr
            if name in _LOOP_NUMBERS:
                self._either(f"t_it.{name}", node.node, frame, "is LoopContext")
            elif name.startswith("_") or name in _DICT_ATTRIBUTES:
                super().visit_Getattr(node, frame)
                return
            else:
                self._either(f"t_it[{name!r}]", node.node, frame, f"is dict and {name!r} in t_it")
            self.write(f"environment.getattr(t_it, {name!r}))")

        def visit_Getitem(self, node: Any, frame: Any) -> None:
            name = node.arg.value if isinstance(node.arg, nodes.Const) else None
            if type(name) is str:
                self._either(f"t_it[{name!r}]", node.node, frame, f"is dict and {name!r} in t_it")
                self.write(f"environment.getitem(t_it, {name!r}))")
            else:
                super().visit_Getitem(node, frame)

        def visit_Call(self, node: Any, frame: Any, forward_caller: bool = False) -> None:
            called = node.node
            is_plain = not (node.kwargs or node.dyn_args or node.dyn_kwargs or forward_caller)
            if (
                is_plain
                and isinstance(called, nodes.Getattr)
                and called.attr in _TEXT_METHODS
                and all(isinstance(arg, nodes.Const) for arg in node.args)
            ):
                args = "".join(f"{arg.value!r}, " for arg in node.args)
                self._either(f"t_it.{called.attr}({args})", called.node, frame, "is str")
                method = f"environment.getattr(t_it, {called.attr!r})"
                self.write(f"environment.call(context, {method}, {args}))")
            else:
                super().visit_Call(node, frame, forward_caller=forward_caller)

        def _either(self, found: str, node: Any, frame: Any, kind: str) -> None:
            """Write `(found if type(value) is kind else `, where `found` reads the value t_it."""
            self.write(f"({found} if type(t_it := (")
            self.visit(node, frame)
            self.write(f")) {kind} else ")

    class QuickEnvironment(ImmutableSandboxedEnvironment):
        """The sandbox, with a short cut for namespaces."""

        code_generator_class = QuickCode

        def getattr(self, obj: Any, attribute: str) -> Any:
            if isinstance(obj, Namespace) and not attribute.startswith("_"):
                found = getattr(obj, attribute, self)
                if type(found) in _PLAIN_TYPES:
                    return found
            return super().getattr(obj, attribute)

    return QuickEnvironment
