"""The checks of `make test-gpu`: what only a GPU can show. `python -m tests.gpu.run` runs them in
order of `CHECKS`.
"""
