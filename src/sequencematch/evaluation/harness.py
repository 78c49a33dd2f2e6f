"""A policy as a model of lm-eval, EleutherAI's evaluation harness, so that it runs on standard benchmarks.

Generation obeys deletions: the answer is the final text, up to the first stop string. Log-likelihoods leave `<bkspc>` out of the
actions unless `include_bkspc` is set: see `metrics.perplexity`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from sequencematch.core import Trajectory, encode
from sequencematch.evaluation.cases import Case, answer
from sequencematch.policy import Policy, Sampling
from sequencematch.policy.threads import limit_threads

#: States whose logits are held at a time.
STATES = 256
#: Options of a request that say nothing else than others do.
_REDUNDANT = frozenset({"do_sample"})
_SAMPLING = frozenset(field.name for field in fields(Sampling)) - {"logits_processor", "stop_tokens", "max_new_tokens"}
#: A prompt's tokens, its continuation's, and the texts of both if results are cached.
Scored = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("sequencematch")
class PolicyLM(TemplateLM):
    """`--model sequencematch`. Any field of `Sampling` may be given in `--model_args`, such as `search=True`."""

    def __init__(
        self,
        pretrained: str | Policy,
        *,
        batch_size: int | str = 64,
        max_batch_size: int | None = None,  # noqa: ARG002  # of "auto", in other models
        device: str | None = None,
        dtype: str = "auto",
        trust_remote_code: bool = False,
        include_bkspc: bool = False,
        max_gen_toks: int | None = None,
        max_length: int | None = None,
        **sampling: Any,
    ) -> None:
        """Load a policy by its name or folder.

        `max_length` limits prompt and answer together; longer prompts lose their beginning. Answers have at most `max_gen_toks`
        tokens where a task doesn't say, by default 256 or half of `max_length`.
        """
        super().__init__()
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            device = "cpu"  # lm-eval's default is cuda, on any machine
        options: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
        self.policy = pretrained if isinstance(pretrained, Policy) else Policy.from_pretrained(pretrained, **options)
        if self.policy.tokenizer is None:
            raise ValueError("`pretrained` must have a tokenizer: lm-eval gives texts. Got a policy without one.")
        _check_sampling(sampling, "--model_args")
        self.tokenizer, self.sampling, self.include_bkspc = self.policy.tokenizer, sampling, include_bkspc
        self.batch_size = 64 if str(batch_size).startswith("auto") else int(batch_size)
        self.max_length = min(max_length or self.policy.max_positions, self.policy.max_positions)
        self.max_gen_toks = max_gen_toks or min(256, self.max_length // 2)
        self._device = self.policy.device

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.policy.space.eos

    @property
    def prefix_token_id(self) -> int:
        """The state before the first token of a text: `<bos>`, or `<eos>` for models without one."""
        return self.eot_token_id if self.policy.space.bos is None else self.policy.space.bos

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokens of a text, with `<bos>` where the tokenizer adds one and the text has none yet."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as a prompt."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The final texts after the prompts; empty where a policy has deleted into its prompt and not written it again."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        found: dict[int, str] = {}
        for numbers in groups.values():
            contexts, options = [requests[number].args[0] for number in numbers], requests[numbers[0]].args[1]
            texts = self._generate(contexts, options, progress=not disable_tqdm)
            for number, text in zip(numbers, texts, strict=True):
                found[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return [found[number] for number in range(len(requests))]

    def _generate(self, contexts: Sequence[str], options: Mapping[str, Any], *, progress: bool) -> list[str]:
        wanted = normalize_gen_kwargs(dict(options), self.max_gen_toks)
        until, longest = [stop for stop in wanted.pop("until", ()) if stop], wanted.pop("max_gen_toks")
        given = {name: value for name, value in wanted.items() if name not in _REDUNDANT}
        if not given.get("temperature"):  # tasks decode greedily unless they say otherwise; so may --model_args
            given.pop("temperature", None)
        _check_sampling(given, "--gen_kwargs")
        room = self.max_length - longest - 1  # for <eos>
        if room < 1:
            raise ValueError(f"`max_gen_toks` must leave room for a prompt in {self.max_length} tokens. Got {longest}.")
        prompts = [self.tok_encode(context)[-room:] or [self.prefix_token_id] for context in contexts]
        values = {**self.sampling, **given}
        values.setdefault("seed", None if values.get("temperature", 0) == 0 else 0)
        stop = _stop_at(self.policy, prompts, until) if until else None
        with limit_threads(self.policy):
            result = self.policy.generate(
                prompts,
                batch_size=self.batch_size,
                progress=progress,
                max_new_tokens=longest,
                logits_processor=stop,
                **{"temperature": 0.0, **values},
            )
        cases = (Case({}, tuple(prompt), (), is_text=False) for prompt in prompts)
        pairs = zip(cases, result.trajectories, strict=True)
        return [before(answer(self.policy, case, trajectory) or "", until) for case, trajectory in pairs]

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """log p of each continuation, and whether each of its tokens is the likeliest action."""
        fitting = [
            (texts, context[-max(1, self.max_length - len(continuation) + 1) :], continuation)
            for texts, context, continuation in requests
        ]
        order = sorted(range(len(fitting)), key=lambda number: len(fitting[number][1]) + len(fitting[number][2]))
        found: dict[int, tuple[float, bool]] = {}
        bar = tqdm(total=len(order), disable=disable_tqdm, desc="log-likelihoods")
        with bar, torch.no_grad(), limit_threads(self.policy), self.policy.for_scoring():
            for first in range(0, len(order), self.batch_size):
                numbers = order[first : first + self.batch_size]
                scores = self._scores([fitting[number][1:] for number in numbers])
                for number, score in zip(numbers, scores, strict=True):
                    found[number] = score
                    if fitting[number][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", fitting[number][0], score)
                bar.update(len(numbers))
        return [found[number] for number in range(len(requests))]

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[float, bool]]:
        """For one batch: prompts and continuations as demonstrations whose last token is scored, but not pushed."""
        whole = [Trajectory.demonstration(self.policy.space, *pair) for pair in pairs]
        trajectories = [trajectory.truncate(trajectory.num_nodes - 1) for trajectory in whole]
        encoding = encode(trajectories, device=self.policy.device)
        hidden = self.policy.encoded_hidden_states(encoding, encoding.visit[:, :-1])
        actions = self.policy.space.size if self.include_bkspc else self.policy.space.vocab_size
        for states, (_, continuation) in zip(hidden, pairs, strict=True):
            chosen = torch.tensor(continuation, device=states.device)
            total, is_greedy = 0.0, True
            for part, tokens in zip(states[: len(chosen)].split(STATES), chosen.split(STATES), strict=True):
                log_probs: Tensor = self.policy.action_logits(part)[:, :actions].float().log_softmax(-1)
                total += float(log_probs.gather(1, tokens[:, None]).double().sum())
                is_greedy = is_greedy and bool((log_probs.argmax(-1) == tokens).all())
            yield total, is_greedy

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts; those longer than `max_length` in windows that predict each token once."""
        windows: list[Scored] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            for pair in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                context, continuation = make_disjoint_window(pair)
                windows.append((None, context, continuation))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals


