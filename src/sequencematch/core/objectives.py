"""The SequenceMatch objective Ĵ term by term (Eq. 4 and the χ²-mixture term), and the baselines of the paper.

Losses take `Scores` (a policy's logits and values of trajectories) or log-probabilities, never a model. Terms are summed
over time: averaging each sequence over its own length is an inconsistent estimator (the paper's footnote in §2.1). A
batch is divided once, by the number of scored data decisions.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sequencematch.core.divergences import CHI2_MIXTURE, Divergence
from sequencematch.core.encoding import Encoding
from sequencematch.core.integral_metrics import IntegralMetric, Points


@dataclass(frozen=True)
class Scores:
    """A policy's scores of a batch of trajectories: ℓ(a_t|s_t) for t < T and V(s_t) = log Σ_a exp ℓ(a|s_t) for t ≤ T   (Eq. 4).

    `length[b]` is T; entries beyond it are padding of any value. `policy_chosen` marks the decisions that the on-policy term
    counts. Half-precision inputs are converted to float32, which discounts and φ need.
    """

    action_logit: Float[Tensor, "batch step"]
    value: Float[Tensor, "batch step+1"]
    length: Int[Tensor, "batch"]
    policy_chosen: Bool[Tensor, "batch step"]

    def __post_init__(self) -> None:
        if self.action_logit.ndim != 2 or 0 in self.action_logit.shape:
            raise ValueError(
                f"`action_logit` must have shape [batch, step], neither of them 0. Got {tuple(self.action_logit.shape)}; "
                f"select trajectories with a slice that holds some."
            )
        batch, steps = self.action_logit.shape
        shapes = {"value": (batch, steps + 1), "length": (batch,), "policy_chosen": (batch, steps)}
        for name, expected in shapes.items():
            if getattr(self, name).shape != expected:
                raise ValueError(
                    f"`{name}` must have shape {expected} beside `action_logit` of shape {(batch, steps)} [batch, step]; "
                    f"`value` has one state more than there are decisions. Got {tuple(getattr(self, name).shape)}."
                )
        if self.length.is_floating_point() or self.policy_chosen.dtype != torch.bool:
            raise ValueError(
                f"`length` must hold integers and `policy_chosen` booleans. "
                f"Got {self.length.dtype} and {self.policy_chosen.dtype}."
            )
        # On a GPU this check would wait for the device.
        if self.length.device.type == "cpu" and not bool(((self.length >= 1) & (self.length <= steps)).all()):
            raise ValueError(
                f"`length` must lie between 1 and the {steps} steps there are. Got {self.length.tolist()}."
            )
        dtype = torch.promote_types(torch.promote_types(self.action_logit.dtype, self.value.dtype), torch.float32)
        object.__setattr__(self, "action_logit", self.action_logit.to(dtype))
        object.__setattr__(self, "value", self.value.to(dtype))

    @classmethod
    def from_logits(
        cls, logits: Float[Tensor, "batch state action"], encoding: Encoding, *, backspace: bool = True
    ) -> "Scores":
        """Scores from dense logits ℓ(·|s_t) of every visit; the last column is that of `<bkspc>`   (Eq. 4).

        With `backspace=False`, V sums over the vocabulary X alone, as `mle_loss` and unlikelihood need it.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        action_logit = logits[:, :-1].gather(2, encoding.chosen[..., None]).squeeze(2)
        value = (logits if backspace else logits[..., :-1]).logsumexp(2)
        return cls(action_logit, value, encoding.length, encoding.policy_chosen)

    def __getitem__(self, rows: slice) -> "Scores":
        """Some of the trajectories, such as the data or the rollouts of a batch that holds both."""
        return Scores(self.action_logit[rows], self.value[rows], self.length[rows], self.policy_chosen[rows])

    @property
    def is_step(self) -> Bool[Tensor, "batch step"]:
        """True for decisions, False for padding."""
        return torch.arange(self.action_logit.shape[1], device=self.length.device) < self.length[:, None]

    @property
    def final_value(self) -> Float[Tensor, "batch"]:
        """V(s_T), the value of the absorbing state."""
        return self.value.gather(1, self.length[:, None]).squeeze(1)

    def log_prob(self) -> Float[Tensor, "batch step"]:
        """log p(a_t|s_t) = ℓ(a_t|s_t) − V(s_t), and 0 for padding   (§4)."""
        return torch.where(self.is_step, self.action_logit - self.value[:, :-1], 0)


