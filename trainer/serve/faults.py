"""Errors of a request in OpenAI's shape, and fields of JSON bodies, whose faults are reported together."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from trainer.errors import InputError
from trainer.generate.sampling import Sampling
from trainer.surrogates import half_in

T = TypeVar("T")
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}

_MOST_UNKNOWN = 10
"""The most unknown fields that an error lists."""
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


class ApiError(Exception):
    """An error that is sent to the client."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def as_json(self) -> dict[str, object]:
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refused(
    error: InputError, place: str | None = None, code: str | None = None, remedy: str | None = None
) -> ApiError:
    """Return the error for a request that the decoder refuses.

    `place` is the field, or one entry of a list: `prompt[3]`. `remedy` replaces a hint that is about a command line.
    """
    hint = error.hint if remedy is None else remedy
    message = f"{error.message}: {hint}" if hint else error.message
    message = message if place is None else f"{place}: {message}"
    return ApiError(400, message, None if place is None else place.partition("[")[0], code)


class Fields:
    """The fields of a JSON object; `done` raises one error for all faults and unknown fields."""

    def __init__(self, body: dict[str, object], ignored: Iterable[str] = ()) -> None:
        self._body, self._taken, self._faults = body, set(ignored), list[tuple[str, str]]()

    @classmethod
    def read(cls, text: bytes, ignored: Iterable[str] = ()) -> Fields:
        try:
            body = json.loads(text.decode())
        except UnicodeDecodeError as error:
            raise ApiError(400, f"the body is not UTF-8: byte {error.start}: {error.reason}") from None
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply") from None
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise ApiError(400, "the body is not a JSON object")
        # Only an escape can bring half of a surrogate pair into UTF-8.
        for name, value in body.items() if _ESCAPED_HALF.search(text) else ():
            if problem := half_in(name):
                raise ApiError(400, f"the name of a field has {problem}")
            if problem := half_in(value):
                raise ApiError(400, f"{name}: {problem}", name)
        return cls(body, ignored)

    def has(self, name: str) -> bool:
        return self._body.get(name) is not None

    def fault(self, name: str, problem: str) -> None:
        self._faults.append((name, problem))

    def raw(self, name: str) -> Any:
        self._taken.add(name)
        return self._body.get(name)

    def number(self, name: str, default: float) -> float:
        value = self._of((int, float), name, default, "a number")
        return float(max(-1e300, min(1e300, value)))

    def whole(self, name: str, default: int) -> int:
        return self._of(int, name, default, "a whole number")

    def flag(self, name: str, default: bool = False) -> bool:
        return self._of(bool, name, default, "true or false")

    def text(self, name: str, default: str = "") -> str:
        return self._of(str, name, default, "a text")

    def _of(self, kind: type[Any] | tuple[type[Any], ...], name: str, default: T, wanted: str) -> T:
        """Return a field; add a fault if it is not of a kind. Neither a bool nor NaN counts as a number."""
        value: Any = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or value != value:
            self.fault(name, f"{_shown(value)} is not {wanted}")
            return default
        found: T = value
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a field that is a text or a list of texts, as a tuple."""
        value = self.raw(name)
        found = [value] if isinstance(value, str) else value or []
        if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
            self.fault(name, f"{_shown(value)} is not a text or a list of texts")
            return ()
        return tuple(found)

    def refuse(self, name: str, allowed: tuple[Any, ...], reason: str) -> None:
        """Add a fault if a field is given with a value that is not in `allowed`."""
        value = self.raw(name)
        if value is not None and value not in allowed:
            self.fault(name, reason)

    def faults_of(self, sampling: Sampling, names: Mapping[str, str]) -> None:
        """Add the faults of sampling values; `names`: the API's names of values that are called differently."""
        known = {name for name, _ in self._faults}
        for name, problem in sampling.faults():
            if names.get(name, name) not in known:
                self.fault(names.get(name, name), problem)

    def done(self) -> None:
        unknown = [name for name in self._body if name not in self._taken]
        for name in unknown[:_MOST_UNKNOWN]:
            closest = difflib.get_close_matches(name[:40], self._taken, n=1)
            self.fault(name[:60], "unknown field" + (f"; did you mean {closest[0]}?" if closest else ""))
        if self._faults:
            message = "; ".join(f"{name}: {problem}" for name, problem in self._faults)
            if len(unknown) > _MOST_UNKNOWN:
                message += f"; and {len(unknown) - _MOST_UNKNOWN} more unknown fields"
            raise ApiError(400, message, self._faults[0][0])


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
