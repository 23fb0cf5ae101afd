"""Files of tensors, read and written in pieces: safetensors, torch's archives, MindSpore's protobuf."""
