"""Networks on path-star graphs, beside their peers; `study.py` is the experiment."""
