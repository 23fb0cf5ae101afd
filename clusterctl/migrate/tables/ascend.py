"""Options of the two ModelZoo scripts, which choose one of several trainings."""

from __future__ import annotations

OPTIONS = """
--data_path | text | @data
--model_size | text | @model_size
--train_iters --train-iters | int | train.steps
--fp16 | flag | train.precision=fp16
--train_micro_batch_size_per_gpu | int | train.micro_batch
--lr | float | train.optimizer.lr
--stage | int | train.zero
--seed | int | train.seed
"""
GLM = """
--data_path | text | @data_folder
"""
PROGRAMS = ("train_full_8p.sh", "train_performance_8p.sh")
GLM_PROGRAMS = (
    "train_pretrain_full_16p.sh",
    "train_pretrain_performance_16p.sh",
    "train_finetune_full_8p.sh",
)
_COMMON = {
    "train.steps": 500_000,
    "train.precision": "fp16",
    "train.optimizer.weight_decay": 0.01,
    "train.optimizer.warmup": "1%",
    "train.optimizer.decay": "320000 steps",
    "train.data.split": "949,50,1",
    "train.hardware.chip": "910A",
    "train.loss_scale.initial": 4096,
    "train.loss_scale.window": 500,
    "train.save.every": 1000,
    "devices": "[0,8)",
}


def _size(
    model: str, lr: float, micro: int, batch: int, tensor: int = 2, **more: object
) -> dict[str, object]:
    shape = {"train.model": model, "train.micro_batch": micro, "train.global_batch": batch}
    rates = {"train.optimizer.lr": lr, "train.optimizer.min_lr": lr / 10}
    layout = {"train.parallel.tensor": tensor, "train.parallel.pipeline": 2, "train.recompute": "full"}
    return {**_COMMON, **shape, **rates, **layout, **more}


_PLAIN: dict[str, object] = {
    **{key: value for key, value in _COMMON.items() if not key.startswith("train.loss_scale")},
    "train.model": "gpt2-345M",
    "train.micro_batch": 8,
    "train.global_batch": 64,
    "train.optimizer.lr": 1.5e-4,
    "train.optimizer.min_lr": 1e-5,
    "train.loss_scale": 65536,
}
# The trainings behind `--model_size`.
MODEL_SIZES: dict[str, dict[str, object]] = {
    "345M": _size("gpt2-345M", 1.5e-4, 4, 16, 1),
    "1.3B": _size("gpt2-1.3B", 2e-4, 8, 32),
    "2.7B": _size("gpt2-2.7B", 1.6e-4, 8, 32),
    "3.7B": _size("gpt2-3.7B", 1.2e-4, 4, 16),
    "345M_without_mp": _PLAIN,
}
GLM_PRETRAIN: dict[str, object] = {
    "train.model.name": "glm-10B",
    "train.model.attention_dropout": 0.1,
    "train.steps": 5000,
    "train.micro_batch": 12,
    "train.global_batch": 192,
    "train.zero": 2,
    "train.recompute": "full",
    "train.precision": "bf16",
    "train.hardware.chip": "910B",
    "train.optimizer.lr": 3e-6,
    "train.optimizer.min_lr": 3e-7,
    "train.optimizer.warmup": "4%",
    "devices": "[0,8)",
}
GLM_FINETUNE: dict[str, object] = {
    "train.model.name": "glm-10B",
    "train.model.sequence": 256,
    "train.model.positions": 1024,
    "train.init": "{data}/glm-10b",
    "train.tune.task": "copa",
    "train.tune.epochs": 100,
    "train.micro_batch": 4,
    "train.global_batch": 64,
    "train.zero": 2,
    "train.offload": True,
    "train.precision": "fp16",
    "train.hardware.chip": "910B",
    "train.optimizer.lr": 5e-6,
    "train.optimizer.schedule": "linear",
    "train.optimizer.weight_decay": 0.01,
    "train.optimizer.warmup": "10%",
    "devices": "[0,8)",
}
TITLE = "the ModelZoo script"
