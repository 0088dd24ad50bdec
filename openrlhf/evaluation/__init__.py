"""Commands that train nothing: a checkpoint evaluated, models compared, a reward tried on a
dataset.
"""
