"""Convert wikitext to plain text: what a reader of the article sees, without tables, notes, boxes and link
targets.

The brackets are replaced in one pass with a stack: the time grows linearly with the length, also with deep
nesting and unclosed brackets.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from trainer.corpus.wikitext_templates import GONE, render_template

FIELDS = {
    name: re.compile(rf"<{name}(?:\s[^<>]*)?>([^<]*)</{name}>".encode()) for name in ("ns", "model", "text")
}
REDIRECT = re.compile(rb"<redirect\b")
# Control characters that mark places internally; they are removed from the input first.
OURS = re.compile("[\x00\x02\x03]+")
COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
DROPPED = (
    "ref|references|gallery|timeline|score|imagemap|templatestyles|graph|mapframe|maplink|indicator|hiero|"
    "inputbox|categorytree|section|table|style|noinclude|includeonly|chem|ce"
)
ELEMENT = re.compile(rf"<(/?)({DROPPED})\b((?:\"[^\"]*\"|[^<>\"])*?)(/?)>", re.IGNORECASE)
MATH = re.compile(r"<math\b[^<>]*>(.*?)</math\s*>", re.IGNORECASE | re.DOTALL)
NOWIKI = re.compile(r"<nowiki\s*>(.*?)</nowiki\s*>|<nowiki\s*/>", re.IGNORECASE | re.DOTALL)
BREAK = re.compile(r"<br\b[^<>]*>", re.IGNORECASE)
TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
BRACKETS = re.compile(
    r"(?P<table>(?:\A|(?<=\n))[:*# \t]*\{\|)|(?P<table_end>(?:\A|(?<=\n))[ \t]*\|\}(?!\}))"
    r"|(?P<param>\{\{\{(?!\{))|(?P<param_end>\}\}\})|(?P<template>\{\{)|(?P<template_end>\}\})"
    r"|(?P<link>\[\[)|(?P<link_end>\]\])|(?P<bar>\|)"
)
EXTERNAL = re.compile(r"\[(?:https?:|ftp:)?//[^\s\[\]]+(?:[ \t]+([^\[\]\n]*))?\]", re.IGNORECASE)
VARIANT = re.compile(r"-\{([^{}]*)\}-")
PREFERRED_VARIANTS = ("zh-hans", "zh-cn", "zh", "zh-hant", "zh-tw")
BEHAVIOUR = re.compile(r"__[A-Z]{3,}__")
QUOTES = re.compile(r"'{2,5}")
HEADING = re.compile(r"^(={1,6})[ \t]*(.*?)[ \t]*\1[ \t]*$")
# A closing bracket is matched with one of this many innermost open brackets.
DEEPEST = 12
LISTED = re.compile(r"^[*#:;]+[ \t]*")
RULE = re.compile(r"^-{4,}")
LANGUAGE = re.compile(r"^[a-z]{2,3}(?:-[a-z]+)*$|^simple$")
FILES = {
    "file", "image", "media", "fichier", "datei", "bild", "archivo", "imagen", "ficheiro", "imagem",
    "immagine", "bestand", "afbeelding", "plik", "файл", "изображение", "文件", "檔案", "档案", "图像", "圖像",
    "ファイル", "画像", "파일", "그림", "پرونده", "ملف", "תמונה", "קובץ", "tập tin", "berkas", "dosya", "fil",
}  # fmt: skip
CATEGORIES = {
    "category", "catégorie", "kategorie", "categoría", "categoria", "categorie", "kategoria", "категория",
    "分类", "分類", "カテゴリ", "분류", "رده", "تصنيف", "קטגוריה", "thể loại", "kategori",
}  # fmt: skip
NO_PROSE = {
    "see also", "references", "external links", "further reading", "notes", "notes and references",
    "footnotes", "citations", "sources", "bibliography", "works cited", "gallery",
    "参见", "參見", "参考文献", "參考文獻", "参考资料", "參考資料", "外部链接", "外部連結", "扩展阅读",
    "注释", "註釋", "脚注",
    "voir aussi", "références", "liens externes", "notes et références", "siehe auch", "weblinks",
    "einzelnachweise", "literatur", "véase también", "referencias", "enlaces externos", "bibliografía",
}  # fmt: skip


def article(page: bytes) -> str | None:
    """Return the plain text of a dump's `<page>`; None if it is empty or not an article (redirect, talk,
    template).

    Raises UnicodeDecodeError if its text is not UTF-8.
    """
    found = {name: pattern.search(page) for name, pattern in FIELDS.items()}
    space, model, text = found["ns"], found["model"], found["text"]
    if text is None or REDIRECT.search(page) or (space is not None and space[1] != b"0"):
        return None
    if model is not None and model[1] != b"wikitext":
        return None
    return plain(_unescaped(text[1].decode("utf-8"))) or None


def _unescaped(text: str) -> str:
    """Replace the four entities of the dump's XML; `plain` replaces those of the wikitext."""
    for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        text = text.replace(entity, character)
    return text


