"""Read the objects of a rank table by the table of fields, and collect what is wrong with them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from clusterctl.ranktable.finding import Finding, Severity, invalid, kind, missing
from clusterctl.ranktable.rules.fields import BY_NAME, BY_SECTION, MAX_NUMBER, Field, Kind

IPV4 = re.compile(r"(?:(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])(?:\.(?!\Z)|\Z)){4}")
_EID = re.compile(r"[0-9a-fA-F]{32}")


class BadAddress(ValueError):
    """A text that is not an address."""


def read_address(text: str) -> str:
    """Return the normal spelling of an IP address, without its `%interface`; raise BadAddress otherwise."""
    # A table may hold 80,000 addresses, and the pattern is faster than the ipaddress module.
    if IPV4.fullmatch(text):
        return text
    address, percent, interface = text.partition("%")
    if percent and not interface:
        raise BadAddress(text)
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        raise BadAddress(text) from None


def is_address(text: str, kind: str) -> bool:
    """Return whether a text is an address of this kind (IPV4, IPV6 or EID), as version 2.0 writes it."""
    if kind == "EID":
        return bool(_EID.fullmatch(text))
    if kind == "IPV4":
        return bool(IPV4.fullmatch(text))
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    # HCCL's pattern lets "::" stand for two or more groups only; a dotted end counts as two groups.
    groups = sum(map(bool, text.split(":"))) + ("." in text)
    return "%" not in text and address.version == 6 and ("::" not in text or groups <= 6)


_PLAIN = re.compile(r"[0-9]{1,10}")
# What HCCL takes for a number: it stops at the first other character.
_READ_AS_NUMBER = re.compile(r"[ \t-\r]*(?:\+?([0-9]+)|-(0+)(?![0-9]))")
_EXPECTED = {
    Kind.DIGITS: "every value must be a string",
    Kind.NUMBER: "version 2.0 needs a number",
    Kind.TEXTS: "a list of strings is needed",
    Kind.BOOLEAN: "true or false is needed",
    Kind.OBJECT: "an object is needed",
}


def size(text: str) -> int:
    """Return the number of bytes of a text in UTF-8, which is what HCCL counts."""
    return len(text.encode("utf-8", "surrogatepass"))


@dataclass
class Values:
    """The readable values of one object, by field name; a value that cannot be read is left out."""

    texts: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Reader:
    """Reads one table and collects findings."""

    findings: list[Finding] = field(default_factory=list)
    numbers_as_text: bool = True
    """Versions 1.x write every value as a string; version 2.0 writes numbers as numbers."""

    def add(self, code: str, pointer: str, problem: str, remedy: str, hccl: str = "") -> None:
        """Record a finding that makes HCCL refuse the table."""
        self.findings.append(Finding(code, pointer, problem, remedy, hccl))

    def warn(self, code: str, pointer: str, problem: str, remedy: str) -> None:
        """Record a finding about a table that HCCL reads."""
        self.findings.append(Finding(code, pointer, problem, remedy, "", Severity.WRONG))

    def once(self, seen: dict[Hashable, str], key: Hashable, pointer: str, code: str, noun: str) -> None:
        """Remember the place of a key; a second place is a finding."""
        if key not in seen:
            seen[key] = pointer
            return
        value, name = key[-1] if isinstance(key, tuple) else key, NAMES[noun]
        problem = f"the {noun} {str(value)[:80]!r} is also at {seen[key]}"
        self.add(code, pointer, problem, "keep one of the two", invalid(value, name, f"a unique {name}"))

    def read(self, section: str, holder: Mapping[str, object], at: str) -> Values:
        """Read every scalar field of a section; return the values that can be read."""
        values = Values()
        for rule in BY_SECTION[section]:
            if rule.name not in holder:
                if rule.required and rule.kind is not Kind.OBJECTS:
                    self._missing(rule, at)
                continue
            reader = _READERS.get(rule.kind)
            if reader is None:
                continue
            before = len(self.findings)
            reader(self, rule, holder[rule.name], f"{at}/{rule.name}", values)
            if rule.read_with and rule.read_with not in holder:
                self.downgrade(before)
        return values

    def objects(
        self, section: str, name: str, holder: Mapping[str, object], at: str
    ) -> Iterator[tuple[str, Any]]:
        """Yield each object of a list with its pointer; record a list of the wrong type or length."""
        rule = BY_NAME[section, name]
        here = f"{at}/{name}"
        value = holder.get(name)
        if name not in holder:
            if rule.required:
                self.add("missing-key", at, f"{name!r} is missing", f'add "{name}": [...]')
        elif not isinstance(value, list):
            hccl = "" if self.numbers_as_text else invalid(kind(value), name, "an array")
            self.add("scalar-type", here, f"{name!r} is {kind(value)}, not a list", "[...]", hccl)
        elif len(value) < rule.least:
            self.add("empty-list", here, f"{name!r} is empty", "leave out the object that holds it")
        elif len(value) > rule.most:
            self.add("list-too-long", here, f"{name!r} has {len(value)} entries", f"at most {rule.most}")
        for index, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, dict):
                yield f"{here}/{index}", item
            else:
                problem = f"{kind(item)} where an object belongs"
                self.add("scalar-type", f"{here}/{index}", problem, "{...}")

    # -- one value

    def _missing(self, rule: Field, at: str) -> None:
        message = {"EI0017": missing(rule.name), "EI0014": invalid("", rule.name, "a valid value")}
        remedy = f'add "{rule.name}"' + (f": {rule.remedy}" if rule.remedy else "")
        self.add("missing-key", at, f"{rule.name!r} is missing", remedy, message.get(rule.hccl_missing, ""))

    def _wrong_type(self, rule: Field, value: object, at: str) -> None:
        problem = f"{rule.name!r} is {kind(value)}; {_EXPECTED.get(rule.kind, 'a string is needed')}"
        if self.numbers_as_text:
            shown = str(value) if type(value) in (int, float) else "..."
            problem = f"{rule.name!r} is {kind(value)}; every value must be a string"
            self.add("scalar-type", at, problem, f'write "{rule.name}": "{shown}"', missing(rule.name))
        else:
            remedy = (
                f'write "{rule.name}": 0' if rule.kind is Kind.NUMBER else _EXAMPLE.get(rule.kind, '"..."')
            )
            self.add("scalar-type", at, problem, remedy)

    def _out_of_range(self, rule: Field, at: str, problem: str, value: object, unit: str = "") -> None:
        allowed = f"{rule.least} to {rule.most}{unit}"
        hccl = invalid(value, rule.name, allowed) if rule.hccl else ""
        self.add(rule.code, at, problem, rule.remedy or allowed, hccl)

    def downgrade(self, start: int, only: str = "", code: str = "") -> None:
        """Mark findings from `start` on as not refused by HCCL, which does not read these values."""
        for index in range(start, len(self.findings)):
            finding = self.findings[index]
            if finding.pointer.startswith(only) and code in ("", finding.code):
                wrong = replace(finding, hccl_message="", severity=Severity.WRONG)
                self.findings[index] = wrong

    def _text(self, rule: Field, value: object, at: str, values: Values) -> None:
        if not isinstance(value, str):
            self._wrong_type(rule, value, at)
        elif not rule.least <= size(value) <= rule.most:
            self._out_of_range(rule, at, f"{rule.name!r} has {size(value)} bytes", value, " bytes")
        else:
            values.texts[rule.name] = value

    def _digits(self, rule: Field, value: object, at: str, values: Values) -> None:
        if not isinstance(value, str):
            self._wrong_type(rule, value, at)
            return
        match = _READ_AS_NUMBER.match(value)
        number = int("0" + (match[1] or match[2]).lstrip("0")[:30]) if match else -1
        if not 0 <= number <= MAX_NUMBER:
            problem = f"{rule.name!r} is {value[:80]!r}, not a decimal number"
            hccl = invalid(value, rule.name, "a decimal number") if rule.hccl else ""
            self.add("not-a-number", at, problem, 'digits only, as in "0"', hccl)
            return
        if not _PLAIN.fullmatch(value):
            problem = f"{rule.name!r} is {value[:80]!r}; HCCL reads it as {number}"
            self.warn("not-a-number", at, problem, f'write "{number}"')
        self._number_in_range(rule, number, at, values)

    def _number(self, rule: Field, value: object, at: str, values: Values) -> None:
        if (isinstance(value, float) and -1 < value <= MAX_NUMBER) or (
            isinstance(value, bool) and not rule.required
        ):
            problem = f"{rule.name!r} is {value}; HCCL reads it as {int(value)}"
            self.warn("not-a-number", at, problem, f"write {int(value)}")
            self._number_in_range(rule, int(value), at, values)
        elif type(value) not in (int, float):
            self._wrong_type(rule, value, at)
        elif isinstance(value, int) and 0 <= value <= MAX_NUMBER:
            self._number_in_range(rule, value, at, values)
        else:
            problem = f"{rule.name!r} is {str(value)[:40]}, not a whole number from 0"
            hccl = invalid(value, rule.name, "0 ~ UINT32_MAX") if rule.required else ""
            self.add("not-a-number", at, problem, f'write "{rule.name}": 0', hccl)

    def _number_in_range(self, rule: Field, number: int, at: str, values: Values) -> None:
        if rule.least <= number <= rule.most:
            values.numbers[rule.name] = number
        else:
            self._out_of_range(rule, at, f"{rule.name!r} is {number}", number)

    def _address(self, rule: Field, value: object, at: str, values: Values) -> None:
        if not isinstance(value, str):
            self._wrong_type(rule, value, at)
            return
        try:
            values.texts[rule.name] = read_address(value)
        except BadAddress:
            problem = f"{rule.name!r} is {value!r:.80}, not an address"
            self.add(
                rule.code, at, problem, "as in 10.0.0.1", invalid(value, rule.name, "a valid IP address")
            )

    def _choice(self, rule: Field, value: object, at: str, values: Values) -> None:
        if not isinstance(value, str):
            self._wrong_type(rule, value, at)
        elif value not in rule.choices:
            known = ", ".join(repr(choice) for choice in rule.choices if choice)
            self.add(rule.code, at, f"{rule.name!r} is {value[:80]!r}", f"one of {known}")
        else:
            values.texts[rule.name] = value

    def _texts(self, rule: Field, value: object, at: str, values: Values) -> None:
        if not isinstance(value, list):
            self._wrong_type(rule, value, at)
            return
        texts = []
        for index, item in enumerate(value):
            if isinstance(item, str):
                texts.append(item)
                self._text(BY_NAME[f"{rule.name} item", rule.name], item, f"{at}/{index}", Values())
            else:
                problem = f"{kind(item)} where a string belongs"
                self.add("scalar-type", f"{at}/{index}", problem, '"..."')
        # HCCL counts equal port names once.
        count = len(set(texts)) if rule.name == "ports" else len(value)
        if not rule.least <= count <= rule.most and len(texts) == len(value):
            self._out_of_range(rule, at, f"{rule.name!r} has {count} entries", count, " entries")
        values.lists[rule.name] = texts

    def control_plane(self, rank: Mapping[str, object], at: str) -> dict[str, object] | None:
        """Return the object in this field of a rank, or None; record a value of another type."""
        value = rank.get("control_plane")
        if isinstance(value, dict):
            return value
        if "control_plane" in rank:
            self._wrong_type(BY_NAME["rank", "control_plane"], value, f"{at}/control_plane")
        return None

    def _boolean(self, rule: Field, value: object, at: str, values: Values) -> None:
        if not isinstance(value, bool):
            self._wrong_type(rule, value, at)


_READERS: dict[Kind, Callable[[Reader, Field, object, str, Values], None]] = {
    Kind.TEXT: Reader._text,
    Kind.DIGITS: Reader._digits,
    Kind.ADDRESS: Reader._address,
    Kind.NUMBER: Reader._number,
    Kind.CHOICE: Reader._choice,
    Kind.TEXTS: Reader._texts,
    Kind.BOOLEAN: Reader._boolean,
}
_EXAMPLE = {Kind.TEXTS: '["..."]', Kind.BOOLEAN: "true", Kind.OBJECT: "{...}"}
NAMES = {
    "server": "server_id",
    "device": "device_id",
    "rank": "rank_id",
    "address": "device_ip",
    "backup address": "backup_device_ip",
    "super pod": "super_pod_id",
    "super-device id": "super_device_id",
    "group": "group_name",
    "pod": "pod_name",
}
