"""Compute log probabilities of targets in batches of requests with similar lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trainer.engine.passes import Model
from trainer.evaluate.request import Request, Score
from trainer.model.glm import GLM
from trainer.model.gpt import GPT
from trainer.samples.glm_windows import GlmTokens

# A batch has at most this many tokens, padding included: enough to keep two cores busy.
BATCH_TOKENS = 4096
# Logits are computed for this many positions at a time: 50,257 columns of fp32 make 51 MB.
LOGIT_ROWS = 256


class Scorer:
    """Scores requests with a model; the result of a request does not depend on the others in its batch."""

    def __init__(
        self, model: Model, tokens: GlmTokens | None = None, batch_tokens: int = BATCH_TOKENS
    ) -> None:
        """`tokens`: GLM's special tokens, for a GLM."""
        self.model, self.tokens, self.batch_tokens = model, tokens, batch_tokens
        self.device = next(model.parameters()).device

    def batches(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Yield indices of requests in batches, longest requests first, so that a lack of memory shows early."""
        order = sorted(range(len(requests)), key=lambda index: (-requests[index].length, index))
        batch: list[int] = []
        for index in order:
            longest = requests[batch[0]].length if batch else requests[index].length
            if batch and longest * (len(batch) + 1) > self.batch_tokens:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    @torch.inference_mode()
    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Return the score of each request of one batch."""
        model = self.model
        hidden = self._of_glm(model, requests) if isinstance(model, GLM) else self._of_gpt(model, requests)
        rows = [
            hidden[row, request.length - len(request.target) : request.length]
            for row, request in enumerate(requests)
        ]
        targets = torch.tensor([token for request in requests for token in request.target])
        likelihoods, best = self._log_likelihoods(torch.cat(rows), targets.to(self.device))
        scores, start = [], 0
        for request in requests:
            end = start + len(request.target)
            total = likelihoods[start:end].double().sum().item()
            scores.append(Score(float(total), bool(best[start:end].all().item())))
            start = end
        return scores

    def _of_gpt(self, model: GPT, requests: Sequence[Request]) -> Tensor:
        """Return the hidden states of rows that consist of a context and its target without the last token."""
        ids = torch.zeros(len(requests), max(request.length for request in requests), dtype=torch.long)
        for row, request in enumerate(requests):
            inputs = (*request.context, *request.target[:-1])
            ids[row, : len(inputs)] = torch.tensor(inputs)
        return model.hidden(ids.to(self.device))

    def _of_glm(self, model: GLM, requests: Sequence[Request]) -> Tensor:
        """Return the hidden states of rows: the source, the start of a piece, and the target without its last token."""
        assert self.tokens is not None
        length = max(request.length for request in requests)
        ids, positions = (
            torch.zeros(len(requests), length, dtype=torch.long),
            torch.zeros(len(requests), 2, length, dtype=torch.long),
        )
        for row, request in enumerate(requests):
            source, target = len(request.context), len(request.target)
            inputs = (*request.context, self.tokens.sop, *request.target[:-1])
            ids[row, : len(inputs)] = torch.tensor(inputs)
            positions[row, 0, :source] = torch.arange(source)
            positions[row, 0, source:] = int(request.mask or 0)
            positions[row, 1, source : source + target] = torch.arange(1, target + 1)
        separators = torch.tensor([len(request.context) for request in requests])
        return model.hidden(ids.to(self.device), positions.to(self.device), separators.to(self.device))

    def _log_likelihoods(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each row the log probability of its target, and whether the target is the most likely token."""
        likelihoods, best = [], []
        for rows, wanted in zip(hidden.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True):
            logits = self.model.head.logits(rows).float()
            chosen = logits.gather(1, wanted[:, None])[:, 0]
            likelihoods.append(chosen - logits.logsumexp(1))
            best.append(logits.argmax(1) == wanted)
        return torch.cat(likelihoods).cpu(), torch.cat(best).cpu()