@dataclass(frozen=True)
class SequenceMatchLoss:
    """The loss −Ĵ and the terms of Ĵ = A + C − B − D − E − P, each already divided by the batch's denominator   (Eq. 4)."""

    loss: Float[Tensor, ""]
    data_reward: Float[Tensor, ""]  # A
    data_tail: Float[Tensor, ""]  # C
    data_value: Float[Tensor, ""]  # B
    model_value: Float[Tensor, ""]  # D
    model_penalty: Float[Tensor, ""]  # E
    reward_penalty: Float[Tensor, ""]  # P, 0 except for integral metrics


def implied_reward(scores: Scores, gamma: float) -> Float[Tensor, "batch step"]:
    """The reward the logits imply, r_t = ℓ(a_t|s_t) − γ V(s_{t+1}), and 0 for padding   (inverse soft Bellman operator, §3.2.1)."""
    return torch.where(scores.is_step, scores.action_logit - gamma * scores.value[:, 1:], 0)


def data_reward(data: Scores, divergence: Divergence, alpha: float, gamma: float) -> Float[Tensor, "batch"]:
    """A = Σ_t γᵗ (1/α) φ(α r_t)   (Eq. 4, first sum). Per trajectory, summed over time."""
    return (_discount(data, gamma) * divergence(alpha * implied_reward(data, gamma))).sum(1) / alpha


def data_tail(data: Scores, divergence: Divergence, alpha: float, gamma: float) -> Float[Tensor, "batch"]:
    """C = γᵀ/(α(1−γ)) φ(α(1−γ) V(s_T)): A's sum over the infinite stay in the absorbing state   (Eq. 4, last bracket)."""
    reward = (1 - gamma) * data.final_value
    return _final_discount(data, gamma) * divergence(alpha * reward) / (alpha * (1 - gamma))


def value_difference(scores: Scores, gamma: float) -> Float[Tensor, "batch"]:
    """B on data and D on rollouts: ½ Σ_t γᵗ [V(s_t) − γ V(s_{t+1})] + ½ γᵀ V(s_T)   (Eq. 4, value sums and last bracket).

    It telescopes to ½ V(s₀) whatever was executed; the code writes the sum as the paper prints it.
    """
    difference = torch.where(scores.is_step, scores.value[:, :-1] - gamma * scores.value[:, 1:], 0)
    return (
        0.5 * (_discount(scores, gamma) * difference).sum(1) + 0.5 * _final_discount(scores, gamma) * scores.final_value
    )


def model_penalty(model: Scores, divergence: Divergence, alpha: float, gamma: float) -> Float[Tensor, "batch"]:
    """E = α c(1−β) [Σ_{t policy-chosen} γᵗ r_t² + γᴹ/(1−γ) ((1−γ) V(u_M))²]   (§4).

    The χ²-mixture's regulariser on the policy's own rewards; c(1−β) is `divergence.on_policy`, 0 for other divergences.
    """
    if not divergence.on_policy:
        return torch.zeros_like(model.final_value)
    reward = torch.where(model.policy_chosen, implied_reward(model, gamma), 0)
    steps = (_discount(model, gamma) * reward**2).sum(1)
    tail = _final_discount(model, gamma) / (1 - gamma) * ((1 - gamma) * model.final_value) ** 2
    return alpha * divergence.on_policy * (steps + tail)


