"""What to do about the errors of drivers, torch and container runtimes, by their own words."""

from __future__ import annotations

import re

# Words of an error, the remedy, and a command that fixes the problem or shows more. The first row that matches counts.
ROWS = (
    ("Driver/library version mismatch",
     "the driver was updated while its modules were loaded: restart the node, or load them again",
     "sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia; sudo modprobe nvidia"),
    ("Insufficient Permissions|[Pp]ermission denied|ret is -8002",
     "give the user access to the device files: the group that they have (HwHiAiUser on NPUs), or mode 0666",
     "ls -l /dev/nvidia* /dev/davinci*; id"),
    ("Error 802|system not yet initialized",
     "start the fabric manager; its version must be the driver's",
     "sudo systemctl enable --now nvidia-fabricmanager"),
    ("Error 804|forward compatibility was attempted",
     "a cuda-compat library hides the driver's own: take it off LD_LIBRARY_PATH, or update the driver", ""),
    ("GPU is lost|determine the device handle|fallen off the bus|requires reset",
     "restart the node; if it comes back, the card is broken: leave it out with `devices`",
     "sudo dmesg | grep -i -e xid -e 'fallen off'"),
    ("communicate with the NVIDIA driver|NVML: Driver Not Loaded",
     "load the driver's module, or build it for the running kernel",
     "sudo modprobe nvidia; dkms status"),
    ("No devices were found|No CUDA GPUs are available|no CUDA-capable device",
     "the driver shows no GPU that can be used: enable a part of a GPU with MIG, or pass the GPUs to the container",
     "nvidia-smi -L"),
    ("not compiled with CUDA", "this torch is for CPUs", ""),
    ("no kernel image is available|not compatible with the current PyTorch",
     "this torch is not built for this card: install a newer one", ""),
    ("busy or unavailable", "another process has it alone: end it, or allow several", "sudo nvidia-smi -c DEFAULT"),
    ("out of memory|Failed to allocate memory", "another process fills its memory: end it, or use other devices", ""),
    ("ret is -8005|ret is -8020|because the device is used",
     "another container has its NPUs, or this one did not get /dev/davinci*, /dev/davinci_manager, /dev/devmm_svm and"
     " /dev/hisi_hdc: end that one, or pass them",
     "ls -l /dev/davinci* /dev/devmm_svm /dev/hisi_hdc"),
    ("Failed to verify the OPP|E30006", "CANN's operators are not those of this chip: install its cann-kernels", ""),
    ("lib(gomp|stdc\\+\\+)[^ ]*: cannot open", "install the compiler's libraries",
     "sudo apt-get install libgomp1 libstdc++6"),
    ("lib(ascendcl|hccl|ascend_hal|torch_npu)[^ ]*: cannot open",
     "source CANN's set_env.sh: `setup: {source: /usr/local/Ascend/ascend-toolkit/set_env.sh}` in the inventory", ""),
    ("GLIBC(XX)?_[0-9.]+' not found", "the library is built for a newer system: use an image, or an older release", ""),
    ("could not select device driver|unresolvable CDI devices|unknown or invalid runtime name: nvidia",
     "install the NVIDIA Container Toolkit on the node and set it up for this runtime",
     "sudo nvidia-ctk runtime configure --runtime=docker; sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"),
    ("error gathering device information.*davinci|davinci[^ ]*: no such",
     "the node lacks these devices: install its driver, or correct `devices`", "ls -l /dev/davinci*"),
    ("No space left on device", "make room there, or in /dev/shm", "df -h"),
    ("connect to the docker|dial unix",
     "start the daemon, or give the user access to its socket; podman and apptainer need none", ""),
)  # fmt: skip


def remedy_for(error: str, other: str, fix: str) -> tuple[str, str]:
    """Return what to do about an error, and a command; `other` and `fix` for one that no row knows."""
    for words, remedy, command in ROWS:
        if re.search(words, error):
            return remedy, command or fix
    return other, fix