def plain(wikitext: str) -> str:
    """Return wikitext as a reader sees it."""
    parts: list[str] = []

    def keep(text: str) -> str:
        parts.append(text)
        return f"\x02{len(parts) - 1}\x03"

    text = OURS.sub("", wikitext)
    text = _closed(NOWIKI, "</nowiki", lambda found: keep(found[1] or ""), text)
    text = COMMENT.sub("", text)
    text = _closed(MATH, "</math", lambda found: keep(f"${' '.join(found[1].split())}$"), text)
    text = _without_elements(text)
    text = VARIANT.sub(_variant, text)
    text = _without_brackets(BREAK.sub("\n", text))
    text = EXTERNAL.sub(lambda found: found[1] or GONE, text)
    text = QUOTES.sub(_unquoted, BEHAVIOUR.sub("", TAG.sub("", text)))
    text = html.unescape(text).replace("\xa0", " ")
    text = _tidy(_sections(_close_gaps(text)))
    return re.sub(r"\x02(\d+)\x03", lambda found: parts[int(found[1])], text)


def _closed(pattern: re.Pattern[str], end: str, seen: Callable[[re.Match[str]], str], text: str) -> str:
    """Replace elements with `seen`; search only up to the last end tag, because each later search would fail
    after reading the whole rest."""
    last = text.lower().rfind(end)
    cut = text.find(">", last) + 1 if last >= 0 else 0
    return pattern.sub(seen, text[:cut]) + text[cut:]


def _unquoted(found: re.Match[str]) -> str:
    """Return the text for a run of quotes: "" for italics and bold (2, 3, 5); an apostrophe remains of 4."""
    return "'" if len(found[0]) == 4 else ""


def _variant(found: re.Match[str]) -> str:
    """Return the preferred variant of Chinese text written as `-{zh-hans:...; zh-hant:...}-`."""
    inner = found[1].partition("|")[2] or found[1]
    named = {
        name.strip().lower(): text
        for name, colon, text in (choice.partition(":") for choice in inner.split(";"))
        if colon and name.strip().lower().startswith("zh")
    }
    return next((named[name] for name in PREFERRED_VARIANTS if name in named), "" if named else inner)


def _without_elements(text: str) -> str:
    """Drop `<ref>` and similar elements with their content; of an element that is not closed, drop only the
    tag."""
    parts, at, inside, hopeless = [], 0, "", set[str]()
    begin = resume = 0
    while True:
        found = ELEMENT.search(text, resume)
        if found is None:
            if not inside:
                break
            hopeless.add(inside)
            parts.append("")
            at, resume, inside = begin, begin, ""
            continue
        closes, name, self_closed = bool(found[1]), found[2].lower(), bool(found[4])
        resume = found.end()
        if inside:
            if closes and name == inside:
                at, inside = found.end(), ""
                parts.append(GONE)
            continue
        parts.append(text[at : found.start()])
        at = found.end()
        if closes or name in hopeless:
            continue
        if self_closed:
            parts.append(GONE)
        else:
            inside, begin = name, found.end()
    return "".join(parts) + text[at:]


@dataclass
class _Open:
    """An open bracket: its content so far, divided by bars."""

    kind: str
    opening: str
    parts: list[list[str]] = field(default_factory=lambda: [[]])

    def texts(self) -> list[str]:
        return ["".join(part) for part in self.parts]


