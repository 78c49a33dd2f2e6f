"""MAUVE of continuations that were saved: how near they are to the human ones   (§6.2).

The encoder turns texts into features, then mauve-text compares the features. Both results are saved: a machine that has the
encoder and another that has mauve-text can each do its part.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from tqdm.auto import tqdm

from sequencematch.data.files import flush
from sequencematch.evaluation.generations import digest
from sequencematch.experiments import networks
from sequencematch.experiments.text.cells import MISTAKEN, Budget, Cell
from sequencematch.experiments.text.continuations import path_of
from sequencematch.extras import require
from sequencematch.metrics import Encoder, hub_model, mauve, minilm
from sequencematch.metrics.mauve import MIN_SAMPLES

#: A model, a way to decode it, and the number of the draw.
Which: TypeAlias = tuple[Cell, str, int]
#: What features are rounded to when they are saved: half of float32's size, and MAUVE only clusters them.
SAVED = np.float16


def find_encoder(name: str) -> Encoder | str:
    """The encoder `minilm`, or a model on the hub or in a folder; where it can't be loaded, the reason."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return minilm(device=device) if name == "minilm" else hub_model(name, device=device)
    except (OSError, ValueError) as error:
        return f"The encoder {name} can't be loaded: {next(iter(str(error).splitlines()), '')}"


def missing_package() -> str | None:
    """Why nothing can be scored; None where mauve-text is installed."""
    try:
        require("mauve", "mauve", "MAUVE")
    except ValueError as error:
        return str(error)
    return None


def unscored(cells: Sequence[Cell], budget: Budget, folder: Path) -> list[Which]:
    """The draws that have no MAUVE yet."""
    draws = [(cell, *which) for cell in cells for which in cell.decodings(budget) if which[0] != MISTAKEN]
    return [which for which in draws if not path_of(*which, folder, "mauve").exists()]


def unencoded(cells: Sequence[Cell], budget: Budget, folder: Path) -> list[Which]:
    """Those of them that have no features yet."""
    return [w for w in unscored(cells, budget, folder) if not all(path.exists() for path in _features(*w, folder))]


def encode(cells: Sequence[Cell], budget: Budget, folder: Path, encoder: Encoder) -> None:
    """Save the features of every draw and of its human texts, unless they are there. Models may be encoded side by side."""
    missing = unencoded(cells, budget, folder)
    for cell, decoding, draw in tqdm(missing, unit="draw", disable=not missing):
        which = cell, decoding, draw, folder
        for path, texts in zip(_features(*which), _texts(*which), strict=True):
            if not path.exists():
                _save(path, texts, encoder)


def score(cells: Sequence[Cell], budget: Budget, folder: Path) -> None:
    """Write the MAUVE of every draw that has features and no MAUVE yet. Needs mauve-text, but no encoder."""
    without = unencoded(cells, budget, folder)
    missing = [which for which in unscored(cells, budget, folder) if which not in without]
    for cell, decoding, draw in tqdm(missing, unit="MAUVE", disable=not missing):
        run = partial(_scored, cell, decoding, draw, folder)
        networks.once(path_of(cell, decoding, draw, folder, "mauve"), cell, budget, run)


def _features(cell: Cell, decoding: str, draw: int, folder: Path) -> tuple[Path, Path]:
    """Where the features of a draw are kept, and those of the human texts, which are the same for every model."""
    generated = path_of(cell, decoding, draw, folder, "features").with_suffix(".npz")
    return generated, generated.with_name(f"human_{draw}.npz")


def _texts(cell: Cell, decoding: str, draw: int, folder: Path) -> tuple[list[str], list[str]]:
    """What the model wrote and what people wrote."""
    rows = json.loads(path_of(cell, decoding, draw, folder).read_text())["rows"]
    return [row["completion"] for row in rows], [row["human"] for row in rows]


def _save(path: Path, texts: Sequence[str], encoder: Encoder) -> None:
    """The features of texts that are not empty."""
    texts = [text for text in texts if text]
    features = (encoder.features(texts) if texts else np.empty((0, 0))).astype(SAVED)
    assert np.isfinite(features).all(), f"an encoder's features exceed {SAVED.__name__}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=path.parent) as scratch:
        whole = Path(scratch, path.name)
        np.savez(whole, features=features, encoder=encoder.name, texts=digest(texts))
        flush(whole)
        whole.replace(path)


def _load(path: Path, texts: Sequence[str]) -> tuple[str, dict[str, np.ndarray]]:
    """The encoder's name, and text → features."""
    texts = [text for text in texts if text]
    with np.load(path) as saved:
        if str(saved["texts"]) != digest(texts):
            raise ValueError(f"{path} has the features of other texts. Delete it and run the same command again.")
        return str(saved["encoder"]), dict(zip(texts, saved["features"].astype(np.float32), strict=True))


def _scored(cell: Cell, decoding: str, draw: int, folder: Path) -> dict[str, Any]:
    """The MAUVE of a draw; None for a model that nearly always wrote nothing."""
    both, paths = _texts(cell, decoding, draw, folder), _features(cell, decoding, draw, folder)
    (name, known), (name_human, known_human) = map(_load, paths, both)
    if name != name_human:
        raise ValueError(
            f"{paths[0]} and {paths[1].name} must be by one encoder. Got {name} and {name_human}. Delete them and run the "
            f"same command again."
        )
    known |= known_human
    encoder = Encoder(f"{name}, rounded to {SAVED.__name__}", lambda texts: np.stack([known[text] for text in texts]))
    enough = sum(map(bool, both[0])) >= MIN_SAMPLES
    return {"decoding": decoding, "draw": draw, "measure": asdict(mauve(*both, encoder)) if enough else None}
