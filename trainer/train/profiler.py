"""torch's profiler by the job's schedule of steps: one trace a cycle, for TensorBoard or chrome://tracing."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

from trainer.config.parts import ProfileConfig
from trainer.device import Device
from trainer.train.events import (
    Ended,
    Event,
    Failed,
    StepBegan,
    StepDone,
)


class Profiler:
    """Traces the steps that the schedule keeps; counted from 0 at this start. Made only where a job asks for it."""

    def __init__(self, config: ProfileConfig, device: Device, folder: Path, rank: int) -> None:
        self.config, self.device, self.folder, self.rank = config, device, folder, rank
        self.left = config.repeat * (config.wait + config.warmup + config.active)
        # The last finished step, as the training counts.
        self.last = 0
        self.profile: Any = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepBegan) and self.profile is None and self.left:
            self.profile = self._started()
        elif isinstance(event, StepDone) and self.profile is not None:
            self.last = event.step
            self.profile.step()
            self.left -= 1
            if not self.left:
                self._stop()
        elif isinstance(event, (Ended, Failed)) and self.profile is not None:
            self._stop()

    def _started(self) -> Any:
        library = self.device.profiler()
        # To a tenth.
        packed = {} if self.device.kind == "npu" else {"use_gzip": True}
        write = library.tensorboard_trace_handler(str(self.folder), f"rank-{self.rank}", **packed)
        # What it warns of, that a cycle's events are its own, is what is wanted.
        warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")

        def keep(profile: Any) -> None:
            write(profile)
            first = self.last - self.config.active + 1
            sys.stdout.write(f"profiled steps {first} to {self.last} of rank {self.rank}: {self.folder}\n")
            sys.stdout.flush()

        profile = library.profile(
            activities=list(library.supported_activities()),
            schedule=library.schedule(
                wait=self.config.wait,
                warmup=self.config.warmup,
                active=self.config.active,
                repeat=self.config.repeat,
            ),
            on_trace_ready=keep,
            record_shapes=True,
            profile_memory=True,
            with_flops=True,
            with_stack=self.config.stacks,
        )
        profile.start()
        return profile

    def _stop(self) -> None:
        """A cycle that the training's end cuts short is kept as far as it went."""
        self.profile.stop()
        self.profile, self.left = None, 0
