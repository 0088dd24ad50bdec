"""The checks of `make test-gpu`: behavior that needs a GPU.

`python -m tests.gpu.run` runs the checks in the order of `CHECKS`.
"""
