"""Steps of differential equations (``torchdiffeq``) and Gaussian processes (``gpytorch``)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from memfix.meters.base import Step, StepBuilder

from .training import train


class Flow(nn.Module):
    """The right-hand side of a neural differential equation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 128), nn.Tanh(), nn.Linear(128, width))

    def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.net(y)


def solved(solver: str, device: str, **options: Any) -> Step:
    """Build a step that fits a trajectory by ``odeint`` or ``odeint_adjoint``, which solves an ODE in backward."""
    import torchdiffeq

    batch = {"start": torch.randn(512, 8), "times": torch.linspace(0, 1, 4), "goal": torch.randn(4, 512, 8)}

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        path = getattr(torchdiffeq, solver)(model, batch["start"], batch["times"], **options)
        return (path - batch["goal"]).abs().mean()

    return train(Flow(8), batch, device, loss_of=loss_of)


def exact_process(device: str) -> Step:
    import gpytorch

    class Exact(gpytorch.models.ExactGP):
        def __init__(self, x: torch.Tensor, y: torch.Tensor, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    x = torch.linspace(0, 1, 300).to(device)
    y = torch.sin(6 * x)
    model = Exact(x, y, gpytorch.likelihoods.GaussianLikelihood())
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    return train(model, {}, device, loss_of=lambda model, _: -objective(model(x), y) + 10)


def variational_process(device: str) -> Step:
    import gpytorch

    class Variational(gpytorch.models.ApproximateGP):
        def __init__(self, points: torch.Tensor) -> None:
            distribution = gpytorch.variational.CholeskyVariationalDistribution(len(points))
            super().__init__(gpytorch.variational.VariationalStrategy(self, points, distribution))
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel())

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    model = nn.ModuleList([Variational(torch.rand(64, 4)), gpytorch.likelihoods.GaussianLikelihood()])
    objective = gpytorch.mlls.VariationalELBO(model[1], model[0], num_data=2000)
    batch = {"x": torch.rand(500, 4), "y": torch.randn(500)}
    return train(model, batch, device, loss_of=lambda model, batch: 100 - objective(model[0](batch["x"]), batch["y"]))


STEPS: dict[str, tuple[str, StepBuilder]] = {
    "torchdiffeq, Runge-Kutta": ("torchdiffeq", partial(solved, "odeint", method="rk4")),
    "torchdiffeq, adaptive": ("torchdiffeq", partial(solved, "odeint", rtol=1e-3, atol=1e-3)),
    "torchdiffeq, adjoint": ("torchdiffeq", partial(solved, "odeint_adjoint", method="rk4")),
    "torchdiffeq, adjoint, adaptive": ("torchdiffeq", partial(solved, "odeint_adjoint", rtol=1e-3, atol=1e-3)),
    "gpytorch, exact process": ("gpytorch", exact_process),
    "gpytorch, variational process": ("gpytorch", variational_process),
}
