"""One subject of bench/train: a process that takes a step on command and reports its time and memory.

    python -m bench.train.subject SPEC.json      (commands on stdin, one line of JSON per answer on stdout)

`go` takes a step, `profile` records what the device does until the next answer, `reset` resets the peak memory, `end`
ends the process. Ours is the trainer as a rank of a launch
runs it: it reports and waits at the place where the trainer checks after each step whether it must stop.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TextIO

from bench.field import status_of
from bench.train.activities import Recorder, runtime_of, wait
from bench.train.spec import Spec, StepFigures

# The size of the first matrix product, which makes libraries load their parts for the first use.
WARM = 256


class Gate:
    """Reports the last step and waits for the next command, between steps."""

    def __init__(self, device: str) -> None:
        self.device = device
        # Output of libraries goes to stderr.
        self.out: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.base = 0
        self.recorder: Recorder | None = None
        self.began, self.cpu = time.perf_counter(), time.process_time()

    def loaded(self) -> None:
        """Record the resident memory as that of the libraries; later memory belongs to the model."""
        import torch

        if self.device == "cpu":
            warm = torch.randn(WARM, WARM, requires_grad=True)
            (warm @ warm).sum().backward()
            self.base = 1024 * status_of("self", "VmRSS")
        else:
            # A peak cannot be asked of a runtime that has not started.
            runtime_of(self.device)
            torch.zeros(1, device=self.device)
        self.forget_peak()

    def forget_peak(self) -> None:
        if self.device == "cpu":
            Path("/proc/self/clear_refs").write_text("5")
        else:
            runtime_of(self.device).reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """Return the peak memory in bytes, of this process or on its device."""
        if self.device == "cpu":
            return 1024 * status_of("self", "VmHWM")
        return int(runtime_of(self.device).max_memory_allocated(self.device))

    def step_done(
        self, loss: float | None = None, square: float = 0.0, step: float = 0.0, own: float = 0.0
    ) -> None:
        """Report the step that started with the last `go`; return when the next one must start."""
        seconds, cpu = time.perf_counter() - self.began, time.process_time() - self.cpu
        figures = StepFigures(seconds, cpu, self.base, self.peak(), loss, square, step, own)
        if self.recorder:
            done = self.recorder.stop()
            self.recorder = None
            figures = replace(
                figures,
                wall=done.wall,
                busy=done.busy,
                count=done.count,
                starts=done.starts,
                waits=done.waits,
            )
        self.report(figures)
        for line in sys.stdin:
            word = line.strip()
            if word == "profile":
                self.recorder = Recorder(self.device)
            elif word == "go":
                self.began, self.cpu = time.perf_counter(), time.process_time()
                return
            elif word == "reset":
                self.forget_peak()
            else:
                break
        self.end()

    def report(self, figures: StepFigures) -> None:
        self.out.write(figures.text())
        self.out.flush()

    def end(self) -> NoReturn:
        os._exit(0)


def ours(spec: Spec, gate: Gate) -> None:
    """Run the trainer in the same way as `python -m trainer train`."""
    from clusterctl.wire.contract import METRICS_FILE
    from trainer.device import keep_freed_memory, prepare_import
    from trainer.env import Env
    from trainer.plan.resolve import read_config

    environment = Env.read()
    config = read_config(spec.train, environment.world_size)
    run_dir = Path(spec.run_dir)
    keep_freed_memory()
    prepare_import()
    from trainer.train.assemble import run_training
    from trainer.train.startup import Startup

    gate.loaded()

    def between() -> bool:
        gate.step_done(last_loss(run_dir / METRICS_FILE) if environment.rank == 0 else None)
        return False

    run_training(config, environment, run_dir, between, Startup())


def last_loss(metrics: Path) -> float | None:
    """Return the loss of the newest step."""
    for line in reversed(metrics.read_bytes().splitlines()):
        record = json.loads(line)
        if record["event"] == "step":
            return float(record["loss"])
    return None


def peer(spec: Spec, gate: Gate) -> None:
    """Run a peer's model with the step of a typical script."""
    import torch

    from bench.train import peers

    torch.set_num_threads(spec.threads)
    why = peers.missing(spec.subject)
    if why:
        gate.report(StepFigures(missing=why))
        gate.end()
    # Count the compiler's memory as that of the libraries.
    if spec.subject == "compile":
        torch.compile(torch.nn.Linear(8, 8))(torch.ones(2, 8)).sum().backward()
    gate.loaded()
    built = peers.build(spec.subject, spec.work)
    if spec.nudge is not None:
        take_weights(built.model, spec)
    take_steps(built, spec, gate)