def sequencematch_loss(
    data: Scores,
    model: Scores | None,
    *,
    divergence: Divergence = CHI2_MIXTURE,
    alpha: float,
    gamma: float,
    num_items: float | Tensor | None = None,
    model_weight: float | Tensor | None = None,
    model_value_from_data: bool = False,
    points: Points | None = None,
) -> SequenceMatchLoss:
    """−Ĵ with Ĵ = [Σ_data (A + C − B) − w Σ_model (D + E) − n P] / N   (Eq. 4).

    N = `num_items` is the number of scored data decisions in the whole optimisation step, and w = `model_weight` the number
    of its data trajectories divided by the number of its rollouts. Both default to this batch's values; pass them if a step
    spans several batches or devices. `model=None` assumes that rollouts start from the same states as data. Then D = B, and a
    divergence without an on-policy term needs no rollouts.

    With `model_value_from_data=True` only E is taken from rollouts: Ĵ = [Σ_data (A + C − B − D) − w Σ_model E] / N, where D = B.
    D telescopes to ½ V(u₀) whatever the policy does, so it is known for the data's prompts without a rollout from them. Where
    rollouts start from other prompts, or the model can tell them from the data's, D on rollouts pulls V apart: the best constant
    shift of V is −1/(α(1−γ)) on rollouts and 1/(α(1−γ)) on data, 50,000 at α = 0.01 and γ = 0.998.

    P = (1/α) ψ(α r) is for integral metrics (§3.2), which need `points` to read r at. It belongs to the expectation over
    trajectories, so it counts once for each of the n data trajectories of this batch.
    """
    check_gamma(gamma)
    if not isinstance(divergence, Divergence):
        raise ValueError(f"`divergence` must be a Divergence, such as DIVERGENCES['chi2_mixture']. Got {divergence!r}.")
    check_alpha(alpha)
    if model is None and divergence.on_policy:
        raise ValueError(
            f"`model` must hold rollouts for {divergence.name}, which penalises the policy's own rewards. Got None."
        )
    if model is None and model_weight is not None:
        raise ValueError(
            f"`model_weight` would be ignored: without rollouts D = B. Got model_weight={model_weight}, model=None."
        )
    if model is None and model_value_from_data:
        raise ValueError("`model_value_from_data` would be ignored: without rollouts D = B. Got True, model=None.")
    is_integral = isinstance(divergence, IntegralMetric)
    if is_integral and points is None:
        raise ValueError(
            f"`points` must be given for {divergence.name}, which reads the reward at points. Got None; see `core.Points`."
        )
    if points is not None and not is_integral:
        raise ValueError(
            f"`points` would be ignored: {divergence.name} is an f-divergence. Leave them out, or use one of INTEGRAL_METRICS."
        )
    num_items = _denominator(data, num_items)
    if model_weight is None:
        model_weight = 1.0 if model is None else len(data.length) / len(model.length)

    rollouts = data if model is None else model
    a = data_reward(data, divergence, alpha, gamma).sum() / num_items
    c = data_tail(data, divergence, alpha, gamma).sum() / num_items
    b = value_difference(data, gamma).sum() / num_items
    d = b if model_value_from_data else model_weight * value_difference(rollouts, gamma).sum() / num_items
    e = model_weight * model_penalty(rollouts, divergence, alpha, gamma).sum() / num_items
    gain, p = a + c - b - d - e, torch.zeros_like(a)
    if isinstance(divergence, IntegralMetric) and points is not None:
        p = len(data.length) * divergence.penalty(points, alpha) / num_items
        gain = gain - p
    return SequenceMatchLoss(
        loss=-gain, data_reward=a, data_tail=c, data_value=b, model_value=d, model_penalty=e, reward_penalty=p
    )


def bc_loss(data: Scores, *, num_items: float | Tensor | None = None) -> Float[Tensor, ""]:
    """Behavioural cloning on noised data, L_BC = −(1/N) Σ_t [ℓ(a_t|s_t) − V(s_t)]   (§6.1, App. E). Not discounted."""
    return -data.log_prob().sum() / _denominator(data, num_items)


def mle_loss(data: Scores, *, num_items: float | Tensor | None = None) -> Float[Tensor, ""]:
    """Maximum likelihood, L_MLE = −(1/N) Σ_i [ℓ(x_i|x_<i) − V(x_<i)]   (§4).

    The same formula as `bc_loss`. The caller passes trajectories without noise, with V over the vocabulary X instead of all
    actions: `Scores.from_logits(…, backspace=False)`.
    """
    return bc_loss(data, num_items=num_items)


def repeat_candidates(encoding: Encoding) -> Bool[Tensor, "batch step node"]:
    """C^t = {x_1, …, x_{t−1}} \\ {x_t}: the tokens to make unlikely at step t   (App. H.1; Welleck et al. 2020).

    True at [b, t, j] if `encoding.tokens[b, j]` is such a token. A repeated token is a candidate once, at its first place.
    `encoding` must hold one trajectory per row, without deletions.
    """
    tokens, target = encoding.tokens, encoding.chosen
    width = tokens.shape[1]
    visit = encoding.visit[:, :-1] % width
    node = torch.arange(width, device=tokens.device)
    if len(tokens) != len(target) or bool(
        (encoding.position_ids.flatten()[encoding.visit] != encoding.visit % width).any()
    ):
        raise ValueError("`encoding` must hold one trajectory a row, without deletions. Got packed rows, or a <bkspc>.")
    is_step = torch.arange(target.shape[1], device=tokens.device) < encoding.length[:, None]
    seen_before = (tokens[:, :, None] == tokens[:, None, :]).tril(-1).any(-1)
    in_context = (node <= visit[..., None]) & is_step[..., None]
    return in_context & (tokens[:, None, :] != target[..., None]) & ~seen_before[:, None, :]