def before(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def _stop_at(policy: Policy, prompts: Sequence[Sequence[int]], stops: Sequence[str]) -> Any:
    """A logits processor that leaves only `<eos>` once the text after a prompt holds a stop string: it can't be deleted then."""
    known = {tuple(prompt) for prompt in prompts}
    lengths = sorted({len(prompt) for prompt in known}, reverse=True)
    tokenizer: Any = policy.tokenizer
    kept = 2 * max(len(tokenizer(stop, add_special_tokens=False)["input_ids"]) for stop in stops) + 2

    def process(states: Tensor, logits: Tensor) -> Tensor:
        tokens = states[0].tolist()
        start = next((length for length in lengths if tuple(tokens[:length]) in known), None)
        if start is None or len(tokens) == start:  # deleted into the prompt, or nothing is written
            return logits
        if before(text := tokenizer.decode(tokens[max(start, len(tokens) - kept) :]), stops) == text:
            return logits
        ended = torch.full_like(logits, -torch.inf)
        ended[:, policy.space.eos] = 0
        return ended

    return process


def _check_sampling(given: Mapping[str, Any], where: str) -> None:
    unknown = sorted(set(given) - _SAMPLING)
    if unknown:
        raise ValueError(
            f"`{where}` must hold settings of the policy, such as {', '.join(sorted(_SAMPLING)[:4])}. Got {unknown[0]!r}."
        )
