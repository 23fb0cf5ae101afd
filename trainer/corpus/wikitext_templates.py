"""Return the visible text of the templates that occur in running text; drop all other templates."""

from __future__ import annotations

import re
from collections.abc import Callable

# Marks the place of a dropped part, until `_close_gaps` removes it.
GONE = "\x01"
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip
NAMED = re.compile(r"^\s*([A-Za-z][\w -]*?|\d+)\s*=(.*)$", re.DOTALL)
BETWEEN = {
    "to": " to ", "and": " and ", "or": " or ", "by": " by ", "x": " × ", "-": "–", "–": "–", "+/-": " ± ", "±": " ± ",
}  # fmt: skip
FIRST = (
    "nowrap", "nobr", "small", "big", "smaller", "larger", "midsize", "resize", "em", "strong", "abbr",
    "sc", "smallcaps", "nobold", "noitalic", "kbd", "key", "keypress", "code", "samp", "var", "mvar",
    "math", "tooltip", "sic", "notatypo", "mono", "underline", "strike", "ill", "vanchor",
    "visible_anchor", "linktext", "not_a_typo", "bracket", "quote", "blockquote", "cquote", "quotation",
    "bquote", "block_quote", "poem", "poemquote", "lj", "center", "longitem", "nobreak", "lang-en-gb",
    "u", "s", "sup", "sub", "su", "formatprice", "italic_correction", "italics_correction", "bigger",
    "interlanguage_link", "interlanguage_link_multi", "no_italic", "no_bold", "normal", "nwr", "j",
    "wikt-lang", "keyboard", "bold_dark_red", "pre2", "tq", "xt", "bdo", "hover_title",
)  # fmt: skip
LAST = (
    "transl", "transliteration", "color", "font_color", "colored_link", "script", "rtl-lang", "bdi",
    "lang2",
)  # fmt: skip
CONSTANT = {
    "nbsp": " ", "spaces": " ", "space": " ", "thinsp": " ", "thin_space": " ", "snd": " – ", "spnd": " – ",
    "spaced_ndash": " – ", "spaced_en_dash": " – ", "ndash": "–", "en_dash": "–", "mdash": "—", "em_dash": "—",
    "spaced_mdash": " — ", "!": "|", "=": "=", "'": "'", "' \"": "'\"", "\" '": "\"'", "'s": "'s", "\"": '"',
    "·": " · ", "•": " • ", "dot": " · ", "middot": " · ", "bullet": " • ", "bold_middot": " · ",
    "ellipsis": "...", "...": "...", "shy": "", "wbr": "", "zwsp": "", "zwj": "", "-": "\n", "clear": "\n",
    "!((": "[[", "))!": "]]", "(": "{", ")": "}", "(!": "{|", "!)": "|}", "degree": "°", "°": "°",
    "minus": "−", "times": "×", "frac12": "1/2", "sqrt": "√", "pi": "π", "plusminus": "±",
}  # fmt: skip
MONEY = {
    "us$": "US$", "gbp": "£", "£": "£", "euro": "€", "eur": "€", "€": "€", "usd": "$", "$": "$", "inr": "₹",
    "₹": "₹", "indian_rupee": "₹", "jpy": "¥", "cny": "¥", "¥": "¥", "au$": "A$", "a$": "A$", "cad": "C$",
}  # fmt: skip
SHIPS = (
    "uss", "hms", "ss", "rms", "hmcs", "hmas", "usns", "ms", "mv", "smu", "sms", "ins", "ijn",
)  # fmt: skip


def render_template(parts: list[str]) -> str:
    """Return the text of a template given as (name, arguments...); templates inside it are already
    replaced."""
    name = " ".join(parts[0].replace("_", " ").split()).lower().replace(" ", "_")
    function, colon, _ = name.partition(":")
    if colon and function in ("formatnum", "lc", "uc", "lcfirst", "ucfirst"):
        return parts[0].partition(":")[2].strip()
    if name in CONSTANT:
        return CONSTANT[name]
    made = RENDERED.get(name)
    if made is None:
        made = _last if name.startswith("lang-") else None
    if made is None:
        return GONE
    places, named = _arguments(parts[1:])
    return made(name, places, named) or GONE


