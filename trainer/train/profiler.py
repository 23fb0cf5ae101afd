"""torch's profiler with the job's schedule: one trace per cycle, for TensorBoard or chrome://tracing."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

from clusterctl.wire.metrics import Ended, Failed, StepDone
from trainer.config.parts import ProfileConfig
from trainer.device import Device
from trainer.train.events import Event, StepBegan


class Profiler:
    """Traces the active steps of the schedule, which counts from 0 at each start of the process."""

    def __init__(self, config: ProfileConfig, device: Device, folder: Path, rank: int) -> None:
        self.config, self.device, self.folder, self.rank = config, device, folder, rank
        self.left = config.repeat * (config.wait + config.warmup + config.active)
        # The last finished step of the training.
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
        # Compression makes a trace ten times smaller; torch_npu does not have it.
        packed = {} if self.device.kind == "npu" else {"use_gzip": True}
        write = library.tensorboard_trace_handler(str(self.folder), f"rank-{self.rank}", **packed)
        # The warning is about intended behaviour: each trace has the events of its own cycle.
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
        """Stop the profiler; the trace of an unfinished cycle is written too."""
        self.profile.stop()
        self.profile, self.left = None, 0
