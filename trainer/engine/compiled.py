"""Run each block as code that torch's compiler makes once per shape: the host starts a block with a few calls.

All blocks of a shape share the code, and other runs on the node find it on the disk. What cannot be compiled runs op by
op.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import exc

from trainer.engine.passes import Model
from trainer.model.layers import Block

# How much of the compiler's error the log shows, and with how many kinds of inputs it may fail.
LENGTH, MOST = 300, 8
FAULTS: Any = (RuntimeError, OSError, ImportError, exc.FailOnRecompileLimitHit)


class CompiledBlocks:
    """Runs passes with gradients through compiled blocks; where the compiler fails, op by op."""

    def __init__(self, model: Model) -> None:
        """Let the model's blocks run by this object."""
        self.model = model
        # The kinds of inputs with which the compiler failed. Others stay compiled: recomputation must save the same
        # tensors as the pass before it.
        self.failed: set[tuple[Any, ...]] = set()
        self.made, self.works = 0, False
        self.compiled: Any = torch.compile(Block.compute, fullgraph=True, backend=self._make)
        for block in model.blocks.values():
            block.run = self  # type: ignore[assignment]

    def __call__(self, block: Block, x: Tensor, *rest: Any) -> Tensor:
        """Return `block.compute(x, *rest)`."""
        kind = x.shape, x.requires_grad, *(each is None for each in rest)
        gave_up = len(self.failed) >= (MOST if self.works else 1)
        # Hooks of modules run in Python.
        if gave_up or kind in self.failed or self.model.observed or not torch.is_grad_enabled():
            return block.compute(x, *rest)
        before, began = self.made, time.monotonic()
        try:
            result: Tensor = self.compiled(block, x, *rest)
            if self.made > before:
                self._compile_backward(block, x, *rest)
                print(f"a block was compiled in {time.monotonic() - began:.1f} s", flush=True)
        except FAULTS as error:
            self._note(error)
            self.failed.add(kind)
            return block.compute(x, *rest)
        self.works = True
        return result

    def _note(self, error: BaseException) -> None:
        """Warn of the first fault; its first line alone does not name the call that cannot be traced."""
        if not self.failed:
            cause = f"{type(error).__name__}: {' '.join(str(error).split())[:LENGTH]}"
            subject = "some blocks" if self.works else "training steps"
            message = f"{subject} run op by op, not in compiled blocks: {cause}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def _make(self, graph: Any, inputs: Any) -> Any:
        """Return the code of a traced block."""
        self.made += 1
        from torch._inductor.compile_fx import compile_fx

        # Random numbers are those of op by op.
        return compile_fx(graph, inputs, config_patches={"fallback_random": True})

    def _compile_backward(self, block: Block, x: Tensor, *rest: Any) -> None:
        """Run the block's backward pass, which is only compiled then, once more where its gradients go nowhere."""
        alone = x.detach().requires_grad_(x.requires_grad)
        wanted = [each for each in (alone, *block.parameters()) if each.requires_grad][:1]
        generators = [] if x.device.type == "cpu" else [x.device.index]
        # Recomputation counts the tensors that are saved; these are not its.
        same = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
        with torch.random.fork_rng(generators), same:
            out = self.compiled(block, alone, *rest)
            torch.autograd.grad(out, wanted, torch.zeros_like(out), allow_unused=True)
