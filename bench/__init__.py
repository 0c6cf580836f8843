"""Same-run ratio benchmarks against plain tools; `make bench` runs them all and prints one table."""
