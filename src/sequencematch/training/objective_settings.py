"""The settings that say what is optimised: the objective, and the divergence, weights and discount of Eq. 4."""

from dataclasses import dataclass, field

from sequencematch.core.divergences import DIVERGENCES
from sequencematch.core.integral_metrics import INTEGRAL_METRICS, IntegralMetric
from sequencematch.core.objectives import check_alpha, check_gamma
from sequencematch.data.spelling import check_choice
from sequencematch.training.divergences import find_divergence
from sequencematch.training.losses import OBJECTIVES, Objective

#: Sources of D of Eq. 4.
MODEL_VALUES = ("data", "rollouts")


@dataclass
class ObjectiveSettings:
    """What is optimised   (Eq. 4, §6)."""

    objective: str = field(
        default="sequencematch",
        metadata={
            "help": "sequencematch, bc, mle or unlikelihood. mle and unlikelihood leave <bkspc> out (§6.1, §6.2)."
        },
    )
    divergence: str = field(
        default="chi2_mixture",
        metadata={
            "help": f"The φ of Eq. 4: {', '.join(DIVERGENCES)}. Paper: chi2_mixture (§4, App. D). Or an integral metric: "
            f"{', '.join(INTEGRAL_METRICS)} (§3.2). Or your own: file.py:VALUE."
        },
    )
    alpha: float = field(
        default=0.01, metadata={"help": "Weight α of the entropy in Eq. 4. Paper: 0.01 for text (§6.2)."}
    )
    gamma: float = field(
        default=0.998, metadata={"help": "Discount γ, strictly between 0 and 1. Paper: 0.998 for text (§6.2)."}
    )
    mixture_weight: float = field(
        default=0.5, metadata={"help": "Share β of data in the χ²-mixture. Paper: 0.5 (App. D.4)."}
    )
    model_value_from: str = field(
        default="data",
        metadata={
            "help": "Source of D in Eq. 4, the value sum of rollouts, which is ½ V(u₀) whatever they do: data (D = B) or rollouts. "
            "Both have the same mean, but a model that memorises prompts can lower V on rollouts alone. Paper: rollouts (Eq. 4)."
        },
    )
    lipschitz_weight: float = field(
        default=10.0,
        metadata={"help": "Price of a reward that is not 1-Lipschitz, with divergence wasserstein (§3.2)."},
    )

    def _check_objective(self) -> None:
        """Refuse settings that can't work or would be ignored, and find the divergence."""
        check_choice("objective", self.objective, OBJECTIVES)
        check_alpha(self.alpha)
        check_gamma(self.gamma)
        self.divergence_value = find_divergence(self.divergence, self.mixture_weight, self.lipschitz_weight)
        if self.mixture_weight != 0.5 and self.divergence != "chi2_mixture":
            raise ValueError(
                f"`mixture_weight` would be ignored: it belongs to chi2_mixture. Got divergence {self.divergence!r}."
            )
        if self.lipschitz_weight != 10 and self.divergence != "wasserstein":
            raise ValueError(
                f"`lipschitz_weight` would be ignored: it belongs to wasserstein. Got divergence {self.divergence!r}."
            )
        check_choice("model_value_from", self.model_value_from, MODEL_VALUES)
        if self.model_value_from != "data" and not self.needs_rollouts:
            raise ValueError(
                f"`model_value_from` would be ignored: objective {self.objective!r} with divergence {self.divergence!r} makes no "
                f"rollouts. Got {self.model_value_from!r}; leave it out."
            )

    @property
    def objective_value(self) -> Objective:
        """The objective of that name."""
        return OBJECTIVES[self.objective]

    @property
    def needs_rollouts(self) -> bool:
        """Whether the loss needs rollouts: without an on-policy term their value sum telescopes   (§3.2.1).

        An integral metric reads the reward at the policy's own transitions, too.
        """
        reads_rollouts = self.divergence_value.on_policy > 0 or self.integral_metric is not None
        return self.objective_value.rolls_out and reads_rollouts

    @property
    def integral_metric(self) -> IntegralMetric | None:
        """The divergence if the objective uses it and it is an integral metric, else None   (§3.2)."""
        metric = self.divergence_value
        return metric if isinstance(metric, IntegralMetric) and self.objective_value.rolls_out else None
