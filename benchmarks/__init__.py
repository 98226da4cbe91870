"""Scripts that measure onbeat. Each starts from the repository's root: `python -m benchmarks.FOLDER.NAME`."""
