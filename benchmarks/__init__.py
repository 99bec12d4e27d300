"""Speed, as ratios measured in one run on one machine. `python -m benchmarks NAME --json` prints one JSON object per
line."""
