"""List the backends of each op, find those that can run here, and choose one for each op.

A backend of an op is a module with a function of the op's name and two more functions: `why_not()` returns why it
cannot run on this node, or an empty string; `describe()` returns what it does, in one line.
No fallback is silent: `auto` reports why it skipped a backend, and a backend that is requested by name and cannot run
is an error.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from native.update import AdamWStep

AUTO = "auto"
REFERENCE = "reference"
OPS = (
    "layer_norm",
    "rms_norm",
    "gelu",
    "swiglu",
    "cross_entropy",
    "linear_cross_entropy",
    "attention",
    "adamw",
    "square_sum",
)


@dataclass(frozen=True)
class Backend:
    """A family of kernels: the device type it serves (None: any) and the module of each op that it has."""

    name: str
    device_type: str | None
    modules: Mapping[str, str]


# In the order in which `auto` tries them; the reference is last and serves every device that torch does.
BACKENDS = (
    Backend("cpu", "cpu", {op: f"native.cpu.{op}" for op in OPS}),
    Backend("cuda", "cuda", {"attention": "native.cuda.attention"}),
    Backend("npu", "npu", {"attention": "native.npu.attention", "adamw": "native.npu.adamw"}),
    Backend(REFERENCE, None, dict.fromkeys(OPS, "native.reference")),
)


class NativeError(Exception):
    """A choice of backends that is not possible; the message gives the op and the remedy."""


class BadRequest(NativeError):
    """A request that names ops or backends that do not exist; the message lists all of them."""


class BackendUnavailable(NativeError):
    """Raised if a backend that was requested by name cannot run this op here."""

    def __init__(self, op: str, backend: str, reason: str) -> None:
        super().__init__(f"{op}: backend {backend!r} is not available: {reason}")
        self.op = op
        self.backend = backend
        self.reason = reason


@dataclass(frozen=True)
class Status:
    """One backend of one op on one device type; `reason` says why it cannot run, or what it does."""

    op: str
    backend: str
    available: bool
    reason: str


@dataclass(frozen=True)
class Chosen:
    """The backend that runs an op, and the reason for this choice."""

    op: str
    backend: str
    reason: str


class Choice:
    """The ops, each bound to the backend chosen for it."""

    def __init__(self, chosen: Sequence[Chosen], functions: Mapping[str, Callable[..., Any]]) -> None:
        self._chosen = tuple(chosen)
        self._layer_norm = functions["layer_norm"]
        self._rms_norm = functions["rms_norm"]
        self._gelu = functions["gelu"]
        self._swiglu = functions["swiglu"]
        self._cross_entropy = functions["cross_entropy"]
        self._linear_cross_entropy = functions["linear_cross_entropy"]
        self._attention = functions["attention"]
        self._adamw = functions["adamw"]
        self._square_sum = functions["square_sum"]

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
        """Return `x` normalised over the last dimension; computed in fp32, returned in the type of `x`."""
        normal: Tensor = self._layer_norm(x, weight, bias, eps)
        return normal

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
        """Return `x` over the root of its mean square, times `weight`; computed in fp32, in the type of `x`."""
        normal: Tensor = self._rms_norm(x, weight, eps)
        return normal

    def gelu(self, x: Tensor, approximate: str = "none") -> Tensor:
        """Return GELU of `x`: exact (`none`) or by tanh (`tanh`)."""
        out: Tensor = self._gelu(x, approximate)
        return out

    def swiglu(self, x: Tensor) -> Tensor:
        """Return silu(gate) times up, where gate and up are the halves of the last dimension of `x`."""
        product: Tensor = self._swiglu(x)
        return product

    def cross_entropy(self, logits: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
        """Return the mean over tokens whose target is not `ignore_index`, as an fp32 scalar; NaN without
        any.

        logits: (tokens, vocabulary); targets: (tokens,).
        A backend may overwrite `logits` with their gradient if they need one.
        """
        loss: Tensor = self._cross_entropy(logits, targets, ignore_index)
        return loss

    def linear_cross_entropy(
        self, x: Tensor, weight: Tensor, targets: Tensor, vocabulary: int, ignore_index: int = -100
    ) -> Tensor:
        """Return `cross_entropy` of the logits x weight^T, which are not available to the caller.

        x: (tokens, hidden); weight: (rows, hidden), of which those from `vocabulary` on are padding.
        """
        loss: Tensor = self._linear_cross_entropy(x, weight, targets, vocabulary, ignore_index)
        return loss

    def attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
        """Return softmax(q k^T / sqrt(dim)) v over (batch, heads, sequence, dim).

        Causal means that the last query sees every key, the one before it all but the last, and so on. So
        with fewer queries than keys (generation from a cache) the queries are the last positions.
        """
        mixed: Tensor = self._attention(q, k, v, causal)
        return mixed

    def adamw(self, update: AdamWStep) -> None:
        """Run one step of AdamW in place."""
        self._adamw(update)

    def square_sum(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of the squares of all numbers, in fp32 for any input types."""
        total: Tensor = self._square_sum(tensors)
        return total

    def report(self) -> list[Chosen]:
        """Return what was chosen for each op and why, in the order of `OPS`."""
        return list(self._chosen)


