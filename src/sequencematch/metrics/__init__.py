"""Metrics of generations. Each gives a `Measure`: a number, its interval, and a signature that says how it was computed."""

from sequencematch.metrics.accuracy import accuracy
from sequencematch.metrics.backspaces import backspace_rate
from sequencematch.metrics.bleu import bleu
from sequencematch.metrics.bootstrap import interval, interval_of_mean, interval_of_ratio
from sequencematch.metrics.cost import cost
from sequencematch.metrics.encoders import Encoder, hub_model, minilm
from sequencematch.metrics.mauve import mauve
from sequencematch.metrics.measure import Measure, signature
from sequencematch.metrics.own_errors import own_errors
from sequencematch.metrics.perplexity import perplexity
from sequencematch.metrics.recovery import append_mistake, recovery
from sequencematch.metrics.repetition import diversity, ngram_entropy, rep_n
from sequencematch.metrics.words import known_words, unknown_words

__all__ = [
    "Encoder",
    "Measure",
    "accuracy",
    "append_mistake",
    "backspace_rate",
    "bleu",
    "cost",
    "diversity",
    "hub_model",
    "interval",
    "interval_of_mean",
    "interval_of_ratio",
    "known_words",
    "mauve",
    "minilm",
    "ngram_entropy",
    "own_errors",
    "perplexity",
    "recovery",
    "rep_n",
    "signature",
    "unknown_words",
]
