"""The same on a GPU as on a CPU: nothing in core names a device."""

import pytest
import torch

from sequencematch.core.encoding import encode
from sequencematch.core.mdp import Trajectory
from sequencematch.core.objectives import Scores, sequencematch_loss
from tests.strategies import BK, SPACE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def random_batch() -> list[Trajectory]:
    generator = torch.Generator().manual_seed(0)
    actions = torch.randint(0, 4, (24, 200), generator=generator)
    actions[torch.rand(24, 200, generator=generator) < 0.4] = BK
    prompts = [(4, 0, 1), (4, 2, 3, 3)]
    return [
        Trajectory.rollout(SPACE, prompts[b % 2], (*row[: 20 + 7 * b], SPACE.eos))
        for b, row in enumerate(actions.tolist())
    ]


@pytest.mark.parametrize("layout", ["tree", "paper"])
def test_encodings_and_losses_are_those_of_the_cpu(layout: str) -> None:
    batch = random_batch()
    options = {"layout": layout, "row_length": 600, "share_prompts": True}
    cpu, gpu = encode(batch, **options), encode(batch, **options, device="cuda")  # type: ignore[arg-type]
    for name, tensor in vars(gpu).items():
        assert tensor.device.type == "cuda"
        assert torch.equal(tensor.cpu(), getattr(cpu, name)), name
    logits = torch.randn(
        cpu.tokens.numel(), SPACE.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    losses = []
    for encoding in (cpu, gpu):
        scores = Scores.from_logits(logits.to(encoding.visit.device)[encoding.visit], encoding)
        losses.append(sequencematch_loss(scores[:12], scores[12:], alpha=0.1, gamma=0.99).loss.cpu())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=1e-12)  # float64, summed in another order
