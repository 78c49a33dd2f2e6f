"""MAUVE of continuations that were saved, on this machine or another: how near they are to the human ones   (§6.2)."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from sequencematch.evaluation.registry import load_encoder
from sequencematch.experiments import networks
from sequencematch.experiments.text.cells import MISTAKEN, Budget, Cell
from sequencematch.experiments.text.continuations import path_of
from sequencematch.extras import require
from sequencematch.metrics import Encoder, mauve
from sequencematch.metrics.mauve import MIN_SAMPLES


def find_encoder(name: str) -> Encoder | str:
    """MAUVE's encoder; or, where mauve-text or the encoder can't be had, the reason."""
    try:
        require("mauve", "mauve", "MAUVE")
        return load_encoder(name, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except ValueError as error:
        return str(error)


def score(cells: Sequence[Cell], budget: Budget, folder: Path, encoder: Encoder | str) -> None:
    """Write the MAUVE of every draw that has none yet; nothing without an encoder."""
    if isinstance(encoder, str):
        return
    features = cache(lambda texts: encoder.features(texts))  # those of human texts serve for every model
    known = Encoder(encoder.name, lambda texts: features(tuple(texts)))
    missing = [which for which in _draws(cells, budget) if not path_of(*which, folder, "mauve").exists()]
    for cell, decoding, draw in tqdm(missing, unit="MAUVE", disable=not missing):
        run = partial(_scored, cell, decoding, draw, folder, known)
        networks.once(path_of(cell, decoding, draw, folder, "mauve"), cell, budget, run)


def _draws(cells: Sequence[Cell], budget: Budget) -> list[tuple[Cell, str, int]]:
    return [(cell, *which) for cell in cells for which in cell.decodings(budget) if which[0] != MISTAKEN]


def _scored(cell: Cell, decoding: str, draw: int, folder: Path, encoder: Encoder) -> dict[str, Any]:
    """The MAUVE of a draw; None for a model that nearly always wrote nothing."""
    rows = json.loads(path_of(cell, decoding, draw, folder).read_text())["rows"]
    generated, human = ([row[name] for row in rows] for name in ("completion", "human"))
    enough = sum(map(bool, generated)) >= MIN_SAMPLES
    return {"decoding": decoding, "draw": draw, "measure": asdict(mauve(generated, human, encoder)) if enough else None}
