"""Algorithm A line by line as the paper prints it (App. A): the benchmarks measure it, and the encoding is held against it."""

from sequencematch.bench.paper_recipe import printed_algorithm_a as printed_algorithm_a
