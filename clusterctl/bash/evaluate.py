"""What a text of shell does, found without running anything: the statements of the language."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.bash.builtins import BUILTINS, unset
from clusterctl.bash.conditions import holds, words_of
from clusterctl.bash.evaluator import QUESTIONS, Evaluator, Function, Language, Script, Statement, Word
from clusterctl.bash.expand import Expander, quoted_text, text_of
from clusterctl.bash.state import State, Stop
from clusterctl.bash.syntax import Source, errors, parse, source_of
from clusterctl.bash.texts import Value, compiled, is_open, pattern, shown, unknown
from clusterctl.errors import Fault, InputFaults

if TYPE_CHECKING:
    from tree_sitter import Node


def _assignment(run: Evaluator, source: Source, node: Node) -> bool:
    name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
    written = source.written(name) if name is not None else ""
    more = any(child.type == "+=" for child in node.children)
    if value is not None and value.type == "array":
        _array(
            run,
            written,
            [source.written(child) for child in value.named_children if child.type != "comment"],
            more,
        )
        return True
    text = text_of(run, source.written(value)) if value is not None else ""
    if value is not None and value.type in ("simple_expansion", "expansion", "command_substitution"):
        # The value of an assignment is not divided.
        text = text_of(run, f'"{source.written(value)}"')
    if re.fullmatch(r"<[^<>]+>", text):
        text = unknown(text)
    target, _, key = written.partition("[")
    if key:
        own = run.state.variables.get(target)
        entries = dict(own) if isinstance(own, dict) else {}
        entries[text_of(run, key[:-1])] = text
        run.assign(target, entries)
    elif more and isinstance(own := run.state.variables.get(target), dict):
        run.assign(target, {**own, "0": own.get("0", "") + text})
    else:
        run.assign(target, f"{run.state.variables.get(target, '')}{text}" if more else text)
    return True


def _array(run: Evaluator, name: str, written: list[str], more: bool) -> None:
    own = run.state.variables.get(name)
    entries = (
        dict(own) if more and isinstance(own, dict) else {"0": own} if more and isinstance(own, str) else {}
    )
    for word in written:
        if keyed := re.match(r"\[([^\]]+)\]=", word):
            entries[text_of(run, keyed[1])] = text_of(run, word[keyed.end() :])
        else:
            for text in Expander(run).expand(word):
                entries[str(len(entries))] = text
    run.assign(name, entries)


def _declaration(run: Evaluator, source: Source, node: Node) -> bool:
    local = source.written(node).startswith("local ") and run.local
    for child in node.named_children:
        if local and child.type in ("variable_assignment", "variable_name", "word"):
            name = source.written(child).partition("=")[0]
            run.local[-1].setdefault(name, run.state.variables.get(name))
        if child.type == "variable_assignment":
            _assignment(run, source, child)
        elif child.type not in ("variable_name", "word"):
            for text in Expander(run).expand(source.written(child)):
                name, equals, value = text.partition("=")
                if equals:
                    run.assign(name, value)
    return True


def _function(run: Evaluator, source: Source, node: Node) -> bool:
    name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
    if name is not None and body is not None:
        run.state.functions[source.written(name)] = Function(source, body)
    return True


def _negation(run: Evaluator, source: Source, node: Node) -> bool | None:
    status = run.statement(source, node.named_children[-1])
    return None if status is None else not status


def _list(run: Evaluator, source: Source, node: Node) -> bool | None:
    """`A && B` and `A || B`."""
    first, second = node.named_children[0], node.named_children[-1]
    status = run.statement(source, first)
    wanted = any(child.type == "&&" for child in node.children)
    if status is not None and status != wanted:
        return status
    return run.choose(source, [(None if status is None else True, [second], source.written(first))])


def _test(run: Evaluator, source: Source, node: Node) -> bool | None:
    written = source.written(node)
    if written.startswith("(("):
        value = run.sum(text_of(run, written[2:-2], tested=True))
        return None if is_open(value) else value != "0"
    double = written.startswith("[[")
    return holds(run, words_of(written[1 + double : -1 - double].strip()), double=double)


def _compound(run: Evaluator, source: Source, node: Node) -> bool | None:
    """`{ ...; }`, and `(( ... ))` as a statement."""
    return _test(run, source, node) if source.written(node).startswith("((") else run.block(source, node)


# ---- choices


def _if(run: Evaluator, source: Source, node: Node) -> bool | None:
    return run.choose(source, _branches(run, source, node))


def _branches(run: Evaluator, source: Source, node: Node) -> Iterable[tuple[bool | None, list[Node], str]]:
    clauses = [child for child in node.named_children if child.type in ("elif_clause", "else_clause")]
    parts = [(node, [child for child in node.named_children if child not in clauses])]
    parts += [(clause, clause.named_children) for clause in clauses]
    for clause, children in parts:
        if clause.type == "else_clause":
            yield True, children, "else"
            continue
        then = next(child.start_byte for child in clause.children if child.type == "then")
        subjects = [child for child in children if child.start_byte < then and child.type != "comment"]
        status: bool | None = True
        for child in subjects:
            status = run.statement(source, child)
        run.where = source.where(clause)
        written = " ".join(source.written(child) for child in subjects)
        yield status, [child for child in children if child.start_byte > then], written


def _case(run: Evaluator, source: Source, node: Node) -> bool | None:
    value = node.child_by_field_name("value")
    subject = text_of(run, source.written(value), tested=True) if value is not None else ""
    written = source.written(value) if value is not None else ""

    def items() -> Iterable[tuple[bool | None, list[Node], str]]:
        for item in node.named_children:
            if item.type != "case_item":
                continue
            values = item.children_by_field_name("value")
            patterns = [text_of(run, source.written(value), as_pattern=True) for value in values]
            body = [child for child in item.named_children if child not in values]
            known = not is_open(subject) or patterns == ["*"]
            try:
                matches = any(compiled(pattern(text), subject).fullmatch(subject) for text in patterns)
            except ValueError:
                known = matches = False
            yield matches if known else None, body, f"case {written}"

    return run.choose(source, items())


# ---- loops


def _for(run: Evaluator, source: Source, node: Node) -> bool:
    body, name = node.child_by_field_name("body"), node.child_by_field_name("variable")
    values = [
        field
        for child in node.children_by_field_name("value")
        for field in Expander(run).expand(source.written(child))
    ]
    if not any(child.type == "in" for child in node.children):
        values = run.state.arguments
    if name is not None and body is not None:
        left = iter(list(values))

        def begin() -> bool:
            value = next(left, None)
            if value is not None:
                run.assign(source.written(name), value)
            return value is not None

        run.loop(begin, source, body)
    return True


def _while(run: Evaluator, source: Source, node: Node) -> bool:
    body = node.child_by_field_name("body")
    subjects = node.children_by_field_name("condition")
    until = any(child.type == "until" for child in node.children)

    def begin() -> bool | None:
        status = run.statement(source, next(child for child in subjects if child.is_named))
        return status if status is None or not until else not status

    if body is not None and subjects:
        run.loop(begin, source, body)
    return True


def _counted(run: Evaluator, source: Source, node: Node) -> bool:
    """`for ((i = 0; i < N; i++))`."""
    body = node.child_by_field_name("body")
    found = re.match(r"for\s*\(\((.*?);(.*?);(.*?)\)\)", source.written(node), re.S)
    if body is None or found is None:
        return True
    run.sum(text_of(run, found[1], tested=True))

    def begin() -> bool | None:
        value = run.sum(text_of(run, found[2], tested=True))
        return None if is_open(value) else value != "0"

    run.loop(begin, source, body, text_of(run, found[3], tested=True))
    return True


def _command(run: Evaluator, source: Source, node: Node) -> bool | None:
    own: dict[str, Value | None] = {}
    words: list[Word] = []
    for child in node.named_children:
        if child.type == "variable_assignment":
            name = source.written(child).partition("=")[0].rstrip("+")
            own[name] = run.state.variables.get(name)
            _assignment(run, source, child)
        elif child.type not in ("file_redirect", "herestring_redirect", "heredoc_redirect"):
            where = source.where(child)
            words += [Word(text, where) for text in Expander(run).expand(source.written(child))]
    status = run.run(words) if words else True
    if words:
        run.state.set_again(own)
    return status


# ---- redirections and pipes


def _redirected(run: Evaluator, source: Source, node: Node) -> bool | None:
    body = node.child_by_field_name("body")
    target, given = "", None
    for child in node.children_by_field_name("redirect"):
        if child.type == "heredoc_redirect":
            given = _here_document(run, source, child)
            inner = next((part for part in child.named_children if part.type == "file_redirect"), None)
            target = _target(run, source, inner) if inner is not None else target
        elif child.type == "file_redirect":
            target = _target(run, source, child) or target
    if body is None:
        return True
    if not target and given is None:
        return run.statement(source, body)
    printed = run.captured(source, [body], given)
    if target:
        more, path = target[:1] == "+", posixpath.normpath(target[1:])
        run.state.files[path] = (run.state.files.get(path, "") if more else "") + (printed or "")
    return True


def _target(run: Evaluator, source: Source, node: Node) -> str:
    """Return `+PATH` if a redirection appends, ` PATH` if it writes; "" for others."""
    sign = next((child.type for child in node.children if not child.is_named), "")
    destination = node.child_by_field_name("destination")
    if sign not in (">", ">>", "&>", ">|") or destination is None:
        return ""
    return ("+" if sign == ">>" else " ") + shown(text_of(run, source.written(destination)))


def _here_document(run: Evaluator, source: Source, node: Node) -> str:
    body = next((child for child in node.named_children if child.type == "heredoc_body"), None)
    begin = next((child for child in node.named_children if child.type == "heredoc_start"), None)
    end = next((child for child in node.named_children if child.type == "heredoc_end"), None)
    if body is None or begin is None:
        return ""
    # The grammar leaves out what stands before the first expansion.
    line_end = source.text.find(b"\n", begin.end_byte) + 1
    last = end.start_byte if end is not None else body.end_byte
    text = source.text[line_end:last].decode("utf-8", "replace").rstrip(" \t")
    return text if re.search(r"[\"'\\]", source.written(begin)) else quoted_text(run, text)


def _pipeline(run: Evaluator, source: Source, node: Node) -> bool | None:
    children = [child for child in node.named_children if child.type != "comment"]
    printed = run.captured(source, children, None)
    if run.printed is not None and printed is not None:
        run.printed.append(printed)
    last = source.written(children[-1]).split()[:1] if children else []
    return None if last and last[0] in QUESTIONS else True


def _subshell(run: Evaluator, source: Source, node: Node) -> bool | None:
    outer = run.state
    run.state = outer.copy()
    try:
        return run.block(source, node)
    except Stop as stop:
        return stop.status == 0
    finally:
        run.state = outer


def _tested(run: Evaluator, arguments: list[str]) -> bool | None:
    quoted = [word if re.fullmatch(r"[-=!<>a-z]+", word) else shlex.quote(word) for word in arguments]
    return holds(run, quoted, double=False)


STATEMENTS: dict[str, Statement] = {
    "variable_assignment": _assignment,
    "variable_assignments": Evaluator.block,
    "declaration_command": _declaration,
    "unset_command": lambda run, source, node: unset(run, source.written(node).split()[1:]),
    "function_definition": _function,
    "negated_command": _negation,
    "list": _list,
    "test_command": _test,
    "compound_statement": _compound,
    "if_statement": _if,
    "case_statement": _case,
    "for_statement": _for,
    "while_statement": _while,
    "c_style_for_statement": _counted,
    "command": _command,
    "redirected_statement": _redirected,
    "pipeline": _pipeline,
    "subshell": _subshell,
}
LANGUAGE = Language(
    STATEMENTS, {**BUILTINS, "test": _tested, "[": lambda run, words: _tested(run, words[:-1])}
)


def evaluate(text: str, name: str, path: Path | None = None, *, alone: bool = False) -> Script:
    """Return what a text of shell does; `path` is its file, if it has one. Raise InputFaults if it is none.

    With `alone` no other script is followed but recorded as a command, and a variable that the text does not set may
    have any value; else it counts as not set.
    """
    source = source_of(name, text)
    tree = parse(source)
    broken = list(errors(source, tree))
    if any(re.search(r"[\"'`]", words) for _, words in broken):
        faults = [
            Fault(place, f"cannot be read: {words}", "is a quote never closed?") for place, words in broken
        ]
        raise InputFaults(faults)
    run = Evaluator(LANGUAGE, Script(), State(), path, alone)
    for place, words in broken:
        run.note(place, f"cannot be read: {words}")
    try:
        run.block(source, tree)
    except Stop as stop:
        if stop.status:
            run.note(stop.where, f"the script ends here with status {stop.status}")
    except RecursionError:
        raise InputFaults([Fault(name, "is nested too deeply", "is this the right file?")]) from None
    run.script.content = run.content
    return run.script
