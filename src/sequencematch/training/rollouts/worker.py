"""A worker: a copy of the policy that takes weights and makes numbered rollouts. It knows nothing of processes or clusters."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from safetensors.torch import save
from torch import Tensor

from sequencematch.policy import Sampling
from sequencematch.training.replay import Experience, encoded
from sequencematch.training.rollouts.copies import Blueprint, put_together
from sequencematch.training.rollouts.source import Request, make_rollouts
from sequencematch.training.rollouts.weights import unpack


@dataclass(frozen=True)
class Order:
    """A numbered order: the rollouts to make, the number of the weights to make them with, and their version for the record.

    `autocast` is its dtype, if it is on.
    """

    number: int
    request: Request
    weights: int
    version: int
    autocast: torch.dtype | None = None


@dataclass(frozen=True)
class Setup:
    """What a worker begins with, beside the policy's frozen tensors. `precision` is torch's, for float32 matrix products."""

    blueprint: Blueprint
    sampling: Sampling
    device: str
    threads: int
    precision: str


@dataclass(frozen=True)
class Made:
    """The rollouts of an order, flat, and how many this worker has made in all, these included."""

    number: int
    rollouts: bytes
    count: int
    total: int


class Worker:
    """A copy of the policy. What it makes depends on the order and the weights alone."""

    def __init__(self, setup: Setup, frozen: Tensor) -> None:
        """Build the copy; `frozen` is the block of its frozen tensors. The process belongs to this worker alone."""
        torch.set_num_threads(setup.threads)
        torch.set_float32_matmul_precision(setup.precision)
        self.setup, self.device = setup, torch.device(setup.device)
        self.policy, self.trained = put_together(setup.blueprint, frozen, self.device)
        self.weights: int | None = None
        self.total = 0

    def make(self, order: Order, weights: Tensor) -> Made:
        """Make the rollouts of an order, as the policy itself would inline; `weights` is a block of the order's weights."""
        if order.weights != self.weights:
            unpack(weights, self.setup.blueprint.trained, self.trained)
            self.weights = order.weights
        dtype = order.autocast
        with nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype):
            made = make_rollouts(self.policy, order.request, self.setup.sampling)
        self.total += len(made)
        flat = encoded([Experience(trajectory, order.version) for trajectory in made])
        return Made(order.number, save(flat), len(made), self.total)
