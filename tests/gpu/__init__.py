"""The checks of `make test-gpu`: behavior that needs a GPU.

`python -m tests.gpu.run` runs them in the order of `CHECKS`.
"""