def take_weights(model: Any, spec: Spec) -> None:
    """Load the trainer's first weights, perturbed by about a millionth if the spec has a seed."""
    import torch

    torch.manual_seed(spec.nudge)
    with torch.no_grad():
        for name, weight in own_model(spec).model.state_dict().items():
            nudged = weight * (1 + 1e-6 * torch.randn_like(weight)) if spec.nudge else weight
            model.get_parameter(name).copy_(nudged)


def loop(spec: Spec, gate: Gate) -> None:
    """Run a bare loop of torch's DistributedDataParallel around the trainer's own model or a peer's."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from bench.train.peers import MODELS, Peer

    torch.set_num_threads(spec.threads)
    gate.loaded()
    torch.distributed.init_process_group("gloo")
    work = spec.work
    torch.manual_seed(work.seed)
    model = own_model(spec) if spec.subject == "loop" else MODELS["eager"](work.model)
    take_steps(
        Peer(model, work, lambda wrapped: DistributedDataParallel(wrapped, gradient_as_bucket_view=True)),
        spec,
        gate,
    )


def own_model(spec: Spec) -> Any:
    """Return the trainer's GPT with its fused ops, as a module that takes a batch."""
    import torch

    import native
    from trainer.model.gpt import GPT
    from trainer.plan.resolve import read_config

    config = read_config(spec.train, int(os.environ["WORLD_SIZE"]))

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT(config.model, native.choose("cpu", config.native), config.seed)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.model(*self.model.arguments((batch,)))

    return Own()


def take_steps(subject: Any, spec: Spec, gate: Gate) -> None:
    """Take steps over this rank's part of the batches until the parent stops."""
    import numpy as np
    import torch

    batches = np.load(spec.batches, mmap_mode="r")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    part = batches.shape[1] // world
    step = 0
    while True:
        mine = batches[step % len(batches), rank * part : (rank + 1) * part]
        loss = subject.step(torch.from_numpy(mine.astype(np.int64)))
        gate.step_done(loss)
        step += 1


def products(spec: Spec, gate: Gate) -> None:
    """Measure the machine's rate in matrix products: large squares, and those in a step of the model.

    The products of a step are measured by torch and by the trainer's own functions.
    """
    import torch
    import torch.nn.functional as F

    import native
    from native.products import linear, mm

    torch.set_num_threads(spec.threads)
    model: Any = spec.work.model
    device = spec.work.device
    kind = torch.bfloat16 if spec.work.precision == "bf16" else torch.float32
    tokens, hidden = spec.tokens, model["hidden"]
    keys = 2 * hidden * model["groups"] // model["heads"]
    layer = [(hidden, hidden + keys), (hidden, hidden), (hidden, model["up_width"]), (model["inner"], hidden)]

    clock = time.process_time if spec.threads == 1 and device == "cpu" else time.perf_counter

    def triple(inputs: int, outputs: int, repeat: int) -> tuple[float, float]:
        """Return the seconds of a product and those of both gradients together, by torch and by our functions."""
        x, weight = (torch.randn(n, inputs, device=device, dtype=kind) for n in (tokens, outputs))
        gradient = torch.randn(tokens, outputs, device=device, dtype=kind)
        seconds = []
        for forward, product in ((F.linear, torch.mm), (linear, mm)):
            wait(device)
            began = clock()
            for _ in range(repeat):
                forward(x, weight)
                product(gradient, weight)
                product(gradient.t(), x)
            wait(device)
            seconds.append((clock() - began) / repeat)
        return seconds[0], seconds[1]

    # This also offers the trainer's kernel.
    native.choose(device.partition(":")[0])
    size = spec.square
    left, right = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    F.linear(left, right)
    while True:
        wait(device)
        began = clock()
        for _ in range(5):
            F.linear(left, right)
        wait(device)
        square = 5 * 2 * size**3 / (clock() - began)
        each = [triple(*shape, 2) for shape in layer]
        last = triple(hidden, model["vocab"], 1)
        step, own = (model["layers"] * sum(pair[i] for pair in each) + last[i] for i in range(2))
        weights = model["layers"] * sum(a * b for a, b in layer) + hidden * model["vocab"]
        flops = 6 * tokens * weights
        gate.step_done(square=square, step=flops / step, own=flops / own)


def main() -> None:
    spec = Spec.read(Path(sys.argv[1]))
    gate = Gate(spec.work.device)
    roles = {"ours": ours, "loop": loop, "loop-eager": loop, "products": products}
    roles.get(spec.subject, peer)(spec, gate)


if __name__ == "__main__":
    main()