def _arguments(parts: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the positional arguments in order, and the named ones."""
    places: list[str] = []
    named: dict[str, str] = {}
    for part in parts:
        found = NAMED.match(part)
        if found is None:
            places.append(part.strip())
        elif found[1].isdigit() and int(found[1]) == len(places) + 1:
            places.append(found[2].strip())
        else:
            named[found[1].lower()] = found[2].strip()
    return places, named


Template = Callable[[str, list[str], dict[str, str]], str]


def _first(name: str, places: list[str], named: dict[str, str]) -> str:
    return places[0] if places else named.get("text") or named.get("quote") or ""


def _last(name: str, places: list[str], named: dict[str, str]) -> str:
    return next((argument for argument in reversed(places) if argument), named.get("text", ""))


def _lang(name: str, places: list[str], named: dict[str, str]) -> str:
    """{{lang|fr|texte}}: the second argument; in similar templates, later ones are transliterations."""
    return places[1] if len(places) > 1 else named.get("text", "")


def _convert(name: str, places: list[str], named: dict[str, str]) -> str:
    """{{convert|5|km|mi}}, {{convert|5|to|10|km}}, {{convert|5|ft|6|in|m}}: the quantity as given."""
    if len(places) < 2:
        return "".join(places)
    if places[1].lower() in BETWEEN and len(places) > 3:
        return f"{places[0]}{BETWEEN[places[1].lower()]}{places[2]} {places[3]}"
    text = f"{places[0]} {places[1]}"
    if len(places) > 3 and re.fullmatch(r"[\d.,]+", places[2]):
        text += f" {places[2]} {places[3]}"
    return text


def _circa(name: str, places: list[str], named: dict[str, str]) -> str:
    word = {"fl.": "fl.", "floruit": "fl.", "reign": "r.", "r.": "r."}.get(name, "c.")
    return f"{word} {'–'.join(argument for argument in places if argument)}" if places else word


def _as_of(name: str, places: list[str], named: dict[str, str]) -> str:
    month = places[1] if len(places) > 1 else ""
    if month.isdigit() and 1 <= int(month) <= 12:
        month = MONTHS[int(month) - 1]
    when = " ".join(
        argument for argument in (places[2] if len(places) > 2 else "", month, *places[:1]) if argument
    )
    word = "Since" if named.get("since") else "As of"
    return f"{word.lower() if named.get('lc') else word} {when}" if places else ""


def _fraction(name: str, places: list[str], named: dict[str, str]) -> str:
    if len(places) == 3:
        return f"{places[0]} {places[1]}/{places[2]}"
    return "/".join(places[:2]) if len(places) == 2 else f"1/{places[0]}" if places else ""


def _value(name: str, places: list[str], named: dict[str, str]) -> str:
    """{{val|1.5|0.2|e=3|u=m/s}}"""
    if not places:
        return ""
    text = places[0] + (f" ± {places[1]}" if len(places) > 1 and places[1] else "")
    text += f"×10^{named['e']}" if named.get("e") else ""
    unit = named.get("u") or named.get("ul") or ""
    return f"{text} {unit}" if unit else text


def _nihongo(name: str, places: list[str], named: dict[str, str]) -> str:
    """{{nihongo|English|漢字|romaji}}"""
    inner = ", ".join(argument for argument in places[1:3] if argument)
    first = places[0] if places else ""
    return f"{first} ({inner})" if first and inner else first or inner


def _money(name: str, places: list[str], named: dict[str, str]) -> str:
    return MONEY[name] + (places[0] if places else "")


def _ship(name: str, places: list[str], named: dict[str, str]) -> str:
    if not places:
        return ""
    number = f" ({places[1]})" if len(places) > 1 and places[1] and not named.get("2") else ""
    return f"{name.upper()} {places[0]}{number}"


def _joined(name: str, places: list[str], named: dict[str, str]) -> str:
    return ", ".join(argument for argument in places if argument)


def _date(name: str, places: list[str], named: dict[str, str]) -> str:
    """{{start date|1999|12|31}} and similar templates, day first if `df` asks for it."""
    numbers = [int(part) for part in places[:3] if part.isdigit()]
    if len(numbers) > 1 and not 1 <= numbers[1] <= 12:
        return ""
    month = MONTHS[numbers[1] - 1] if len(numbers) > 1 else ""
    if len(numbers) == 3:
        first = f"{numbers[2]} {month}" if named.get("df") else f"{month} {numbers[2]},"
        return f"{first} {numbers[0]}"
    return " ".join(str(part) for part in (month, *numbers[:1]) if part)


RENDERED: dict[str, Template] = {
    **dict.fromkeys(FIRST, _first),
    **dict.fromkeys(LAST, _last),
    "lang": _lang,
    "langx": _lang,
    "convert": _convert,
    "cvt": _convert,
    **dict.fromkeys(("circa", "c.", "ca.", "fl.", "floruit", "reign", "r."), _circa),
    "as_of": _as_of,
    **dict.fromkeys(("frac", "fraction", "sfrac"), _fraction),
    **dict.fromkeys(("val", "gaps", "num"), _value),
    **dict.fromkeys(("nihongo", "nihongo2", "nihongo3", "korean", "japanese"), _nihongo),
    **dict.fromkeys(MONEY, _money),
    **dict.fromkeys(SHIPS, _ship),
    **dict.fromkeys(("hlist", "ubl", "unbulleted_list", "comma_separated_entries"), _joined),
    **dict.fromkeys(("start_date", "end_date", "dts", "date", "birth_date", "death_date"), _date),
}
