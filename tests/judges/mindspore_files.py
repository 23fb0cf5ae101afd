"""A program for an environment with mindspore: saves files, or reads them, and writes their numbers as .npz."""

from __future__ import annotations

import sys

import mindspore
import numpy as np


def main() -> None:
    command, file, numbers = sys.argv[1:4]
    form = "safetensors" if file.endswith(".safetensors") else "ckpt"
    if command == "save":
        held = dict(np.load(numbers))
        values = [{"name": name, "data": mindspore.Tensor(value)} for name, value in held.items()]
        mindspore.save_checkpoint(
            values, file, format=form, **({"crc_check": True} if form == "ckpt" else {})
        )
    else:
        found = mindspore.load_checkpoint(file, format=form)
        np.savez(numbers, **{name: value.asnumpy() for name, value in found.items()})


if __name__ == "__main__":
    main()