def _without_brackets(text: str) -> str:
    """Replace templates, tables and links by their visible text, the inner ones first."""
    stack = [_Open("", "")]
    at = 0
    while found := BRACKETS.search(text, at):
        stack[-1].parts[-1].append(text[at : found.start()])
        at = found.end()
        kind = str(found.lastgroup)
        if kind == "param_end" and all(bracket.kind != "param" for bracket in stack[-2:]):
            # The first two of }}} end a template; the third belongs to what follows.
            kind, at = (
                "template_end",
                at - 1,
            )
        if kind == "bar":
            if stack[-1].kind in ("template", "link", "param"):
                stack[-1].parts.append([])
            else:
                stack[-1].parts[-1].append("|")
        elif not kind.endswith("_end"):
            stack.append(_Open(kind, found[0]))
        else:
            _end(stack, kind.removesuffix("_end"), text[found.start() : at])
    stack[-1].parts[-1].append(text[at:])
    while len(stack) > 1:
        _give_up(stack)
    return "".join(stack[0].texts())


def _end(stack: list[_Open], kind: str, closing: str) -> None:
    """Close the innermost bracket of a kind; unclosed brackets inside it become text, unclosed tables are
    dropped."""
    if all(bracket.kind != kind for bracket in stack[-DEEPEST:]):
        if kind != "table":
            stack[-1].parts[-1].append(closing)
        return
    while stack[-1].kind != kind:
        _give_up(stack)
    done = stack.pop()
    stack[-1].parts[-1].append(SEEN[kind](done.texts()))


def _give_up(stack: list[_Open]) -> None:
    done = stack.pop()
    inner = "|".join(done.texts())
    stack[-1].parts[-1].append(GONE if done.kind == "table" else done.opening + inner)


def _link(parts: list[str]) -> str:
    """Return the visible part of `[[target|text]]`; GONE for a file, a category or an article in another
    language."""
    target = parts[0].strip()
    shown = target.removeprefix(":")
    space, colon, rest = target.partition(":")
    name = space.strip().lower()
    if colon and name and (name in FILES or name in CATEGORIES):
        return GONE
    if colon and len(parts) == 1 and LANGUAGE.match(space) and rest and not rest.startswith(" "):
        return GONE
    if len(parts) == 1:
        return shown
    if parts[-1].strip():
        return parts[-1]
    # The pipe trick: [[Boston (band)|]].
    return re.sub(r"\s*\([^()]*\)$|,.*$", "", shown.rpartition(":")[2])


def _default(parts: list[str]) -> str:
    return parts[1] if len(parts) > 1 else ""


SEEN: dict[str, Callable[[list[str]], str]] = {
    "template": render_template,
    "link": _link,
    "param": _default,
    "table": lambda parts: GONE,
}


def _close_gaps(text: str) -> str:
    """Remove the marks of dropped parts, with the spaces and empty brackets around them."""
    text = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]{2,}", " ", text))
    text = re.sub(rf"{GONE}(?:[ \t]*{GONE})+", GONE, text)
    text = re.sub(rf"[(（](?:[\s,;:，；、]|{GONE})*[)）]", GONE, text)
    text = re.sub(rf"([(（])[\s,;:，；、]{{0,8}}{GONE}[\s,;:，；、]*", r"\1", text)
    text = re.sub(rf"[\s,;:，；、]{{0,8}}{GONE}(?=[ \t]?[)）])", "", text)
    text = re.sub(rf"[ \t]?{GONE}[ \t]?(?=[,.;:!?)，。；：！？、）])", "", text)
    text = re.sub(rf"(?m)^{GONE}[ \t]?", "", text)
    return re.sub(rf"[ \t]?{GONE}(?:[ \t]?{GONE})*([ \t]?)", _one_space, text)


def _one_space(found: re.Match[str]) -> str:
    return " " if found[0][0] in " \t" or found[1] else ""


def _sections(text: str) -> str:
    """Put headings on lines of their own; drop empty sections and the lists of links and notes."""
    lines: list[str] = []
    headings: list[tuple[int, str]] = []
    dropped = 0
    for line in text.split("\n"):
        found = HEADING.match(line)
        if found:
            level = len(found[1])
            if dropped and level > dropped:
                continue
            dropped = level if found[2].strip().lower() in NO_PROSE else 0
            headings = [heading for heading in headings if heading[0] < level]
            if not dropped:
                headings.append((level, found[2]))
            continue
        line = RULE.sub("", line)
        if dropped:
            continue
        marked = LISTED.match(line)
        if marked:
            rest = line[marked.end() :]
            line = ("- " if marked[0][0] in "*#" else "") + rest if rest.strip() else ""
        if line.strip() and headings:
            lines += [part for _, title in headings for part in ("", title, "")]
            headings = []
        lines.append(line.rstrip())
    return "\n".join(lines)


def _tidy(text: str) -> str:
    text = re.sub(r"[ \t]{2,}", " ", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()
