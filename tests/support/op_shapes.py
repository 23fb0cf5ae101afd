"""The shapes and arguments of the cases of every op: the data of `tests.support.op_cases`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from native.bounds import BF16, FP32
from native.masks import Dropout, Mask
from native.vocabulary import VocabularyPart


@dataclass(frozen=True)
class AnotherRank:
    """Replaces the exchange with another rank, whose numbers are always the same."""

    def __call__(self, own: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        other = torch.rand(own.shape, generator=generator, dtype=torch.float64) + 0.5
        return torch.stack((own, other.to(own)))


# Errors allowed for torch's own fp32 kernels where they are less exact than this project's: over 50,257
# columns the gradient of torch's cross-entropy is 3.9e-6 off on a processor without AVX-512.
TORCH_ERRORS = {
    ("cross_entropy", FP32): (1e-6, 6e-6),
    # torch adds the tokens of a row in bf16.
    ("embedding", BF16): (0.0, 5e-2),
}

NONE: Mapping[str, object] = {}
_DROPOUT = Dropout(0.3, torch.tensor(-(2**61) + 12345), 2, 9)
_OTHER = AnotherRank()
_PART = VocabularyPart(300, 130, 129, _OTHER)
# Rows of 150 keys in documents of several lengths.
_DOCUMENTS = torch.stack(
    [torch.arange(150) // 13, (torch.arange(150) > 63).long() + (torch.arange(150) > 128)]
)
LARGE_ARGUMENTS: Mapping[str, Mapping[str, object]] = {
    "gelu": {"approximate": "tanh"},
    "bias_gelu": {"approximate": "tanh"},
    "dropout_add": {"probability": 0.1},
    "linear_cross_entropy": {"vocabulary": 50257},
    "route": {"top_k": 8},
    "vocabulary_cross_entropy": {"part": VocabularyPart(50304, 0, 25152, _OTHER)},
}
_NORMS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
LARGE: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    *((op, "1,024 x 768", (1024, 768)) for op in _NORMS),
    ("gelu", "1,024 x 3,072", (1024, 3072)),
    ("bias_gelu", "1,024 x 3,072", (1024, 3072)),
    ("swiglu", "1,024 x 4,096", (1024, 4096)),
    ("dropout_add", "1,024 x 768", (1024, 768)),
    ("rotary", "1 x 12 x 1,024 x 64", (1, 12, 12, 1024, 64, 32)),
    *((op, "2,048 x 2,048", (2048, 2048)) for op in (*_NORMS, "dropout_add")),
    ("gelu", "2,048 x 8,192", (2048, 8192)),
    ("bias_gelu", "2,048 x 8,192", (2048, 8192)),
    ("swiglu", "2,048 x 11,264", (2048, 11264)),
    ("rotary", "1 x 16 x 2,048 x 128", (1, 16, 16, 2048, 128, 64)),
    ("cross_entropy", "512 x 2,048", (512, 2048)),
    ("cross_entropy", "1,024 x 50,304", (1024, 50304)),
    ("linear_cross_entropy", "1,024 x 768 x 50,257", (1024, 768, 50304, 50257)),
    ("embedding", "1,024 of 50,304 x 768", (1024, 50304, 768)),
    ("embedding", "2,048 of 50,304 x 2,048", (2048, 50304, 2048)),
    ("route", "1,024 x 64", (1024, 64)),
    ("route", "8,192 x 64", (8192, 64)),
    ("linear", "1,024 x 768 x 3,072", (1024, 768, 3072, 1)),
    ("linear", "2,048 x 2,048 x 8,192", (2048, 2048, 8192, 1)),
    ("grouped_linear", "2,048 rows, 8 x 768 x 2,048", (768, 2048, *[256] * 8)),
    ("grouped_linear", "4,096 rows, 8 x 2,048 x 8,192", (2048, 8192, *[512] * 8)),
    ("vocabulary_cross_entropy", "1,024 x 25,152", (1024, 25152, 50304)),
    ("vocabulary_cross_entropy", "2,048 x 25,152", (2048, 25152, 50304)),
    ("attention", "8 x 6 x 256 x 64", (8, 6, 256, 256, 64)),
    ("attention", "1 x 12 x 1,024 x 64", (1, 12, 1024, 1024, 64)),
    ("attention", "1 x 16 x 2,048 x 128", (1, 16, 2048, 2048, 128)),
)
WRONG = {"a NaN": float("nan"), "an infinity": float("inf")}
_ROWS = (*_NORMS, "gelu", "bias_gelu", "swiglu")
_EDGES = {"empty": (0, 64), "transposed": (6, 5, 34), "huge rows": (3, 64), **dict.fromkeys(WRONG, (3, 64))}
SHAPES: tuple[tuple[str, str, tuple[int, ...], Mapping[str, object]], ...] = (
    # torch's own exact GELU of infinity is not a number in fp32.
    *((op, name, shape, LARGE_ARGUMENTS.get(op, NONE)) for op in _ROWS for name, shape in _EDGES.items()),
    ("layer_norm", "small", (3, 5, 64), NONE),
    ("layer_norm", "odd", (7, 129), {"eps": 1e-3}),
    # The weight's gradient is a sum over 1,024 rows.
    ("layer_norm", "rows", (1024, 96), NONE),
    ("rms_norm", "small", (3, 5, 64), NONE),
    ("rms_norm", "odd", (7, 129), {"eps": 1e-3}),
    ("rms_norm", "rows", (1024, 96), NONE),
    ("add_layer_norm", "small", (3, 5, 64), NONE),
    ("add_layer_norm", "odd", (7, 129), {"eps": 1e-3}),
    ("add_layer_norm", "rows", (1024, 96), NONE),
    ("add_rms_norm", "small", (3, 5, 64), NONE),
    ("add_rms_norm", "odd", (7, 129), {"eps": 1e-3}),
    ("add_rms_norm", "rows", (1024, 96), NONE),
    ("gelu", "exact", (33, 65), NONE),
    ("gelu", "tanh", (33, 65), {"approximate": "tanh"}),
    ("gelu", "threads", (90, 513), {"approximate": "tanh"}),
    ("bias_gelu", "exact", (33, 65), NONE),
    ("bias_gelu", "tanh", (33, 65), {"approximate": "tanh"}),
    ("bias_gelu", "threads", (90, 513), {"approximate": "tanh"}),
    ("swiglu", "small", (3, 5, 64), NONE),
    ("swiglu", "odd", (33, 130), NONE),
    ("swiglu", "threads", (90, 514), NONE),
    ("dropout_add", "small", (3, 5, 64), {"probability": 0.1}),
    ("dropout_add", "odd", (7, 1291), {"probability": 0.5}),
    ("dropout_add", "threads", (90, 514), {"probability": 0.1}),
    ("dropout_add", "transposed", (6, 5, 34), {"probability": 0.1}),
    ("dropout_add", "empty", (0, 64), {"probability": 0.1}),
    ("rotary", "small", (2, 3, 3, 5, 8, 4), NONE),
    ("rotary", "partial", (2, 4, 2, 7, 13, 3), NONE),
    ("rotary", "neighbours", (2, 4, 2, 7, 13, 3), {"interleaved": True}),
    ("rotary", "samples", (3, 2, 1, 5, 8, 4), NONE),
    ("rotary", "threads", (2, 4, 4, 70, 32, 16), {"interleaved": True}),
    ("rotary", "empty", (2, 4, 4, 0, 32, 16), NONE),
    ("cross_entropy", "one token", (1, 2), NONE),
    ("cross_entropy", "one word", (3, 1), NONE),
    ("cross_entropy", "odd", (5, 1009), NONE),
    ("cross_entropy", "GPT-2", (4, 50257), NONE),
    ("cross_entropy", "threads", (96, 2053), NONE),
    ("cross_entropy", "some ignored", (7, 130), NONE),
    ("cross_entropy", "all ignored", (4, 33), NONE),
    ("cross_entropy", "ignore index 0", (6, 33), {"ignore_index": 0}),
    ("cross_entropy", "huge", (4, 300), NONE),
    ("cross_entropy", "masked", (4, 64), NONE),
    ("cross_entropy", "masked target", (4, 64), NONE),
    ("cross_entropy", "all masked", (4, 64), NONE),
    ("cross_entropy", "infinite", (4, 64), NONE),
    ("cross_entropy", "not a number", (4, 64), NONE),
    ("linear_cross_entropy", "padded", (40, 24, 384, 301), {"vocabulary": 301}),
    ("linear_cross_entropy", "full", (7, 16, 128, 128), {"vocabulary": 128}),
    ("linear_cross_entropy", "some ignored", (9, 16, 128, 65), {"vocabulary": 65}),
    ("linear_cross_entropy", "all ignored", (9, 16, 128, 65), {"vocabulary": 65}),
    ("vocabulary_cross_entropy", "alone", (5, 1009, 1009), {"part": VocabularyPart(1009)}),
    ("vocabulary_cross_entropy", "smoothed", (9, 131, 131), {"part": VocabularyPart(131), "smoothing": 0.1}),
    ("vocabulary_cross_entropy", "threads", (96, 2053, 2053), {"part": VocabularyPart(2053)}),
    *(
        ("vocabulary_cross_entropy", name, (7, 140, 300), {"part": _PART, "smoothing": smoothing})
        for name, smoothing in (("a part", 0.0), ("a smoothed part", 0.2), ("some ignored", 0.2))
    ),
    (
        "vocabulary_cross_entropy",
        "padding alone",
        (4, 16, 300),
        {"part": VocabularyPart(300, 300, 0, _OTHER)},
    ),
    ("vocabulary_cross_entropy", "no tokens", (0, 64, 64), {"part": VocabularyPart(64)}),
    *(
        ("vocabulary_cross_entropy", name, (4, 64, 64), {"part": VocabularyPart(64)})
        for name in (
            "all ignored",
            "huge",
            "masked",
            "masked target",
            "all masked",
            "infinite",
            "not a number",
        )
    ),
    ("embedding", "small", (3, 5, 11, 24), NONE),
    ("embedding", "odd", (700, 129, 333), NONE),
    ("embedding", "one row", (40, 7, 300), NONE),
    ("embedding", "threads", (4, 100, 1003, 96), NONE),
    ("embedding", "empty", (0, 9, 16), NONE),
    ("route", "one", (1, 1), {"top_k": 1}),
    ("route", "odd", (33, 7), {"top_k": 2}),
    ("route", "renormalized", (33, 8), {"top_k": 2, "renormalize": True}),
    ("route", "equal", (40, 60), {"top_k": 6, "renormalize": True}),
    ("route", "all", (5, 4), {"top_k": 4}),
    ("route", "threads", (500, 64), {"top_k": 8}),
    ("route", "empty", (0, 8), {"top_k": 2}),
    ("linear", "small", (5, 16, 24, 1), NONE),
    ("linear", "odd", (67, 34, 131, 1), NONE),
    ("linear", "odd inner numbers", (67, 33, 129), NONE),
    ("linear", "one", (1, 1, 1), NONE),
    ("linear", "empty", (0, 8, 8, 1), NONE),
    *(("linear", name, (66, 8, 64), NONE) for name in WRONG),
    # Longer than a chunk of the inner dimension, both forward and backward.
    ("linear", "chunks", (1700, 1636, 70, 1), NONE),
    ("grouped_linear", "small", (16, 24, 3, 5, 1), NONE),
    ("grouped_linear", "odd", (65, 33, 0, 70, 0, 13, 0), NONE),
    ("grouped_linear", "blocks", (96, 130, 66, 129), NONE),
    ("grouped_linear", "empty", (8, 8, 0, 0), NONE),
    ("attention", "small", (2, 3, 16, 16, 8), NONE),
    ("attention", "one", (1, 1, 1, 1, 4), NONE),
    # Longer than a block, but not a multiple of it.
    ("attention", "blocks", (1, 2, 300, 300, 16), NONE),
    ("attention", "both ways", (1, 2, 40, 40, 16), {"causal": False}),
    # Fewer queries than keys.
    ("attention", "cached", (2, 2, 3, 20, 8), NONE),
    ("attention", "cached blocks", (1, 2, 150, 190, 8), NONE),
    ("attention", "window", (1, 2, 200, 200, 16), {"mask": Mask(70)}),
    ("attention", "window of two", (1, 1, 70, 70, 8), {"mask": Mask(2)}),
    ("attention", "documents", (2, 2, 150, 150, 8), {"mask": Mask(documents=_DOCUMENTS)}),
    ("attention", "documents, window, cached", (2, 1, 85, 150, 8), {"mask": Mask(40, _DOCUMENTS)}),
    ("attention", "source", (3, 2, 140, 140, 8), {"mask": Mask(source=torch.tensor([0, 65, 140]))}),
    ("attention", "groups", (2, 6, 90, 130, 24, 2), NONE),
    ("attention", "dropout", (2, 2, 130, 130, 16), {"dropout": _DROPOUT}),
    (
        "attention",
        "dropout, documents, groups",
        (2, 4, 99, 150, 8, 1),
        {"mask": Mask(0, _DOCUMENTS), "dropout": _DROPOUT},
    ),
)
