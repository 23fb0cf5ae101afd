"""Files of tensors, read and written piece by piece: safetensors, torch's archives, MindSpore's protobuf."""
