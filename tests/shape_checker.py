"""The run-time checker of every annotation in the package, shapes included. On in tests only."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as it is for a type checker
