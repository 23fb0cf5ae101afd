"""Parameter groups, and AdamW whose state may be divided among the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as functional_adamw

from trainer.config_parts import OptimizerConfig
from trainer.group import Group

MOMENTS = ("exp_avg", "exp_avg_sq")
FUSED_ON = ("cpu", "cuda")  # devices that have torch's fused kernel


def decay_of(parameter: nn.Parameter, config: OptimizerConfig) -> float:
    """Matrices decay; biases and layer norms do not."""
    return config.weight_decay if parameter.dim() >= 2 else 0.0


def adamw(parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """torch's own object, for engines that want one; fused, which runs at the speed of memory."""
    decays = dict.fromkeys(decay_of(parameter, config) for parameter in parameters.values())
    groups = [
        {"params": [p for p in parameters.values() if decay_of(p, config) == decay], "weight_decay": decay}
        for decay in decays
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def owners(parameters: Mapping[str, nn.Parameter], world: int) -> dict[str, int]:
    """The rank that updates each parameter: largest first, each to the rank with the least so far.

    Whole parameters keep the state's names and shapes, so a checkpoint loads on any number of ranks; the
    price is that one rank holds the whole token table.
    """
    load = [0] * world
    owner = {}
    for name in sorted(parameters, key=lambda name: (-parameters[name].numel(), name)):
        owner[name] = load.index(min(load))
        load[owner[name]] += parameters[name].numel()
    return owner


class ShardedAdamW:
    """AdamW over named parameters. With `zero` 1 each rank updates those it owns and sends them around.

    It calls torch's fused kernel by itself: the first torch.optim object of a process loads torch's compiler,
    1.5 s of every rank's start.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, group: Group, zero: int
    ) -> None:
        self.parameters = dict(parameters)
        self.config = config
        self.group = group
        self.owner = owners(self.parameters, group.world) if zero >= 1 and group.world > 1 else None
        self.mine = {name: parameter for name, parameter in self.parameters.items() if self._is_mine(name)}
        self.moments = {
            f"{moment}.{name}": torch.zeros_like(parameter)
            for name, parameter in self.mine.items()
            for moment in MOMENTS
        }
        self.taken = 0

    def _is_mine(self, name: str) -> bool:
        return self.owner is None or self.owner[name] == self.group.rank

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update from the gradients; every rank has all new values afterwards."""
        for decay in dict.fromkeys(decay_of(parameter, self.config) for parameter in self.mine.values()):
            self._update([n for n, p in self.mine.items() if decay_of(p, self.config) == decay], rate, decay)
        self.taken += 1
        if self.owner is not None:
            self._exchange(self.owner)

    def _update(self, names: Sequence[str], rate: float, decay: float) -> None:
        parameters: list[Tensor] = [self.mine[name] for name in names]
        # The kernel divides by the corrections of the step that is being taken, hence one more than were taken.
        steps = [torch.tensor(self.taken + 1.0, device=parameter.device) for parameter in parameters]
        kernel = torch._fused_adamw_ if parameters[0].device.type in FUSED_ON else functional_adamw
        kernel(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [self.moments[f"exp_avg.{name}"] for name in names],
            [self.moments[f"exp_avg_sq.{name}"] for name in names],
            [],  # amsgrad's maxima
            steps,
            amsgrad=False,
            lr=rate,
            beta1=self.config.betas[0],
            beta2=self.config.betas[1],
            weight_decay=decay,
            eps=self.config.eps,
            maximize=False,
        )

    def _exchange(self, owner: Mapping[str, int]) -> None:
        """Every rank sends its parameters in one piece: 50 small ones would cost 0.3 ms each on gloo."""
        for rank in range(self.group.world):
            sent = [parameter for name, parameter in self.parameters.items() if owner[name] == rank]
            if not sent:
                continue
            flat = torch.cat([parameter.flatten() for parameter in sent])
            self.group.broadcast([flat], rank)
            if rank != self.group.rank:
                parts = flat.split([parameter.numel() for parameter in sent])
                for parameter, part in zip(sent, parts, strict=True):
                    parameter.copy_(part.view_as(parameter))

    def state(self) -> tuple[dict[str, Tensor], int]:
        """`exp_avg.<name>` and `exp_avg_sq.<name>`, whole on rank 0 (not elsewhere), and the steps taken."""
        whole = {}
        for name, parameter in self.parameters.items():
            for moment in MOMENTS:
                own = self.moments.get(f"{moment}.{name}")
                tensor = torch.zeros_like(parameter, requires_grad=False) if own is None else own
                if self.owner is not None:
                    self.group.bring_to_zero(tensor, self.owner[name])
                whole[f"{moment}.{name}"] = tensor
        return whole, self.taken