def choose(device_type: str, requested: str | Mapping[str, str] = AUTO) -> Choice:
    """Return a backend for every op on `device_type` (`cpu`, `cuda`, `npu`).

    requested: `auto`; or a backend's name, used for every op that this backend has, with the reference for
    the rest (the report says so); or a mapping from op to name, with `auto` for the ops left out.
    """
    wanted = _wanted(requested)
    statuses = survey(device_type)
    chosen = [_choose_one(op, wanted[op], device_type, statuses) for op in OPS]
    if isinstance(requested, str) and requested != AUTO:
        chosen = [_explain_missing(choice, requested) for choice in chosen]
    functions = {choice.op: getattr(_module(choice.backend, choice.op), choice.op) for choice in chosen}
    return Choice(chosen, functions)


def survey(device_type: str) -> list[Status]:
    """Return every backend of every op for `device_type`, best first; works without torch."""
    torch_fault = _torch_fault()
    return [
        _status(backend, op, torch_fault)
        for op in OPS
        for backend in BACKENDS
        if op in backend.modules and backend.device_type in (None, device_type)
    ]


def _status(backend: Backend, op: str, torch_fault: str) -> Status:
    if torch_fault:
        return Status(op, backend.name, False, torch_fault)
    module = _module(backend.name, op)
    fault = module.why_not()
    return Status(op, backend.name, not fault, fault or module.describe())


def _torch_fault() -> str:
    # A torch_npu without CANN raises RuntimeError, and a torch without its libraries OSError.
    try:
        importlib.import_module("torch")
    except (ImportError, RuntimeError, OSError) as error:
        return f"torch cannot be imported: {(str(error) or type(error).__name__).splitlines()[0]}"
    return ""


def _wanted(requested: str | Mapping[str, str]) -> dict[str, str]:
    """Return the requested backend of each op (a name or `auto`); raise BadRequest for unknown names."""
    names = [AUTO, *(backend.name for backend in BACKENDS)]
    requests = {"": requested} if isinstance(requested, str) else dict(requested)
    faults = [_unknown("op", op, OPS) for op in requests if op and op not in OPS]
    faults += [_unknown("backend", name, names) for name in requests.values() if name not in names]
    if faults:
        raise BadRequest("; ".join(faults))
    if not isinstance(requested, str):
        return {op: requests.get(op, AUTO) for op in OPS}
    has = {op for backend in BACKENDS if backend.name == requested for op in backend.modules}
    return {op: requested if requested == AUTO or op in has else REFERENCE for op in OPS}


def _unknown(kind: str, name: object, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"there is no {kind} {name!r}; {remedy}"


def _choose_one(op: str, wanted: str, device_type: str, statuses: Sequence[Status]) -> Chosen:
    own = [status for status in statuses if status.op == op]
    if wanted != AUTO:
        found = next((status for status in own if status.backend == wanted), None)
        if found is None:
            raise BackendUnavailable(op, wanted, f"it has no {op} for {device_type}")
        if not found.available:
            raise BackendUnavailable(op, wanted, found.reason)
        return Chosen(op, wanted, f"asked for: {found.reason}")
    taken = next((status for status in own if status.available), None)
    passed = "; ".join(f"not {status.backend}: {status.reason}" for status in own if not status.available)
    if taken is None:
        raise BackendUnavailable(op, AUTO, passed)
    return Chosen(op, taken.backend, "; ".join(filter(None, [taken.reason, passed])))


def _explain_missing(chosen: Chosen, requested: str) -> Chosen:
    """Return the choice with a reason for the report if the requested backend lacks this op."""
    if chosen.backend == requested:
        return chosen
    return Chosen(chosen.op, chosen.backend, f"{requested} has no {chosen.op}")


def _module(backend_name: str, op: str) -> ModuleType | Any:
    backend = next(backend for backend in BACKENDS if backend.name == backend_name)
    return importlib.import_module(backend.modules[op])
