"""List the backends of each op, find those that can run here, and choose one per op.

A backend of an op is a module with a function of the op's name and METHOD, one line about it. The backend's host
answers for all its ops: `why_not(*NEEDS)` returns why an op that needs these functions cannot run on this node, or "";
`describe(METHOD)` returns the line of the report. A module whose answer differs has that function itself, without
arguments. No fallback is silent: `auto` reports why it skipped a backend, and a backend that is requested by name but
cannot run is an error.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from native.masks import EVERY_KEY, Dropout, Mask
from native.vocabulary import VocabularyPart

if TYPE_CHECKING:
    from torch import Tensor

    from native.paging import Reach
    from native.update import AdamWStep

AUTO = "auto"
REFERENCE = "reference"
TORCH = "torch"
_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Backend:
    """A family of kernels: the device type that it supports (None: any), its host, and the module of each op it has."""

    name: str
    device_type: str | None
    host: str
    modules: Mapping[str, str]


class NativeError(Exception):
    """The choice of backends is not possible; the message has the op and the remedy."""


class BadRequest(NativeError):
    """The request has ops or backends that do not exist; the message lists all of them."""


class BackendUnavailable(NativeError):
    """A backend that was requested by name cannot run this op here."""

    def __init__(self, op: str, backend: str, reason: str) -> None:
        super().__init__(f"{op}: backend {backend!r} is not available: {reason}")
        self.op = op
        self.backend = backend
        self.reason = reason


@dataclass(frozen=True)
class Status:
    """A backend of an op on a device type; `reason` is why it cannot run, or its description."""

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


def _op(method: _Method) -> _Method:
    """Mark the declaration of an op."""
    method.__dict__["is_op"] = True
    return method


class Choice:
    """The ops, each bound to its chosen backend. A method with `_op` declares an op and its types."""

    def __init__(self, chosen: Sequence[Chosen], functions: Mapping[str, Callable[..., Any]]) -> None:
        self._chosen = tuple(chosen)
        for op in (*OPS, *_BESIDE):
            # This hides the method of the same name, which only declares types: a call goes directly to the backend.
            setattr(self, op, functions[op])

    @_op
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
        """Return `x` normalised over the last dimension; computed in fp32, returned in the type of `x`."""
        raise NotImplementedError

    @_op
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
        """Return `x` over the root of its mean square, times `weight`, in the type of `x`; computed in fp32."""
        raise NotImplementedError

    @_op
    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5
    ) -> tuple[Tensor, Tensor]:
        """Return x + residual, rounded to their type, and the layer norm of this sum.

        Without gradient the types may differ: the sum has that of the residual, and the norm that of x or of the sum.
        """
        raise NotImplementedError

    @_op
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5
    ) -> tuple[Tensor, Tensor]:
        """Return x + residual, rounded to their type, and the RMS norm of this sum."""
        raise NotImplementedError

    @_op
    def gelu(self, x: Tensor, approximate: str = "none") -> Tensor:
        """Return GELU of `x`: exact (`none`) or by tanh (`tanh`)."""
        raise NotImplementedError

    def gelu_backward(self, x: Tensor, upstream: Tensor, approximate: str = "none") -> Tensor:
        """Return the gradient of `x` from that of `gelu`; without gradient."""
        raise NotImplementedError

    @_op
    def bias_gelu(self, x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
        """Return `gelu` of x + bias."""
        raise NotImplementedError

    @_op
    def swiglu(self, x: Tensor) -> Tensor:
        """Return silu(gate) times up, where gate and up are the halves of the last dimension of `x`."""
        raise NotImplementedError

    def swiglu_backward(self, x: Tensor, upstream: Tensor) -> Tensor:
        """Return the gradient of `x` from that of `swiglu`; without gradient."""
        raise NotImplementedError

    @_op
    def dropout_add(
        self, x: Tensor, residual: Tensor, bias: Tensor | None, state: Tensor, probability: float
    ) -> Tensor:
        """Return residual + dropout(x + bias).

        state: (2,) of int64, the seed and the first counter, both from 0 to 2^62; they decide what is dropped.
        """
        raise NotImplementedError

    @_op
    def rotary(
        self, q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys (batch, heads, sequence, dim) with rotary positions.

        Each pair among a head's first numbers is rotated by the angle with these cosines and sines, (batch or 1, 1,
        sequence, pairs). The pairs are (i, i + pairs), or with `interleaved` adjacent numbers. Other numbers do not
        change.
        """
        raise NotImplementedError

    def rotary_(
        self, q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return `rotary` of queries and keys that nothing else reads; a CPU overwrites them."""
        raise NotImplementedError

    @_op
    def cross_entropy(self, logits: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
        """Return the mean cross-entropy over tokens whose target is not `ignore_index`, in fp32; NaN without tokens.

        logits: (tokens, vocabulary); targets: (tokens,).
        A backend may overwrite `logits` with their gradient if they need one.
        """
        raise NotImplementedError

    @_op
    def linear_cross_entropy(
        self, x: Tensor, weight: Tensor, targets: Tensor, vocabulary: int, ignore_index: int = -100
    ) -> Tensor:
        """Return `cross_entropy` of the logits x weight^T, which the caller does not get.

        x: (tokens, hidden); weight: (rows, hidden), whose rows from `vocabulary` on are padding.
        """
        raise NotImplementedError

    @_op
    def vocabulary_cross_entropy(
        self,
        logits: Tensor,
        targets: Tensor,
        part: VocabularyPart,
        smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> Tensor:
        """Return the mean cross-entropy in fp32 of logits (tokens, columns) whose columns are divided among ranks.

        targets: (tokens,), ids of the whole vocabulary. smoothing: this fraction of each target's probability is spread
        evenly over the vocabulary. A backend may overwrite `logits` with their gradient if they need one.
        """
        raise NotImplementedError

    @_op
    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Return the row of `weight` for each id. Its gradient is summed in fp32 over the tokens of a row."""
        raise NotImplementedError

    def tied_embedding(self, ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return `embedding`, and `weight` for its other use in the same model.

        If the other use takes this result instead of `weight` itself, a CPU adds the gradient of the rows to that of
        the other use, so that the table's gradient exists only once.
        """
        raise NotImplementedError

    @_op
    def route(self, logits: Tensor, top_k: int, renormalize: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return the softmax of logits (tokens, experts), and the weights and indices of the `top_k` largest.

        Softmax and weights are in fp32, indices in int64 and without gradient; of equal logits the lower index comes
        first. With `renormalize` the weights of a token add up to 1.
        """
        raise NotImplementedError

    @_op
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x weight^T + bias. The choice also holds for the products in other ops (`products.use_kernel`)."""
        raise NotImplementedError

    @_op
    def grouped_linear(self, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """Return rows x (rows, inputs) of each group times the transpose of its matrix.

        weight: (groups, outputs, inputs); counts: (groups,) in int64, how many rows each group has, in order.
        """
        raise NotImplementedError

    @_op
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = True,
        mask: Mask = EVERY_KEY,
        dropout: Dropout | None = None,
    ) -> Tensor:
        """Return softmax(q k^T / sqrt(dim)) v over (batch, heads, sequence, dim).

        Causal: the last query sees every key, the query before it all except the last key, and so on. So with fewer
        queries than keys (generation with a cache) the queries are the last positions. `mask` hides further keys of a
        causal attention. `k` and `v` may have fewer heads, each of which several heads of `q` share.
        """
        raise NotImplementedError

    @_op
    def paged_attention(self, q: Tensor, keys: Tensor, values: Tensor, reach: Reach) -> Tensor:
        """Return softmax(q k^T / sqrt(dim)) v of one new token per text, (texts, heads, dim); without gradient.

        keys, values: (pages, 16, groups, dim), where heads / groups heads share a group's keys.
        """
        raise NotImplementedError

    def store_in_pages(self, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store keys and values (tokens, groups, dim) at slots (tokens,) of pages: page number times 16, plus place."""
        raise NotImplementedError

    @_op
    def adamw(self, update: AdamWStep) -> None:
        """Run one step of AdamW in place."""
        raise NotImplementedError

    @property
    def reads_factor(self) -> bool:
        """Return whether `adamw` reads its factor on the device, so that the host need not wait for the norm."""
        return any(each.op == "adamw" and each.backend == "cuda" for each in self._chosen)

    @_op
    def square_sum(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of the squares of all numbers, in fp32 for any input types."""
        raise NotImplementedError

    def report(self) -> list[Chosen]:
        """Return the chosen backend of each op and the reason, in the order of `OPS`."""
        return list(self._chosen)


OPS = tuple(name for name, member in vars(Choice).items() if hasattr(member, "is_op"))
# Functions beside the ops, each with the op whose module may have it; if not, the op itself is used.
_BESIDE = {
    "gelu_backward": "gelu",
    "swiglu_backward": "swiglu",
    "tied_embedding": "embedding",
    "rotary_": "rotary",
    "store_in_pages": "paged_attention",
}
# Ops that share a file.
_NORMS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
_CPU_FILES = {**dict.fromkeys(_NORMS, "norm"), "bias_gelu": "gelu"}
_CUDA_FILES = {**dict.fromkeys(_NORMS, "norms"), "bias_gelu": "gelu"}
# The ops that a backend does not have.
_MISSING = {
    # Pages in CPU memory have another layout; see native/decode.
    "cpu": ("paged_attention",),
    "cuda": ("embedding", "route", "linear"),
    # CANN has no kernel for a sum of squares, and none for a dropout whose mask depends on a seed and an index.
    "npu": ("embedding", "route", "linear", "dropout_add", "square_sum", "vocabulary_cross_entropy"),
}


def _modules(backend: str, files: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the module of each op of a backend; `files`: the ops whose file has another name."""
    return {op: f"native.{backend}.{(files or {}).get(op, op)}" for op in OPS if op not in _MISSING[backend]}


# In the order in which `auto` tries them; the reference is last and supports every device that torch supports.
BACKENDS = (
    Backend("cpu", "cpu", "native.compiled.library", _modules("cpu", _CPU_FILES)),
    Backend("cuda", "cuda", "native.cuda.language", _modules("cuda", _CUDA_FILES)),
    Backend("npu", "npu", "native.npu.library", _modules("npu")),
    Backend(REFERENCE, None, "native.reference", dict.fromkeys(OPS, "native.reference")),
    # Only chosen by name: torch's own attention. For every other op the reference is plain torch.
    Backend(TORCH, None, "native.sdpa", {"attention": "native.sdpa"}),
)


def choose(device_type: str, requested: str | Mapping[str, str] = AUTO) -> Choice:
    """Return a backend for every op on `device_type` (`cpu`, `cuda`, `npu`).

    requested: `auto`; or a backend's name, for every op that this backend has, with the reference for the rest (the
    report says so); or a mapping from op to name, with `auto` for ops that are not in it. `torch` means torch's own
    attention, and the reference, which is plain torch, for the other ops.
    """
    wanted = _wanted(requested)
    statuses = survey(device_type)
    chosen = [_choose_one(op, wanted[op], device_type, statuses) for op in OPS]
    if isinstance(requested, str) and requested not in (AUTO, TORCH):
        chosen = [_explain_missing(choice, requested) for choice in chosen]
    functions = {choice.op: getattr(_module(choice.backend, choice.op), choice.op) for choice in chosen}
    backends = {choice.op: choice.backend for choice in chosen}
    for name, op in _BESIDE.items():
        functions[name] = getattr(_module(backends[op], op), name, functions[op])
    return Choice(chosen, functions)


def check(requested: str | Mapping[str, str]) -> None:
    """Raise BadRequest for ops and backends that `choose` does not know on any device; loads no torch."""
    _wanted(requested)


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
    module, host = _module(backend.name, op), importlib.import_module(backend.host)
    own = vars(module)
    fault = own["why_not"]() if "why_not" in own else host.why_not(*own.get("NEEDS", ()))
    if fault:
        return Status(op, backend.name, False, fault)
    return Status(
        op, backend.name, True, own["describe"]() if "describe" in own else host.describe(own["METHOD"])
    )


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
        return {op: _of_torch(op, requests.get(op, AUTO)) for op in OPS}
    has = {op for backend in BACKENDS if backend.name == requested for op in backend.modules}
    return {op: requested if requested == AUTO or op in has else REFERENCE for op in OPS}


def _of_torch(op: str, name: str) -> str:
    """Return the backend with torch's own `op` if `name` asks for it, else `name`."""
    backend = next(backend for backend in BACKENDS if backend.name == TORCH)
    return REFERENCE if name == TORCH and op not in backend.modules else name


def _unknown(kind: str, name: object, known: Sequence[str]) -> str:
    closest = difflib.get_close_matches(str(name), known, n=1)
    remedy = f"did you mean {closest[0]!r}?" if closest else f"known: {', '.join(known)}"
    return f"there is no {kind} {name!r}; {remedy}"


def _choose_one(op: str, wanted: str, device_type: str, statuses: Sequence[Status]) -> Chosen:
    own = [status for status in statuses if status.op == op]
    if wanted != AUTO:
        found = next((status for status in own if status.backend == wanted), None)
        if found is None:
            raise BackendUnavailable(op, wanted, f"it has no {op} for {device_type}")
        if not found.available:
            raise BackendUnavailable(op, wanted, found.reason)
        return Chosen(op, wanted, f"requested: {found.reason}")
    taken = next((status for status in own if status.available), None)
    passed = "; ".join(f"not {status.backend}: {status.reason}" for status in own if not status.available)
    if taken is None:
        raise BackendUnavailable(op, AUTO, passed)
    return Chosen(op, taken.backend, "; ".join(filter(None, [taken.reason, passed])))


def _explain_missing(chosen: Chosen, requested: str) -> Chosen:
    """Return the choice; if the requested backend lacks this op, with a reason for the report."""
    if chosen.backend == requested:
        return chosen
    return Chosen(chosen.op, chosen.backend, f"{requested} has no {chosen.op}")


def _module(backend_name: str, op: str) -> ModuleType | Any:
    backend = next(backend for backend in BACKENDS if backend.name == backend_name)
    return importlib.import_module(backend.modules[op])