def repeated_ngrams(
    tokens: Int[Tensor, "batch step"], length: Int[Tensor, "batch"], n: int = 4
) -> Bool[Tensor, "batch step"]:
    """True where x_t belongs to an n-gram of which a complete copy ends before it begins   (App. H.1; Welleck et al. 2020)."""
    if n < 1:
        raise ValueError(f"`n` must be at least 1: it is the length of an n-gram. Got n={n}.")
    batch, steps = tokens.shape
    if steps < n:
        return torch.zeros_like(tokens, dtype=torch.bool)
    start = torch.arange(steps - n + 1, device=tokens.device).expand(batch, -1)
    owner = torch.arange(batch, device=tokens.device)[:, None, None].expand(-1, start.shape[1], 1)
    ngrams = torch.cat([owner, tokens.unfold(1, n, 1)], dim=2)
    _, kind = torch.unique(ngrams.flatten(0, 1), dim=0, return_inverse=True)
    first = torch.full_like(kind, steps).scatter_reduce(0, kind, start.flatten(), "amin")[kind].view_as(start)
    repeats = (first <= start - n) & (start + n <= length[:, None])
    return torch.stack([torch.nn.functional.pad(repeats, (k, n - 1 - k)) for k in range(n)]).any(0)


def unlikelihood_loss(
    candidate_log_prob: Float[Tensor, "batch step candidate"],
    is_candidate: Bool[Tensor, "batch step candidate"],
    *,
    num_items: float | Tensor,
) -> Float[Tensor, ""]:
    """Token-level unlikelihood, −(1/N) Σ_t Σ_{c ∈ C^t} log(1 − p(c|s_t))   (App. H.1; Welleck et al. 2020)."""
    if candidate_log_prob.shape != is_candidate.shape:
        raise ValueError(
            f"`is_candidate` must have the shape of `candidate_log_prob`, {tuple(candidate_log_prob.shape)}. "
            f"Got {tuple(is_candidate.shape)}."
        )
    return _log_unlikely(candidate_log_prob, is_candidate).sum() / num_items


def sequence_unlikelihood_loss(
    model: Scores, is_repeat: Bool[Tensor, "batch step"], *, num_items: float | Tensor | None = None
) -> Float[Tensor, ""]:
    """Sequence-level unlikelihood on rollouts, −(1/N) Σ_{t repeats} log(1 − p(x_t|s_t))   (App. H.1; Welleck et al. 2020).

    N defaults to the number of decisions of the rollouts, since no data takes part.
    """
    loss = _log_unlikely(model.log_prob(), is_repeat & model.is_step).sum()
    return loss / _denominator(model, num_items)


def check_gamma(gamma: float) -> None:
    """Refuse a discount γ for which Eq. 4 is undefined."""
    if not 0 < gamma < 1:
        raise ValueError(
            f"`gamma` must lie strictly between 0 and 1: the <eos> term of Eq. 4 divides by 1 - gamma. "
            f"Got gamma={gamma}. The paper uses 0.998 for text."
        )


def check_alpha(alpha: float) -> None:
    """Refuse an entropy weight α for which Eq. 4 is undefined."""
    if not 0 < alpha < math.inf:
        raise ValueError(
            f"`alpha` must be positive and finite: Eq. 4 divides by it. Got alpha={alpha}. The paper uses 0.01 for text; "
            f"the limit of alpha → 0 is a discounted `bc_loss`."
        )


def _denominator(scores: Scores, num_items: float | Tensor | None) -> float | Tensor:
    """N: `num_items` if given, else the number of decisions in this batch."""
    if num_items is None:
        return scores.length.sum()
    if isinstance(num_items, int | float) and not num_items > 0:
        raise ValueError(f"`num_items` must be positive: it is the number of scored decisions. Got {num_items}.")
    return num_items


def _log_unlikely(log_prob: Float[Tensor, "*shape"], counts: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """−log(1 − p) where `counts`, else 0. Where p rounds to 1 the term is clamped to −log ε and has no gradient."""
    log_prob = torch.where(counts, log_prob, -1.0).to(torch.promote_types(log_prob.dtype, torch.float32))
    unlikely = (-torch.expm1(log_prob)).clamp(min=torch.finfo(log_prob.dtype).eps)
    return torch.where(counts, -unlikely.log(), 0)


def _discount(scores: Scores, gamma: float) -> Float[Tensor, "step"]:
    """γᵗ for t = 0, 1, …"""
    return _power(gamma, torch.arange(scores.action_logit.shape[1], device=scores.value.device), scores.value.dtype)


def _final_discount(scores: Scores, gamma: float) -> Float[Tensor, "batch"]:
    """γᵀ, the discount of the absorbing state."""
    return _power(gamma, scores.length, scores.value.dtype)


def _power(gamma: float, exponent: Int[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """γ^exponent as exp(exponent · log γ): rounding γ itself to float32 would be off by 3e-5 after a thousand steps."""
    return torch.exp(exponent.to(dtype) * math.log(gamma))
