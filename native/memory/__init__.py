"""A pool for torch's large buffers on CPUs."""
