"""`python -m sequencematch.cli`, as `accelerate launch -m sequencematch.cli train …` needs it."""

from sequencematch.cli import app

app()
