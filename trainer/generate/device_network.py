"""A whole model on one device: steps of one token per text run as captured graphs.

Python starts the hundreds of kernels of such a step more slowly than a device runs them. A graph is captured once for
each number of texts and of pages per text, both rounded up to a power of two, and started by one call.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from native.decode.paged import PAGE
from native.paging import Reach
from trainer.device import Device, Graph
from trainer.generate.modules import Step
from trainer.generate.network import Network
from trainer.generate.on_device import DeviceCache

DEVICE_PROMPT_TOKENS = (2048, 8192)
"""As `Network.prompt_tokens`."""
# The fewest pages per text for which there is a graph: 256 positions, which one range of the attention covers.
LEAST_PAGES = 16


class Buffers:
    """The inputs of a captured step, in one tensor that one copy fills; further texts use the scratch page."""

    def __init__(self, texts: int, pages: int, positions: int, cache: DeviceCache) -> None:
        """`positions`: how many each token has."""
        sizes = (texts, positions * texts, texts, texts, texts, texts * pages)
        self.texts, self.pages, self.scratch = texts, pages, cache.scratch
        self.host = torch.zeros(sum(sizes), dtype=torch.int64)
        self.own = torch.zeros(sum(sizes), dtype=torch.int64, device=cache.device)
        self._host = self.host.split(sizes)
        self.ids, at, self.slots, first, last, tables = self.own.split(sizes)
        self.positions = at if positions == 1 else at.view(positions, texts)
        self.reach = Reach(tables.view(texts, pages), first, last, ())
        self.wanted = torch.arange(texts, device=cache.device)

    def fill(self, step: Step, device: Device) -> None:
        """Copy a step with at most as many texts and pages."""
        spans, texts = step.spans, len(step.ids)
        ids, positions, slots, first, last, tables = self._host
        for part, value in ((ids, 0), (positions, 0), (slots, self.scratch * PAGE), (first, 0), (last, 1)):
            part.fill_(value)
        tables.fill_(self.scratch)
        for part, given in ((ids, step.ids), (slots, spans.slots), (first, spans.first), (last, spans.last)):
            part[:texts] = given
        positions.view(-1, self.texts)[:, :texts] = step.positions
        tables.view(self.texts, self.pages)[:texts, : spans.tables.shape[1]] = spans.tables
        self.own.copy_(device.pinned(self.host), non_blocking=True)


@dataclass
class Captured:
    """A captured step: the first one with these buffers runs op by op, the second is captured."""

    buffers: Buffers
    runs: int = 0
    graph: Graph | None = None
    logits: Tensor | None = None


class DeviceNetwork(Network):
    """A whole model on one device; its logits stay there."""

    prompt_tokens = DEVICE_PROMPT_TOKENS

    def __init__(self, own: Network, device: Device) -> None:
        super().__init__(own.model, own.config, own.cache, own.fused, own.place, own.kind)
        self.device = device
        # NPUs have no fp64 to add up probabilities.
        self.draws = device.kind != "npu"
        # An NPU's attention needs lengths on the host.
        self.captures = device.kind == "cuda"
        self.pool = device.graph_pool() if self.captures else None
        self.steps: dict[tuple[int, int], Captured] = {}

    @torch.inference_mode()
    def logits(self, step: Step) -> Tensor:
        """Return the logits of the wanted tokens, (wanted, vocab) in fp32; valid until the next step.

        They are on the device if tokens are drawn there.
        """
        texts = len(step.ids)
        # Each token ends its text: the logits of all are wanted.
        alone = len(step.spans.begins) - 1 == texts == len(step.wanted)
        if self.captures and alone:
            return self._next_tokens(step)[:texts]
        own = self.compute(step)
        assert own is not None
        return own if self.draws else own.cpu()

    def _next_tokens(self, step: Step) -> Tensor:
        key = _power(len(step.ids)), max(LEAST_PAGES, _power(step.spans.tables.shape[1]))
        if key not in self.steps:
            self.steps[key] = Captured(Buffers(*key, step.positions.dim(), self._pages))
        known = self.steps[key]
        known.buffers.fill(step, self.device)
        known.runs += 1
        if known.graph is None and known.runs > 1:
            self._capture(known)
        if known.graph is None or known.logits is None:
            return self._run(known.buffers)
        known.graph.replay()
        return known.logits

    @property
    def _pages(self) -> DeviceCache:
        assert isinstance(self.cache, DeviceCache)
        return self.cache

    def _run(self, buffers: Buffers) -> Tensor:
        self._pages.use(buffers.slots, buffers.reach)
        found = self.through(buffers.ids, buffers.positions, buffers.wanted)
        assert found is not None
        return found

    def _capture(self, known: Captured) -> None:
        """Capture the step; if that is not possible, all steps run op by op from now on."""
        graph = self.device.graph(self.pool)
        try:
            with graph.capture():
                known.logits = self._run(known.buffers)
        except (RuntimeError, NotImplementedError) as error:
            self.captures = False
            fault = (str(error) or type(error).__name__).splitlines()[0]
            message = f"tokens are computed op by op, not as a captured graph: {fault}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return
        known.graph = graph


def _power(number: int) -> int:
    """Return the smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
