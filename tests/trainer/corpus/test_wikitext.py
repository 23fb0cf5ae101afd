"""What real articles are made of, and what a reader sees of it."""

from __future__ import annotations

import bz2
import time
from pathlib import Path

import pytest

from tests.support.building import built, small_tokenizer, texts_in
from trainer.corpus.wikitext import article, plain
from trainer.errors import DataError

SEEN = {
    "links": ("[[Germany|German]]-born [[theory|theor]]ist, [[Ulm]]s", "German-born theorist, Ulms"),
    "link with a section": ("see [[Physics#History|its history]]", "see its history"),
    "pipe trick": ("[[Boston (band)|]] and [[Ulm, Germany|]]", "Boston and Ulm"),
    "category and other languages": ("a [[Category:Physicists]][[fr:Albert]][[zh-yue:X]]b", "a b"),
    "category that is shown": ("see [[:Category:Physicists]]", "see Category:Physicists"),
    "file with links in its caption": (
        "before\n[[File:E.jpg|thumb|left|A [[link]] and {{convert|3|ft|m}} in [[Ulm|it]]]]\nafter",
        "before\n\nafter",
    ),
    "file in other languages": ("x [[Datei:E.jpg|mini|[[a]]]] y [[文件:E.jpg]]。", "x y。"),
    "external links": ("[http://a.b label here] and [https://c.d] and http://e.f/x", "label here and and http://e.f/x"),
    "bold and italics": ("'''Albert''' ''and'' '''''both''''' it's O''''Neil'''", "Albert and both it's O'Neil"),
    "note": ('Fact.<ref name="a">{{cite web|url=http://x|title=[[y]]}}</ref> Next.<ref name=b /> End',
             "Fact. Next. End"),
    "note never closed": ("a <ref>b c", "a b c"),
    "note with > in its name": ('a<ref name="x>y">gone</ref> b', "a b"),
    "comment": ("a<!-- [[gone]] {{too -->b<!-- never closed", "ab"),
    "nowiki": ("<nowiki>[[not]] ''a'' link</nowiki><nowiki/> x", "[[not]] ''a'' link x"),
    "formula": ("so <math display=\"inline\">E = \n mc^2</math> holds", "so $E = mc^2$ holds"),
    "tags": ("H<sub>2</sub>O, x<sup>2</sup>, <b>b</b><br />next <span style='a'>s</span>", "H2O, x2, b\nnext s"),
    "less than": ("if a < b and c > d", "if a < b and c > d"),
    "entities": ("5&nbsp;km &lt;b&gt; &amp;amp; &ndash; &#8364;", "5 km <b> &amp; – €"),
    "table": ("a\n{| class=\"wikitable\"\n|-\n! x !! y\n|-\n| 1 || {{foo|bar}}\n{|\n| inner\n|}\n|}\nb", "a\n\nb"),
    "table never closed": ("a\n{| class=x\n| 1\nb", "a"),
    "infobox": ("{{Infobox person\n| name = [[A|B]]\n| data = {{plainlist|\n* a\n* b}}\n}}\n'''B''' was", "B was"),
    "template in a template": ("{{a|{{b|{{c|[[d|e]]}}}}}}text", "text"),
    "template never closed": ("x {{unclosed|foo [[bar]] y", "x {{unclosed|foo bar y"),
    "closed twice": ("x}} y]] z", "x}} y]] z"),
    "hatnotes": ("{{About|the man|x}}{{Main article|Life of A}}\nHe lived.", "He lived."),
    "citation needed": ("He lived.{{citation needed|date=May 2020}} So.", "He lived. So."),
    "empty brackets": ("'''Ulm''' ({{IPA|ʊlm}}; {{lang|de|{{IPA|x}}}}) is, and ({{audio|x.ogg|listen}}) was",
                       "Ulm is, and was"),
    "brackets partly empty": ("'''A''' ({{IPA|a}}; born 1879; {{age|1879}}) x", "A (born 1879) x"),
    "quantities": (
        "{{convert|5|km|mi}}, {{convert|5|to|10|km|mi|abbr=on}}, {{cvt|5|ft|6|in|m}}, {{val|1.5|0.2|e=3|u=m/s}}",
        "5 km, 5 to 10 km, 5 ft 6 in, 1.5 ± 0.2×10^3 m/s",
    ),
    "times": ("{{circa|1900}}, {{as of|2010|3}}, {{as of|2011|lc=y}}, {{floruit|1800|1820}}, {{start date|1999|12|31}}",
              "c. 1900, As of March 2010, as of 2011, fl. 1800–1820, December 31, 1999"),
    "languages": ("{{lang|fr|mot}} {{lang-de|Wort}} {{transl|ja|go}} {{nihongo|Go|碁|igo}} {{langx|la|verbum}}",
                  "mot Wort go Go (碁, igo) verbum"),
    "small ones": ("1879{{snd}}1955, {{nowrap|a b}}, {{frac|1|2}} {{frac|3|1|4}}, a{{nbsp}}b, {{US$|5}}, "
                   "{{USS|Wasp|CV-7}}",
                   "1879 – 1955, a b, 1/2 3 1/4, a b, US$5, USS Wasp (CV-7)"),
    "numbers formatted": ("{{formatnum:12345}} {{#if:x|y}}z", "12345 z"),
    "argument by number": ("{{lang|1=fr|2=mot}} {{nowrap|1=x=1}}", "mot x=1"),
    "lists": ("* one\n** [[two]]\n# three\n: four\n; five\n*\n", "- one\n- two\n- three\nfour\nfive"),
    "headings": ("lead\n== A ==\n=== B ===\ntext\n== Empty ==\n\n== C ==\nx", "lead\n\nA\n\nB\n\ntext\n\nC\n\nx"),
    "sections without prose": (
        "a\n== See also ==\n* [[B]]\n=== Sub ===\n* c\n== Legacy ==\nb\n== References ==\n{{reflist}}\n",
        "a\n\nLegacy\n\nb",
    ),
    "chinese": ("'''中国'''（{{lang|en|China}}）位于-{zh-hans:东亚;zh-hant:東亞}-，"
                "[[文件:a.png|thumb|图]]面积。\n== 参考文献 ==\n* a",
                "中国（China）位于东亚，面积。"),
    "chinese without rules": ("-{不转换}-和-{zh|文}-", "不转换和文"),
    "magic words": ("__NOTOC__a__TOC__ [[b]] __init__", "a b __init__"),
    "gallery": ("a\n<gallery>\nFile:x.jpg|caption\n</gallery>\nb <references /> c", "a\n\nb c"),
    "parameter": ("{{{1|default}}} x {{{2}}}y", "default x y"),
    "rule": ("a\n----\nb", "a\n\nb"),
    "control characters": ("a\x01\x02b\x03\x00c", "abc"),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_a_reader_sees(name: str) -> None:
    wikitext, seen = SEEN[name]
    assert plain(wikitext) == seen


def page(text: str, title: str = "T", space: str = "0", more: str = "") -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    return (
        f"  <page>\n    <title>{title}</title>\n    <ns>{space}</ns>\n    <id>1</id>\n{more}"
        f"    <revision>\n      <model>wikitext</model>\n      <format>text/x-wiki</format>\n"
        f'      <text bytes="{len(text)}" xml:space="preserve">{escaped}</text>\n    </revision>\n  </page>\n'
    )


def test_only_articles_are_documents() -> None:
    assert article(page("'''A''' <b>x</b> & \"y\"").encode()) == 'A x & "y"'
    assert article(page("a", space="1").encode()) is None
    assert article(page("#REDIRECT [[B]]", more='    <redirect title="B" />\n').encode()) is None
    assert article(page("a").replace("wikitext", "javascript").encode()) is None
    assert article(page("{{Infobox}}").encode()) is None
    assert article(b"<page><title>T</title></page>") is None


def dump(pages: list[str]) -> bytes:
    head = '<mediawiki xml:lang="en">\n  <siteinfo>\n    <sitename>W</sitename>\n  </siteinfo>\n'
    return (head + "".join(pages) + "</mediawiki>\n").encode()


def test_a_dump_is_read_as_it_was_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.corpus.inputs.Reader.__init__.__defaults__", ("file", 2048, 1 << 20))
    words = small_tokenizer(tmp_path)
    pages = [page(f"Article [[number]] {n}. " + "More of it. " * (n % 30)) for n in range(60)]
    pages.insert(7, page("talk", space="1"))
    whole = dump(pages)
    half = len(whole) // 2
    # Several streams, as the multistream dumps.
    packed = bz2.compress(whole[:half]) + bz2.compress(whole[half:])
    (tmp_path / "enwiki-pages-articles.xml.bz2").write_bytes(packed)
    built(tmp_path / "out", words, tmp_path / "enwiki-pages-articles.xml.bz2", workers=2)
    texts = texts_in(tmp_path / "out", words)
    assert [text.split(".")[0] for text in texts] == [f"Article number {n}" for n in range(60)]
    (tmp_path / "cut.xml.bz2").write_bytes(packed[:-40])
    with pytest.raises(DataError, match="cannot be read to its end"):
        built(tmp_path / "cut", words, tmp_path / "cut.xml.bz2")


def test_a_page_that_is_cut_or_no_utf_8_is_a_bad_line(tmp_path: Path) -> None:
    words = small_tokenizer(tmp_path)
    whole = dump([page("first"), page("second")])
    (tmp_path / "cut.xml").write_bytes(whole[:-60])
    with pytest.raises(DataError, match=r"cut\.xml:15: <page> is not closed: the file was truncated"):
        built(tmp_path / "out", words, tmp_path / "cut.xml")
    (tmp_path / "odd.xml").write_bytes(whole.replace(b"second", b"sec\xffnd"))
    with pytest.raises(DataError, match=r"odd\.xml:15: not UTF-8"):
        built(tmp_path / "out", words, tmp_path / "odd.xml")
    (tmp_path / "wiki_00").write_text("<doc id=1>\na\n</doc>\n<doc id=2>\nb")
    with pytest.raises(DataError, match=r"wiki_00:4: <doc is not closed"):
        built(tmp_path / "out", words, tmp_path / "wiki_00")


@pytest.mark.parametrize(
    "hostile",
    ["{{" * 50_000, "[[" * 50_000, "{|\n" * 30_000, "<ref>" * 30_000, "{{a|" * 20_000 + "}}" * 20_000, "'" * 100_000,
     "\n|}" * 30_000, "[http://" * 20_000, "(" * 50_000, "<!--" * 30_000, "<math>" * 3_000, "-{" * 50_000,
     " " * 200_000, ", ;" * 60_000, "\n" * 100_000, "{{x}} " * 40_000,
     "{{{" * 30_000, "=" * 50_000, "<nowiki>" * 3_000, "[[File:" * 20_000 + "x" + "]]" * 20_000],
    ids=lambda text: text[:8].strip(),
)  # fmt: skip
def test_no_page_takes_longer_than_its_length_deserves(hostile: str) -> None:
    began = time.process_time()
    plain(hostile)
    # 0.1 s where it is linear, hours where it is not.
    assert time.process_time() - began < 5.0
